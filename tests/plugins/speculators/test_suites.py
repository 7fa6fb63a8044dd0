"""Drafters with a network pass the suite of device drafters."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bien.core.api import Context, DeviceSpeculator
from bien.core.architectures.registry import read_architecture
from bien.core.testing.device_speculator import DeviceSpeculatorSuite
from bien.core.testing.toy import toy_config, write_toy
from bien.plugins.speculators import draft_model, eagle3, mtp
from tests.core.executors.latent_models import INDEXER, SHAPE
from tests.plugins.speculators.folders import write_eagle3, write_mtp, write_predicting

_kept: list[tempfile.TemporaryDirectory[str]] = []  # until the process ends


def folder() -> Path:
    _kept.append(tempfile.TemporaryDirectory())
    return Path(_kept[-1].name)


@cache
def eagle3_folder() -> str:
    return str(write_eagle3(folder(), "specforge", fc_norm=True, norm_output=True))


@cache
def mtp_folder() -> str:
    return str(write_mtp(folder()))


@cache
def small_folder() -> str:
    return str(write_toy(folder(), "qwen3", seed=3, num_hidden_layers=2, hidden_size=32))


@cache
def toy_folder(layers: int) -> str:
    return str(write_toy(folder(), num_hidden_layers=layers, tie_word_embeddings=False))


@cache
def predicting_folder(kind: str) -> Path:
    configs: dict[str, dict[str, Any]] = {
        "glm": toy_config("glm4_moe", num_hidden_layers=2),
        "latent": {
            "model_type": "glm_moe_dsa",
            "hidden_act": "silu",
            "num_nextn_predict_layers": 2,
            **SHAPE,
            **INDEXER,
            "num_hidden_layers": 2,
        },
    }
    return write_predicting(folder(), configs[kind])


def made(module: Any, target: str, **parameters: Any) -> DeviceSpeculator:
    (provider,) = module.bien_providers()
    context = Context(architecture=read_architecture(target, 4, "float64"))
    drafter: DeviceSpeculator = provider.factory(provider.config_type(**parameters), context)
    return drafter


class TestEagle3(DeviceSpeculatorSuite):
    layers = 6

    def build(self) -> DeviceSpeculator:
        return made(eagle3, toy_folder(6), path=eagle3_folder(), sampled=True)


class TestEagle3Tree(DeviceSpeculatorSuite):
    layers = 6

    def build(self) -> DeviceSpeculator:
        return made(
            eagle3, toy_folder(6), path=eagle3_folder(), topology="tree", max_drafts=7, depth=3, top_k=3
        )


@pytest.mark.slow
class TestMtpOfAFolder(DeviceSpeculatorSuite):
    def build(self) -> DeviceSpeculator:
        return made(mtp, toy_folder(4), path=mtp_folder())


class TestMtp(DeviceSpeculatorSuite):
    layers = 2

    def target(self, folder: Path) -> Path:
        return predicting_folder("glm")

    def build(self) -> DeviceSpeculator:
        return made(mtp, str(predicting_folder("glm")), sampled=True)


@pytest.mark.slow
class TestMtpOfLatents(DeviceSpeculatorSuite):
    layers = 2

    def target(self, folder: Path) -> Path:
        return predicting_folder("latent")

    def build(self) -> DeviceSpeculator:
        return made(mtp, str(predicting_folder("latent")), max_drafts=2)


class TestDraftModel(DeviceSpeculatorSuite):
    def build(self) -> DeviceSpeculator:
        return made(draft_model, toy_folder(4), model=small_folder(), max_drafts=3)
