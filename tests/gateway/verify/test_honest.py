"""An honest index is never doubted, whatever comes and goes."""

from __future__ import annotations

import asyncio
import random

import pytest

from bien.core.clock import VirtualClock
from bien.gateway.core import Gateway
from bien.gateway.verify.options import VerifyOptions
from tests.gateway.test_with_engines import worker
from tests.gateway.verify.engines import Cacher
from tests.gateway.verify.traffic import make, session

CLOCK = VirtualClock()
WORKERS = 4


async def upheaval(gateway: Gateway, workers: list[Cacher], rng: random.Random) -> None:
    """Caches are emptied, workers die and come back with nothing, and with another boot."""
    while True:
        await CLOCK.sleep(rng.uniform(1.0, 20.0))
        at = rng.randrange(WORKERS)
        old = workers[at]
        if rng.random() < 0.5:
            old.restart()
            continue
        old.die()
        await CLOCK.sleep(rng.uniform(0.0, 2.0))
        workers[at] = Cacher(old.info.id, old.blocks, slots=2)
        gateway.join(workers[at])


async def impatient(gateway: Gateway, number: int, pause: float) -> None:
    """A session whose client leaves in the middle."""
    try:
        async with asyncio.timeout(pause * random.Random(number).uniform(0.2, 5.0)):
            await session(gateway, number, 6, pause, ("", "a", "b"))
    except TimeoutError:
        pass


# Requests meet caches that hold everything, or evict without end, and queues of every length.
@pytest.mark.parametrize("blocks", [20_000, 600, 150])
@pytest.mark.parametrize("pause", [0.2, 2.0, 15.0])
def test_no_alarm(blocks: int, pause: float) -> None:
    async def main() -> tuple[int, int]:
        workers = [Cacher(f"w{i}", blocks, slots=2) for i in range(WORKERS)]
        gateway = make(workers, VerifyOptions())
        verifier = gateway.verifier
        assert verifier is not None
        beside = asyncio.create_task(upheaval(gateway, workers, random.Random(blocks)))
        for wave in range(3):
            first = 1000 * wave
            jobs = [session(gateway, first + i, 5, pause, ("", "a", "b")) for i in range(40)]
            jobs += [impatient(gateway, first + 500 + i, pause) for i in range(15)]
            results = await asyncio.gather(*jobs, return_exceptions=True)
            assert sum(isinstance(one, BaseException) for one in results) < 30  # streams that a death cut
            assert {standing.falls for standing in verifier.standings.values()} == {0}
        beside.cancel()
        counts = [standing.counts for standing in verifier.standings.values()]
        assert sum(c["over"] + c["under"] for c in counts) <= 0.02 * sum(sum(c.values()) for c in counts)
        assert verifier.lost <= verifier.probes  # a worker that dies does not answer
        started, hits = gateway.totals.started, gateway.totals.cached_tokens
        await gateway.close()
        return started, hits

    started, hits = VirtualClock.run(main())
    assert started > 500
    assert hits


@pytest.mark.parametrize("blocks", [400, 60])
@pytest.mark.parametrize("kinds", ["full", "full+window", "full+state", "full+window+state+draft"])
def test_no_alarm_of_real_engines(kinds: str, blocks: int) -> None:
    """A canary is right whatever groups there are, and so is what is claimed of a crowd's prompts."""

    async def main() -> None:
        clients = [worker(f"w{i}", kinds, blocks) for i in range(2)]
        gateway = make(clients, VerifyOptions())
        verifier = gateway.verifier
        assert verifier is not None
        await verifier.greeted(100.0)
        assert (verifier.probes, verifier.lost) == (2, 0)
        jobs = [session(gateway, i, 4, 1.0, ("", "a")) for i in range(12)]
        await asyncio.gather(*jobs)
        assert gateway.totals.cached_tokens
        for standing in verifier.standings.values():
            assert standing.falls == 0
            assert standing.counts["over"] + standing.counts["under"] <= 2
        await gateway.close()

    VirtualClock.run(main())
