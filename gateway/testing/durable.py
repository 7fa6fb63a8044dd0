"""Conformance suite of indexes with a store. Subclass it in your tests and give `build`:

class TestMine(DurableSuite):
    def build(self, clock):
        return MyIndex(MyConfig(url=..., lease_seconds=0.6), Context(clock=clock))

Workers publish as they do in truth, through `Publisher`; times are real, so give short ones.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import numpy as np

from bien.core.clock import Clock, WallClock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.prefix import groups_from, usable_blocks
from bien.core.worker.messages import Snapshot, WorkerInfo
from bien.core.worker.published import Publication
from bien.core.worker.publisher import Publisher
from bien.gateway.index import DurableIndex
from bien.gateway.testing.index import BLOCK, make_chain, make_info

KINDS = ("full", "latent", "window", "state")
PATIENCE = 20.0  # seconds until something that must happen counts as not happening


async def until(condition: Callable[[], bool], why: str = "") -> None:
    """AssertionError when it does not come true."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await WallClock().sleep(0.005)
    except TimeoutError:
        raise AssertionError(why or "it did not happen") from None


class PublishingWorker:
    """A worker of which there is only the cache; made inside a running loop."""

    def __init__(self, publication: Publication, info: WorkerInfo) -> None:
        self.info = info
        self.seq = 0
        self.asked = 0  # snapshots taken for the publisher
        self._cached: dict[tuple[int, str, bytes], bytes] = {}  # group, tier, block -> parent
        self._loop = asyncio.get_running_loop()
        self.publisher = Publisher(publication, info, "127.0.0.1", 1, self._ask)
        self.publisher.start()

    def tell(self, *events: KVEvent, lose: bool = False) -> EventBatch:
        """One batch; with `lose` nobody publishes it."""
        self.seq += 1
        for event in events:
            self._apply(event)
        batch = EventBatch(self.info.id, 0, self.info.generation, self.seq, list(events))
        if not lose:
            self.publisher.add(batch)
        return batch

    def snapshot(self) -> Snapshot:
        events = [KVEvent("stored", g, parent, block, t) for (g, t, block), parent in self._cached.items()]
        return Snapshot(self.info.generation, self.seq, events)

    async def close(self) -> None:
        await self.publisher.close()

    async def kill(self) -> None:
        """It falls silent; what it has published stays until it expires."""
        task = self.publisher._task
        assert task is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _ask(self) -> None:
        self.asked += 1
        self._loop.call_soon(lambda: self.publisher.snapshot(self.snapshot()))

    def _apply(self, event: KVEvent) -> None:
        blocks = [event.hashes[i : i + HASH_BYTES] for i in range(0, len(event.hashes), HASH_BYTES)]
        parent = event.parent
        if event.op == "cleared":
            self._cached = {key: p for key, p in self._cached.items() if key[1] != event.tier}
        for block in blocks:
            if event.op == "stored":
                self._cached[event.group, event.tier, block] = parent
                parent = block
            else:
                self._cached.pop((event.group, event.tier, block), None)


class History:
    """Random changes of one worker's cache, and what they leave usable."""

    def __init__(self, rng: random.Random, blocks: list[bytes]) -> None:
        self._rng = rng
        self._blocks = blocks
        self.kinds = tuple(rng.choice(KINDS) for _ in range(rng.randint(1, 3)))
        self.windows = tuple(rng.randint(1, 14) if kind == "window" else 0 for kind in self.kinds)
        self._have = [np.zeros(len(blocks), np.bool_) for _ in self.kinds]

    @property
    def usable(self) -> int:
        return usable_blocks(groups_from(self.kinds, self.windows, BLOCK), self._have)

    def change(self) -> KVEvent:
        rng, blocks = self._rng, self._blocks
        group, start = rng.randrange(len(self.kinds)), rng.randrange(len(blocks))
        stop = rng.randint(start + 1, len(blocks))
        stored = rng.random() < 0.7
        self._have[group][start:stop] = stored
        parent = blocks[start - 1] if start and stored else b""
        return KVEvent("stored" if stored else "removed", group, parent, b"".join(blocks[start:stop]))


class DurableSuite:
    """What every index with a store must do, whatever the store is."""

    rounds = 8
    """Random histories."""

    def build(self, clock: Clock) -> DurableIndex:
        """A fresh index on `clock`, not started, with a lease of less than a second. All of one test share
        one store, which is empty when the test begins."""
        raise NotImplementedError("a suite needs `def build(self, clock): return <your index>`")

    async def test_a_new_index_starts_from_what_is_stored(self) -> None:
        """Random histories: an index fed by frames and one that was not there agree with the pools."""
        blocks = make_chain("stored", 9)
        for n in range(self.rounds):
            rng = random.Random(n)
            history = History(rng, blocks)
            info = make_info(f"w{n}", history.kinds, history.windows)
            first = self.build(WallClock())
            await first.start()
            worker = PublishingWorker(first.publication, info)
            first.join(info)
            for _ in range(rng.randint(0, 30)):
                assert first.apply(worker.tell(*(history.change() for _ in range(rng.randint(1, 3)))))
                if rng.random() < 0.2:
                    await WallClock().sleep(0.01)
            assert self._usable(first, blocks, info.id) == history.usable
            await first.stop()  # it is gone; the worker goes on
            first.close()
            for _ in range(rng.randint(0, 5)):
                worker.tell(history.change())
            second = self.build(WallClock())
            await second.start()
            second.join(info)
            await self._restored(second, worker)
            assert self._usable(second, blocks, info.id) == history.usable, f"history {n}"
            assert second.apply(worker.tell(history.change())), "its frames go on where the store ends"
            assert self._usable(second, blocks, info.id) == history.usable
            await worker.close()
            await second.stop()
            second.close()

    async def test_what_is_not_whole_is_not_taken(self) -> None:
        index, worker, blocks = await self._one()
        worker.tell(KVEvent("stored", hashes=b"".join(blocks[:3])))
        await self._restored(index, worker)
        worker.tell(KVEvent("stored", 0, blocks[2], blocks[3]), lose=True)
        late = worker.tell(KVEvent("stored", 0, blocks[3], blocks[4]))
        await until(lambda: worker.publisher._seq == late.seq)
        assert not await index.restore("w", 0), "a batch is missing"
        assert self._usable(index, blocks, "w") == 3, "nothing has changed"
        assert not index.apply(late)
        await self._end(index, worker)

    async def test_another_life_starts_empty(self) -> None:
        index, worker, blocks = await self._one()
        worker.tell(KVEvent("stored", hashes=b"".join(blocks)))
        await self._restored(index, worker)
        assert self._usable(index, blocks, "w") == len(blocks)
        again = PublishingWorker(index.publication, make_info(generation="2"))
        index.join(again.info)
        assert self._usable(index, blocks, "w") == 0
        again.tell(KVEvent("stored", hashes=b"".join(blocks[:2])))
        await self._restored(index, again)
        assert self._usable(index, blocks, "w") == 2
        worker.tell(KVEvent("stored", hashes=b"".join(blocks)))
        await until(lambda: worker.publisher._held is False, "the older life is fenced off")
        assert [lease.info.generation for lease in await index.leases()] == ["2"]
        index.join(worker.info)
        assert not await index.restore("w", 0), "nothing is stored of that life any more"
        await worker.close()
        assert [lease.info.generation for lease in await index.leases()] == ["2"]
        await self._end(index, again)

    async def test_leases_end_with_their_workers(self) -> None:
        index, worker, _ = await self._one()
        other = PublishingWorker(index.publication, make_info("other"))
        await until(lambda: worker.publisher._held and other.publisher._held)
        found = {lease.info.id: lease for lease in await index.leases()}
        assert set(found) == {"w", "other"}
        assert found["w"].info == worker.info and (found["w"].host, found["w"].port) == ("127.0.0.1", 1)
        await other.close()
        assert [lease.info.id for lease in await index.leases()] == ["w"], "taken back at a clean end"
        await worker.kill()
        left: list[str] = ["w"]
        async with asyncio.timeout(PATIENCE):
            while left:
                left = [lease.info.id for lease in await index.leases()]
                await WallClock().sleep(0.02)
        assert not await index.restore("w", 0)
        await self._end(index, worker)

    async def test_a_stranger_is_not_restored(self) -> None:
        index, worker, _ = await self._one()
        assert not await index.restore("stranger", 0)
        index.join(make_info("unpublished"))
        assert not await index.restore("unpublished", 0)
        assert index.health.state in ("ok", "degraded")
        await self._end(index, worker)

    async def _one(self) -> tuple[DurableIndex, PublishingWorker, list[bytes]]:
        index = self.build(WallClock())
        await index.start()
        worker = PublishingWorker(index.publication, make_info())
        index.join(worker.info)
        return index, worker, make_chain("one", 9)

    async def _restored(self, index: DurableIndex, worker: PublishingWorker) -> None:
        await until(lambda: worker.publisher._seq == worker.seq and not worker.publisher._asked)
        async with asyncio.timeout(PATIENCE):
            while not await index.restore(worker.info.id, 0):
                await WallClock().sleep(0.005)

    def _usable(self, index: DurableIndex, blocks: list[bytes], worker: str) -> int:
        return index.overlaps(b"".join(blocks), [(worker, 0)])[0]

    async def _end(self, index: DurableIndex, worker: PublishingWorker) -> None:
        await worker.close()
        await index.stop()
        index.close()
