"""Where an index gets a worker's cache from: the store, or the worker."""

from __future__ import annotations

import asyncio

from bien.core.clock import VirtualClock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.worker.client import WorkerListener
from bien.core.worker.messages import Snapshot, StepFrame
from bien.gateway.feed import STORED
from bien.gateway.testing.fake_worker import FakeWorker
from bien.gateway.testing.index import make_chain
from tests.gateway.conftest import MakeGateway
from tests.gateway.durable import StoredIndex
from tests.gateway.test_core import virtual

CLOCK = VirtualClock()
BLOCKS = make_chain("feed", 6)


def store(worker: FakeWorker, index: StoredIndex, seq: int | None = None) -> None:
    """What the worker has said so far is in the store; or as if it had said `seq` batches."""
    snapshot = Snapshot(worker.info.generation, worker.seq if seq is None else seq)
    parent = b""
    for block in worker.cached:
        snapshot.events.append(KVEvent("stored", parent=parent, hashes=block))
        parent = block
    index.stored[worker.info.id] = snapshot, []


def usable(index: StoredIndex) -> int:
    return index.overlaps(b"".join(BLOCKS), [("w0", 0)])[0]


def say(worker: FakeWorker, n: int) -> None:
    worker.event(KVEvent("stored", parent=BLOCKS[n - 1] if n else b"", hashes=BLOCKS[n]))


@virtual
async def test_a_gateway_that_starts_takes_the_cache_from_the_store(make_gateway: MakeGateway) -> None:
    worker, index = FakeWorker(CLOCK, auto=False), StoredIndex(CLOCK)
    for n in range(3):
        say(worker, n)
    store(worker, index)
    gateway = make_gateway(worker, index=index)
    say(worker, 3)  # while the store is read
    await gateway.warm(5.0)
    assert usable(index) == 4
    assert worker.snapshots == 0 and gateway._feed.asked == 0 and gateway._feed.restored == 1
    say(worker, 4)
    assert usable(index) == 5
    await gateway.close()
    assert index.stopped


@virtual
async def test_a_store_that_is_a_little_behind_is_read_again(make_gateway: MakeGateway) -> None:
    worker, index = FakeWorker(CLOCK, auto=False), StoredIndex(CLOCK)
    say(worker, 0)
    store(worker, index)
    say(worker, 1)  # published later than the gateway looks
    gateway = make_gateway(worker, index=index)
    say(worker, 2)
    await CLOCK.sleep(0.02)
    assert usable(index) < 3
    snapshot, _ = index.stored["w0"]
    late = EventBatch("w0", 0, worker.info.generation, 2, [KVEvent("stored", 0, BLOCKS[0], BLOCKS[1])])
    index.stored["w0"] = snapshot, [late]
    await gateway.warm(5.0)
    assert usable(index) == 3 and worker.snapshots == 0 and index.restores == 2
    await gateway.close()


@virtual
async def test_a_store_that_stays_behind_is_given_up_for_the_worker(make_gateway: MakeGateway) -> None:
    worker, index = FakeWorker(CLOCK, auto=False), StoredIndex(CLOCK)
    say(worker, 0)
    store(worker, index)
    say(worker, 1)
    gateway = make_gateway(worker, index=index)
    say(worker, 2)
    await gateway.warm(5.0)
    assert usable(index) == 3 and index.restores == STORED and worker.snapshots == 1
    assert gateway._feed.asked == 1 and gateway._feed.restored == 0
    await gateway.close()


@virtual
async def test_an_empty_store_or_one_that_fails_costs_a_question_to_the_worker(
    make_gateway: MakeGateway,
) -> None:
    for fault in (None, RuntimeError("a bug")):
        worker, index = FakeWorker(CLOCK, auto=False), StoredIndex(CLOCK)
        index.fault = fault
        say(worker, 0)
        gateway = make_gateway(worker, index=index)
        await gateway.warm(5.0)
        assert usable(index) == 1 and worker.snapshots == 1 and index.restores == 1
        assert gateway.totals.faults == (fault is not None)
        await gateway.close()


@virtual
async def test_a_gap_heals_from_the_store(make_gateway: MakeGateway) -> None:
    worker, index = FakeWorker(CLOCK, auto=False), StoredIndex(CLOCK)
    say(worker, 0)
    store(worker, index)
    gateway = make_gateway(worker, index=index)
    await gateway.warm(5.0)
    worker.event(KVEvent("stored", parent=BLOCKS[0], hashes=BLOCKS[1]), lose=True)
    store(worker, index)
    say(worker, 2)
    await gateway.warm(5.0)
    assert usable(index) == 3 and worker.snapshots == 0 and gateway._feed.resyncs == 1
    await gateway.close()


@virtual
async def test_who_waits_for_warmth_waits_no_longer_than_he_said(make_gateway: MakeGateway) -> None:
    class Mute(FakeWorker):
        async def snapshot(self, dp_rank: int = 0) -> Snapshot:
            await asyncio.Event().wait()
            raise AssertionError

    gateway = make_gateway(Mute(CLOCK, auto=False))
    await gateway.warm(3.0)
    assert CLOCK.time() == 3.0
    await gateway.close()


class Early(FakeWorker):
    """Has had a frame before anybody listened, as a client of a socket may."""

    early: EventBatch

    def attach(self, listener: WorkerListener) -> None:
        super().attach(listener)
        listener.on_frame(self, StepFrame(batch=self.early))


@virtual
async def test_what_a_client_heard_before_it_joined_shows_that_the_store_is_behind(
    make_gateway: MakeGateway,
) -> None:
    """A worker marks where it is when a gateway joins; nothing else may come of it for long."""
    worker, index = Early(CLOCK, auto=False), StoredIndex(CLOCK)
    say(worker, 0)
    store(worker, index)
    say(worker, 1)  # published later than the gateway looks
    worker.seq += 1
    worker.early = EventBatch("w0", 0, worker.info.generation, worker.seq, [])
    gateway = make_gateway(worker, index=index)
    await CLOCK.sleep(0.02)
    store(worker, index)
    await gateway.warm(5.0)
    assert usable(index) == 2 and worker.snapshots == 0 and index.restores == 2
    await gateway.close()
