"""Worlds whose gateways run in the test's own process, so that faults can be planted in them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bien.core.deployment import Deployment, Selection
from bien.replay.chaos import moves, world
from bien.replay.chaos.case import CaseReport
from bien.replay.chaos.engine import Habits
from bien.replay.chaos.gateways import Start
from bien.replay.chaos.run import chosen, put_through
from bien.replay.chaos.world import own_world
from bien.replay.stack import Stack

# No term but the cost of computing: prompts of tests are too short to outweigh others.
PLAIN_ROUTER = Selection("kv-aware", {"fair": 0.0, "learn": False})


class Here:
    def __init__(self, stack: Stack) -> None:
        self.url, self.pid = stack.url, os.getpid()
        self.stop = stack.close


async def start_here(deployment: Deployment, attach: bool, canary: bool) -> Here:
    return Here(await Stack.start(deployment, attach=attach, canary=canary))


@asynccontextmanager
async def small_world(start: Start = start_here) -> Any:
    # Paths of sockets are short: pytest's own folders are not.
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        async with own_world(Path(folder), start=start) as made:
            made.gateway = {"router": PLAIN_ROUTER}
            yield made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter prompts."""
    monkeypatch.setattr(moves, "PLAIN", 9)
    monkeypatch.setattr(moves, "CHARACTERS", 700)
    monkeypatch.setattr(world, "GOOD", Habits(token_ms=0.05))


@pytest.fixture
def put() -> Callable[..., Any]:
    """One case through a small world, whose gateways have other fields."""

    async def one(
        number: int, index: dict[str, Any] | None = None, start: Start = start_here, **gateway: Any
    ) -> CaseReport:
        async with small_world(start) as made:
            made.gateway |= gateway
            made.index = index or {}
            [case] = chosen([number])
            return await put_through(made, case)

    return one
