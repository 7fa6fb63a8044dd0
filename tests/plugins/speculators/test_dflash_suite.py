"""Conformance of the block drafters, each form of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from bien.core.api import DeviceSpeculator
from bien.core.testing.device_speculator import DeviceSpeculatorSuite
from tests.plugins.speculators.block_folders import (
    FULL,
    SLIDING,
    TARGET_LAYERS,
    second,
    spec_forge,
    write_drafter,
    z_lab,
)
from tests.plugins.speculators.test_dflash import build


class BlockSuite(DeviceSpeculatorSuite):
    layers = TARGET_LAYERS
    kind = "dflash"
    config: ClassVar[dict[str, Any]]
    parameters: ClassVar[dict[str, Any]] = {}
    folder: ClassVar[Path]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def written(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.folder = write_drafter(tmp_path_factory.mktemp("drafter"), cls.config)

    def build(self) -> DeviceSpeculator:
        return build(self.kind, self.folder, **self.parameters)


class TestDFlash(BlockSuite):
    config = {**z_lab(), "layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 11}


class TestDFlash2(BlockSuite):
    config = second()


class TestDSpark(BlockSuite):
    kind = "dspark"
    config = spec_forge(markov_head_type="rnn")
    parameters: ClassVar[dict[str, Any]] = {"temperatures": [0.5, 1.0, 2.0, 1.0, 1.0, 1.0], "window": 13}
