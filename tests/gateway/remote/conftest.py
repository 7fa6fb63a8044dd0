"""Stand-ins of servers, and bytes that vLLM's and SGLang's own publishers made (recorded/)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bien.gateway.testing.publisher import EventPublisher
from bien.gateway.testing.stand_in import StandIn

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


@pytest.fixture
def stand_in() -> Any:
    """The class of a server that stands in for others'."""
    return StandIn


@pytest.fixture
def publisher_at() -> Any:
    """Makes a publisher of KV events with its sockets in a folder."""

    def make(folder: Path, long: bool = True) -> EventPublisher:
        folder.mkdir()
        return EventPublisher(f"ipc://{folder}/events", f"ipc://{folder}/replay", long)

    return make
