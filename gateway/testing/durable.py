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
        self.seqs = [0] * info.dp_ranks
        self.asked = 0  # snapshots taken for the publisher
        # Of each rank: group, tier, block -> parent.
        self._cached: list[dict[tuple[int, str, bytes], bytes]] = [{} for _ in self.seqs]
        self._loop = asyncio.get_running_loop()
        self.publisher = Publisher(publication, info, "127.0.0.1", 1, self._ask)
        self.publisher.start()

    @property
    def seq(self) -> int:
        """Of the first rank."""
        return self.seqs[0]

    def tell(self, *events: KVEvent, lose: bool = False, dp_rank: int = 0) -> EventBatch:
        """One batch; with `lose` nobody publishes it."""
        self.seqs[dp_rank] += 1
        for event in events:
            self._apply(event, self._cached[dp_rank])
        batch = EventBatch(self.info.id, dp_rank, self.info.generation, self.seqs[dp_rank], list(events))
        if not lose:
            self.publisher.add(batch)
        return batch

    def snapshot(self, dp_rank: int = 0) -> Snapshot:
        cached = self._cached[dp_rank]
        events = [KVEvent("stored", g, parent, block, t) for (g, t, block), parent in cached.items()]
        return Snapshot(self.info.generation, self.seqs[dp_rank], events, dp_rank)

    async def close(self) -> None:
        await self.publisher.close()

    async def kill(self) -> None:
        """It falls silent; what it has published stays until it expires."""
        task = self.publisher._task
        assert task is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _ask(self, dp_rank: int) -> None:
        self.asked += 1
        self._loop.call_soon(lambda: self.publisher.snapshot(self.snapshot(dp_rank)))

    @staticmethod
    def _apply(event: KVEvent, cached: dict[tuple[int, str, bytes], bytes]) -> None:
        blocks = [event.hashes[i : i + HASH_BYTES] for i in range(0, len(event.hashes), HASH_BYTES)]
        parent = event.parent
        if event.op == "cleared":
            for key in [key for key in cached if key[1] == event.tier]:
                del cached[key]
        for block in blocks:
            if event.op == "stored":
                cached[event.group, event.tier, block] = parent
                parent = block
            else:
                cached.pop((event.group, event.tier, block), None)


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

    async def test_each_rank_of_a_worker_has_its_own(self) -> None:
        """Its ranks' batches come mixed, each with numbers of its own; a new index finds all of them."""
        rng, blocks = random.Random(7), make_chain("ranks", 12)
        index = self.build(WallClock())
        await index.start()
        info = make_info(dp_ranks=3)
        worker = PublishingWorker(index.publication, info)
        index.join(info)
        held = [0, 0, 0]
        for n in range(40):
            rank = rng.randrange(3)
            if held[rank] < len(blocks):
                event = KVEvent(
                    "stored", 0, blocks[held[rank] - 1] if held[rank] else b"", blocks[held[rank]]
                )
                held[rank] += 1
            else:
                held[rank] -= 1
                event = KVEvent("removed", 0, b"", blocks[held[rank]])
            assert index.apply(worker.tell(event, dp_rank=rank))
            if n % 9 == 0:
                await WallClock().sleep(0.01)
        places = [("w", rank) for rank in range(3)]
        again = self.build(WallClock())
        await again.start()
        again.join(info)
        await self._restored(again, worker)
        for one in (index, again):
            assert one.overlaps(b"".join(blocks), places) == held
        assert [lease.seqs for lease in await again.leases()] in ([tuple(worker.seqs)], [])
        assert again.apply(worker.tell(KVEvent("cleared"), dp_rank=1))
        assert again.overlaps(b"".join(blocks), places) == [held[0], 0, held[2]]
        await again.stop()
        again.close()
        await self._end(index, worker)

    async def test_what_is_not_whole_is_not_taken(self) -> None:
        index, worker, blocks = await self._one()
        worker.tell(KVEvent("stored", hashes=b"".join(blocks[:3])))
        await self._restored(index, worker)
        worker.tell(KVEvent("stored", 0, blocks[2], blocks[3]), lose=True)
        late = worker.tell(KVEvent("stored", 0, blocks[3], blocks[4]))
        await until(lambda: worker.publisher.ranks[0].seq == late.seq)
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
        ranks = worker.publisher.ranks
        await until(lambda: not any(rank.asked for rank in ranks) and [r.seq for r in ranks] == worker.seqs)
        async with asyncio.timeout(PATIENCE):
            for rank in range(len(ranks)):
                while not await index.restore(worker.info.id, rank):
                    await WallClock().sleep(0.005)

    def _usable(self, index: DurableIndex, blocks: list[bytes], worker: str) -> int:
        return index.overlaps(b"".join(blocks), [(worker, 0)])[0]

    async def _end(self, index: DurableIndex, worker: PublishingWorker) -> None:
        await worker.close()
        await index.stop()
        index.close()
