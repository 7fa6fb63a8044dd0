"""Bytes that vLLM's and SGLang's own publishers made (recorded/), and what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parent / "recorded"
PUBLISHERS = ["vllm-arrays", "vllm-maps", "vllm-whole-maps", "vllm-newest", "sglang-arrays", "sglang-maps"]


def load(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


@pytest.fixture
def recorded() -> Callable[[str], Any]:
    """What was recorded under a name."""
    return load


@pytest.fixture(params=PUBLISHERS)
def publisher(request: pytest.FixtureRequest) -> Any:
    """One project's frames, by frame: topic, number, payload."""
    found = load(request.param)
    for key in ("frames", "replayed_from_2"):
        found[key] = [[bytes.fromhex(part) for part in frame] for frame in found[key]]
    return found
