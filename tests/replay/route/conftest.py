"""A small trace, the fleet that serves it, and runs on both."""

from __future__ import annotations

import random

import msgspec
import pytest

from bien.core.deployment import Deployment, load_deployment
from bien.core.plugins import PluginManager
from bien.core.request import BlockRuns
from bien.replay.commands.deployment import EXAMPLES
from bien.replay.route.policies import with_router
from bien.replay.route.stack import Bench
from bien.replay.route.variant import Seen, Variant
from bien.traces.model import Session, Stream, Turn

WORKERS, CAPACITY, TREES = 3, 32768, 9


def conversation(name: str, rng: random.Random, turns: int = 8) -> Session:
    """One stream whose prompts grow by some hundred tokens."""
    out, prompt = [], rng.randrange(1000, 8000)
    for _ in range(turns):
        output = rng.randrange(5, 60)
        gap = rng.uniform(0.5, 8.0)  # no two at one time: their order would be an accident
        out.append(Turn(BlockRuns.of([(0, prompt)]), BlockRuns.of([(prompt, output)]), gap=gap))
        prompt += output + rng.randrange(50, 900)
    return Session(name, [Stream(0, out)], scope=name)


@pytest.fixture(scope="session")
def manager() -> PluginManager:
    return PluginManager.load("")


@pytest.fixture(scope="session")
def sessions() -> list[Session]:
    rng = random.Random(5)
    found = [conversation(f"s{i}", rng) for i in range(20)]
    # Two have a sub-agent that begins with the parent's prompt, and a turn that waits for it.
    for session in found[:2]:
        main = session.streams[0]
        first = main.turns[0]
        child = Turn(first.input.join(BlockRuns.of([(1 << 40, 700)])), BlockRuns.of([(1 << 41, 30)]))
        session.streams.append(Stream(1, [child], parent=0, spawned_after=0, joined_before=2))
    return found


@pytest.fixture(scope="session")
def fleet() -> Deployment:
    """Prefill is ten times as slow as the built-in one's, so that a small trace makes queues."""
    found = load_deployment("fleet", [EXAMPLES])
    pool = found.pool[0]
    executor = msgspec.structs.replace(
        pool.executor, parameters={**pool.executor.parameters, "token_ms": 0.3}
    )
    small = msgspec.structs.replace(pool, count=WORKERS, kv_tokens=CAPACITY, executor=executor)
    return msgspec.structs.replace(found, pool=(small,))


@pytest.fixture(scope="session")
def bench(sessions: list[Session], manager: PluginManager) -> Bench:
    return Bench(sessions, manager)


@pytest.fixture(scope="session")
def round_robin(bench: Bench, fleet: Deployment) -> Seen:
    return bench.run(Variant("round-robin", with_router(fleet, "round-robin"), TREES, reasons=True))


@pytest.fixture(scope="session")
def kv_aware(bench: Bench, fleet: Deployment) -> Seen:
    return bench.run(Variant("kv-aware", with_router(fleet, "kv-aware"), TREES, reasons=True))
