from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from bien.core.clock import VirtualClock
from bien.core.errors import (
    BienError,
    ContextLengthError,
    DeploymentError,
    OverloadError,
    PluginFault,
    UserError,
    WorkerDiedError,
)
from bien.core.kv.events import KVEvent
from bien.core.kv.hashing import HASH_BYTES, extend_chain, tenant_key
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.worker.messages import Output
from bien.gateway.core import Gateway
from bien.gateway.routing import Decision, Outcome
from bien.gateway.testing.fake_worker import FakeWorker, fake_info
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.routers.round_robin import RoundRobin

MakeGateway = Callable[..., Gateway]
Main = Callable[[MakeGateway], Coroutine[Any, Any, None]]
CLOCK = VirtualClock()


def virtual(main: Main) -> Callable[[MakeGateway], None]:
    @functools.wraps(main)
    def run(make_gateway: MakeGateway) -> None:
        VirtualClock.run(main(make_gateway))

    del run.__wrapped__  # pytest would see a coroutine
    return run


def request(n: int = 12, max_tokens: int = 3, first: int = 1, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=more.pop("seed", None))
    return GenerateRequest(f"r{first}", TokenIds.of(range(first, first + n)), sampling, **more)


async def collect(gateway: Gateway, work: GenerateRequest) -> list[Output]:
    async with gateway.generate(work) as stream:
        return [output async for output in stream]


def finished(gateway: Gateway) -> dict[str, int]:
    return gateway.totals.finished


@virtual
async def test_a_request_runs_to_its_end(make_gateway: MakeGateway) -> None:
    worker = FakeWorker(CLOCK)
    gateway = make_gateway(worker)
    work = request(tenant="t", session="s")
    outputs = await collect(gateway, work)
    assert [o.count for o in outputs] == [1, 1, 1]
    assert outputs[0].cached == 0
    assert outputs[-1].finish == "length"
    ((_, sent),) = worker.submitted
    key = tenant_key("t", b"s")
    assert sent.hash_key == key
    assert sent.hashes == extend_chain(key, b"", work.prompt, 4, 12)
    assert sent.sampling.seed is not None
    assert worker.aborted == []
    assert worker.catch_ups == 1
    assert finished(gateway) == {"length": 1}
    assert gateway.inflight == 0
    assert gateway.totals.output_tokens == 3
    await gateway.close()
    assert worker.closed


@virtual
async def test_a_seed_is_drawn_unless_one_is_given(make_gateway: MakeGateway) -> None:
    worker = FakeWorker(CLOCK)
    gateway = make_gateway(worker)
    for seed in (None, None, 0, -5):
        await collect(gateway, request(seed=seed))
    seeds = [sent.sampling.seed for _, sent in worker.submitted]
    assert seeds[2:] == [0, -5]
    assert len({*seeds}) == 4


@virtual
async def test_leaving_early_aborts_and_a_normal_end_does_not(make_gateway: MakeGateway) -> None:
    worker = FakeWorker(CLOCK)
    gateway = make_gateway(worker)
    async with gateway.generate(request(max_tokens=50)) as stream:
        async for output in stream:
            assert output.finish is None
            break
    assert worker.aborted == [stream.rid]
    with pytest.raises(RuntimeError, match="mine"):
        async with gateway.generate(request(max_tokens=50)) as stream:
            raise RuntimeError("mine")
    assert worker.aborted[1:] == [stream.rid]
    # Stopping at the last output, or before reading what has ended already, aborts nothing.
    async with gateway.generate(request()) as stream:
        async for output in stream:
            if output.finish:
                break
    async with gateway.generate(request()) as stream:
        await CLOCK.sleep(10)
    assert len(worker.aborted) == 2
    assert finished(gateway) == {"abort": 2, "length": 2}
    assert gateway.inflight == 0
    assert gateway.loads[0].inflight == 0


@virtual
async def test_cancelling_the_consumer_aborts(make_gateway: MakeGateway) -> None:
    worker = FakeWorker(CLOCK)
    gateway = make_gateway(worker)
    task = asyncio.create_task(collect(gateway, request(max_tokens=100)))
    await CLOCK.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(worker.aborted) == 1
    assert gateway.inflight == 0


@virtual
async def test_overload_is_refused_before_work_with_a_measured_delay(make_gateway: MakeGateway) -> None:
    worker = FakeWorker(CLOCK, prefill_seconds=0.0, step_seconds=4.0)
    gateway = make_gateway(worker, max_inflight=2)
    await asyncio.gather(collect(gateway, request(max_tokens=2)), collect(gateway, request(max_tokens=3)))
    # Two ended within the last 12 s - 8 s: 2 s each.
    with gateway.admit() as slot, gateway.admit():
        retries = []
        for _ in range(3):
            with pytest.raises(OverloadError, match="max_inflight") as caught:
                async with gateway.generate(request()):
                    pass
            retries.append(caught.value.retry_after)
        assert retries == [2.0, 4.0, 6.0]
        assert len(worker.submitted) == 2
        assert gateway.inflight == 2
        async with gateway.generate(request(max_tokens=1), slot) as stream:
            assert [o.count async for o in stream] == [1]
        assert gateway.inflight == 2  # the holder releases it
        slot.release()
        assert gateway.inflight == 1
    assert gateway.inflight == 0


@virtual
async def test_a_slot_comes_back_after_every_error(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(FakeWorker(CLOCK), max_inflight=1)
    for _ in range(3):
        with pytest.raises(ContextLengthError):
            await collect(gateway, request(2000))
    await collect(gateway, request())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"frequency_penalty": 1e300}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"logit_bias": ((3, float("nan")),)}, "logit_bias"),
        ({"logit_bias": ((-3, 1.0),)}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"max_tokens": 1013}, "max_tokens"),
        ({"prompt": TokenIds()}, "prompt"),
        ({"prompt": TokenIds.of([1] * 1024)}, "prompt"),
        ({"prompt": TokenIds.of([1, 1000])}, "prompt"),
    ],
)
def test_what_is_wrong_is_named(make_gateway: MakeGateway, change: dict[str, Any], field: str) -> None:
    async def main() -> None:
        worker = FakeWorker(CLOCK)
        gateway = make_gateway(worker)
        work = request()
        work.prompt = change.pop("prompt", work.prompt)
        work.sampling = msgspec.structs.replace(work.sampling, **change)
        with pytest.raises(UserError, match="valid: ") as caught:
            await collect(gateway, work)
        assert caught.value.field == field
        assert worker.submitted == []

    VirtualClock.run(main())


@virtual
async def test_only_a_worker_that_can_hold_it_gets_it(make_gateway: MakeGateway) -> None:
    small = FakeWorker(CLOCK, info=fake_info("small", max_context=20))
    tight = FakeWorker(CLOCK, info=fake_info("tight", capacity_tokens=20))
    large = FakeWorker(CLOCK, info=fake_info("large"))
    gateway = make_gateway(small, tight, large)
    for i in range(5):
        await collect(gateway, request(30, first=1 + 30 * i))
    assert len(large.submitted) == 5
    assert gateway.max_context == 1024
    large.die()
    with pytest.raises(ContextLengthError, match="20"):
        await collect(gateway, request(30))


@virtual
async def test_routing_follows_the_cache_and_parity_is_counted(make_gateway: MakeGateway) -> None:
    workers = [FakeWorker(CLOCK, f"w{i}") for i in range(3)]
    gateway = make_gateway(*workers)
    prompt = list(range(40))
    for turn in range(4):
        work = GenerateRequest(f"t{turn}", TokenIds.of(prompt), SamplingParams(max_tokens=2), session="s")
        outputs = await collect(gateway, work)
        assert outputs[0].cached == work.predicted_cached_tokens == (turn and len(prompt) - 12)
        prompt += range(500, 512)
    assert sorted(len(w.submitted) for w in workers) == [0, 0, 4]
    totals = gateway.totals
    assert totals.parity == 1.0
    assert totals.cached_tokens == totals.predicted_cached_tokens == 40 + 52 + 64
    assert totals.overpredicted_tokens == totals.underpredicted_tokens == 0
    (home,) = [w for w in workers if w.submitted]
    home.cached.clear()  # it lies: nothing is cached any more, and no event says so
    work = GenerateRequest("last", TokenIds.of(prompt), SamplingParams(max_tokens=2), session="s")
    await collect(gateway, work)
    assert totals.overpredicted_tokens == work.predicted_cached_tokens == 76
    assert totals.parity > 1.0


@virtual
async def test_the_last_block_of_a_prompt_is_never_predicted(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(FakeWorker(CLOCK))
    for expected in (0, 8):
        work = request(12)  # three full blocks; the last token is always computed
        outputs = await collect(gateway, work)
        assert outputs[0].cached == work.predicted_cached_tokens == expected


@virtual
async def test_a_burst_follows_predictions_before_any_event(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(FakeWorker(CLOCK, auto=False), predict_ttl=5.0)
    works = [GenerateRequest(f"a{i}", TokenIds.of([*range(400), 500 + i])) for i in range(3)]
    async with gateway.generate(works[0]), gateway.generate(works[1]), gateway.generate(works[2]):
        assert [w.predicted_cached_tokens for w in works] == [0, 400, 400]
        await CLOCK.sleep(6.0)
        late = GenerateRequest("late", TokenIds.of([*range(400), 9]))
        async with gateway.generate(late):
            assert late.predicted_cached_tokens == 0  # nothing came of it: forgotten


@virtual
async def test_a_request_aborted_before_its_first_token_takes_its_prediction_back(
    make_gateway: MakeGateway,
) -> None:
    worker = FakeWorker(CLOCK, auto=False)
    gateway = make_gateway(worker)
    works = [GenerateRequest(f"a{i}", TokenIds.of([*range(400), 500 + i])) for i in range(3)]
    async with gateway.generate(works[0]):
        pass
    async with gateway.generate(works[1]) as stream:
        assert works[1].predicted_cached_tokens == 0
        worker.emit(stream.rid)  # it is computed; the event that says so may come later
    async with gateway.generate(works[2]):
        assert works[2].predicted_cached_tokens == 400


@virtual
async def test_load_counts_reports_and_what_they_cannot_show_yet(make_gateway: MakeGateway) -> None:
    worker = FakeWorker(CLOCK, auto=False)
    gateway = make_gateway(worker)
    member = gateway._members["w0"]
    async with gateway.generate(request(20)) as one, gateway.generate(request(40, first=100)):
        target = member.target(8)
        assert (target.inflight, target.inflight_tokens, target.overlap) == (2, 60, 8)
        worker.load(queued_tokens=60, waiting=2)
        assert member.target(0).inflight_tokens == 60  # this report may be older than the placements
        worker.load(queued_tokens=60, waiting=2)
        assert member.target(0).inflight_tokens == 0
        assert member.target(0).stats.queued_tokens == 60
        async with gateway.generate(request(10, first=300)) as three:
            assert member.target(0).inflight_tokens == 10
            worker.emit(three.rid, cached=0)
            assert member.target(0).inflight_tokens == 0  # it has begun
        worker.emit(one.rid, finish="stop")
        assert member.target(0).inflight == 1
    assert member.target(0).inflight == 0


@virtual
async def test_a_gap_in_the_events_heals_by_one_snapshot(make_gateway: MakeGateway) -> None:
    worker = FakeWorker(CLOCK, auto=False)
    gateway = make_gateway(worker)
    await CLOCK.sleep(1.0)
    assert worker.snapshots == 1  # at joining
    work = request(16)
    async with gateway.generate(work):
        pass
    await CLOCK.sleep(20.0)  # predictions are gone
    blocks = [work.hashes[i : i + HASH_BYTES] for i in range(0, len(work.hashes), HASH_BYTES)]
    worker.event(KVEvent("stored", hashes=blocks[0]), lose=True)
    worker.event(KVEvent("stored", parent=blocks[0], hashes=blocks[1]))
    await asyncio.sleep(0)  # the snapshot is taken, and now on its way
    worker.event(KVEvent("stored", parent=blocks[1], hashes=blocks[2]))
    worker.event(KVEvent("removed", hashes=blocks[2]))
    worker.event(KVEvent("stored", parent=blocks[1], hashes=blocks[2]))
    await CLOCK.sleep(1.0)
    worker.event(KVEvent("stored", parent=blocks[2], hashes=blocks[3]))
    assert gateway._index.overlaps(work.hashes, [("w0", 0)]) == [4]
    assert worker.snapshots == 2
    assert gateway._feed.resyncs == 1


@virtual
async def test_a_snapshot_that_fails_is_asked_for_again(make_gateway: MakeGateway) -> None:
    class Shy(FakeWorker):
        shy = 1

        async def snapshot(self, dp_rank: int = 0) -> Any:
            if self.shy:
                self.shy -= 1
                raise ConnectionError("not now")
            return await super().snapshot()

    worker = Shy(CLOCK, auto=False)
    worker.event(KVEvent("stored", hashes=bytes(16)))  # before anybody listened
    gateway = make_gateway(worker)
    await CLOCK.sleep(1.0)
    worker.event(KVEvent("stored", parent=bytes(16), hashes=b"1" * 16))
    await CLOCK.sleep(1.0)
    assert gateway._index.overlaps(bytes(16) + b"1" * 16, [("w0", 0)]) == [2]


@virtual
async def test_a_worker_that_joins_warm_is_known_by_its_snapshot(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(FakeWorker(CLOCK, "w0"))
    warm = FakeWorker(CLOCK, "w1")
    work = request(16)
    await collect(gateway, work)
    blocks = [work.hashes[i : i + HASH_BYTES] for i in range(0, len(work.hashes), HASH_BYTES)]
    warm.event(KVEvent("stored", hashes=blocks[0]))
    gateway.join(warm)
    await CLOCK.sleep(1.0)
    assert gateway._index.overlaps(work.hashes, [("w0", 0), ("w1", 0)]) == [4, 1]
    with pytest.raises(DeploymentError, match="blocks of 8"):
        gateway.join(FakeWorker(CLOCK, info=fake_info("odd", block_tokens=8)))


@virtual
async def test_what_a_worker_refuses_reaches_the_client(make_gateway: MakeGateway) -> None:
    worker = FakeWorker(CLOCK, auto=False)
    gateway = make_gateway(worker)
    for code, kind in (("context_length_exceeded", ContextLengthError), ("strange", BienError)):
        async with gateway.generate(request()) as stream:
            worker.emit(stream.rid, 0, "error", error="no room", error_code=code)
            with pytest.raises(kind, match="no room"):
                await anext(stream)
    for field in ("max_tokens", ""):
        async with gateway.generate(request()) as stream:
            worker.send(
                Output(
                    stream.rid, finish="error", error="no", error_code="invalid_request", error_field=field
                )
            )
            with pytest.raises(UserError) as caught:
                await anext(stream)
            assert caught.value.field == (field or None)
    assert worker.aborted == []
    assert finished(gateway) == {"error": 4}


@virtual
async def test_death_before_the_first_token_moves_a_request(make_gateway: MakeGateway) -> None:
    workers = [FakeWorker(CLOCK, f"w{i}", prefill_seconds=0.1) for i in range(2)]
    gateway = make_gateway(*workers)
    expected = [o.tokens for o in await collect(gateway, request(seed=7))]
    task = asyncio.create_task(collect(gateway, request(seed=7, first=50)))
    await CLOCK.sleep(0.5)
    (home,) = [w for w in workers if w._tasks]
    home.die()
    outputs = await task
    (other,) = [w for w in workers if w is not home]
    assert [o.tokens for o in outputs] == expected  # same seed
    assert other.submitted[-1][1].id == "r50"
    assert gateway.totals.replaced == gateway.totals.deaths == 1
    assert finished(gateway) == {"length": 2}


@virtual
async def test_outputs_that_nobody_has_read_do_not_count_as_streamed(make_gateway: MakeGateway) -> None:
    workers = [FakeWorker(CLOCK, f"w{i}", auto=False) for i in range(2)]
    gateway = make_gateway(*workers, router=RoundRobin())
    async with gateway.generate(request()) as stream:
        workers[0].emit(stream.rid, tokens=[1, 2], cached=0)
        workers[0].die()
        asyncio.get_running_loop().call_later(
            1, lambda: workers[1].emit(stream.rid, tokens=[5], finish="stop", cached=4)
        )
        outputs = [o async for o in stream]
    assert [o.tokens for o in outputs] == [TokenIds.of([5]).packed]
    assert stream.cached == 4
    assert stream.output_tokens == 1


@virtual
async def test_what_had_ended_before_a_death_is_delivered(make_gateway: MakeGateway) -> None:
    worker = FakeWorker(CLOCK, auto=False)
    gateway = make_gateway(worker)
    async with gateway.generate(request()) as stream:
        worker.emit(stream.rid, tokens=[1, 2], finish="stop", cached=0)
        worker.die()
        assert [o.finish async for o in stream] == ["stop"]


@virtual
async def test_death_after_the_first_token_ends_a_request(make_gateway: MakeGateway) -> None:
    workers = [FakeWorker(CLOCK, f"w{i}", auto=False) for i in range(2)]
    gateway = make_gateway(*workers, router=RoundRobin())
    async with gateway.generate(request()) as stream:
        workers[0].emit(stream.rid, tokens=[1])
        assert (await anext(stream)).count == 1
        workers[0].emit(stream.rid, tokens=[2])
        workers[0].die("the machine is gone")
        assert (await anext(stream)).count == 1  # what had come is given first
        with pytest.raises(WorkerDiedError, match=r"w0.*the machine is gone.*2 tokens"):
            await anext(stream)
    assert finished(gateway) == {"error": 1}
    assert workers[1].submitted == []


@virtual
async def test_without_a_worker_requests_wait_and_then_give_up(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(worker_wait=5.0)
    assert not gateway.ready
    with pytest.raises(OverloadError, match="no worker is alive"):
        await collect(gateway, request())
    assert CLOCK.time() == 5.0
    waiting = asyncio.create_task(collect(gateway, request()))
    await CLOCK.sleep(1.0)
    first = FakeWorker(CLOCK, prefill_seconds=1.0)
    gateway.join(first)
    assert gateway.ready
    await CLOCK.sleep(1.0)
    first.die()  # nothing streamed: it waits for the next one
    await CLOCK.sleep(1.0)
    gateway.join(FakeWorker(CLOCK, "w1"))
    assert len(await waiting) == 3
    assert gateway.inflight == 0


@virtual
async def test_a_request_that_kills_its_workers_is_not_passed_on_for_ever(make_gateway: MakeGateway) -> None:
    class Fragile(FakeWorker):
        def submit(self, rid: int, work: GenerateRequest) -> None:
            super().submit(rid, work)
            asyncio.get_running_loop().call_later(0.1, self.die)

    workers = [Fragile(CLOCK, f"w{i}", auto=False) for i in range(5)]
    gateway = make_gateway(*workers)
    with pytest.raises(WorkerDiedError, match="3 workers"):
        await collect(gateway, request())
    assert len(gateway.infos) == 2


@virtual
async def test_a_worker_that_comes_back_takes_its_own_place(make_gateway: MakeGateway) -> None:
    old = FakeWorker(CLOCK, auto=False)
    gateway = make_gateway(old)
    task = asyncio.create_task(collect(gateway, request()))
    await CLOCK.sleep(1.0)
    new = FakeWorker(CLOCK, info=fake_info("w0", generation="w0.2"))
    gateway.join(new)
    assert len(await task) == 3
    old.emit(old.submitted[0][0], 1)
    old.die()
    assert [info.generation for info in gateway.infos] == ["w0.2"]


class Odd(RoundRobin):
    def __init__(self, target: int | None) -> None:
        super().__init__()
        self.target = target
        self.outcomes: list[Outcome] = []

    def choose(self, *_: Any) -> Decision:
        if self.target == 99:
            raise KeyError("oh")
        return Decision(self.target, 0) if self.target is not None else None  # type: ignore[return-value]

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


@pytest.mark.parametrize(
    ("target", "text"), [(1, "chose .*target=1"), (-1, "target=-1"), (None, "chose None"), (99, "KeyError")]
)
def test_a_router_at_fault_fails_the_request_alone(
    make_gateway: MakeGateway, target: int | None, text: str
) -> None:
    async def main() -> None:
        gateway = make_gateway(FakeWorker(CLOCK), router=Odd(target))
        with pytest.raises(PluginFault, match=text):
            await collect(gateway, request())
        assert gateway.inflight == 0
        assert finished(gateway) == {"error": 1}

    VirtualClock.run(main())


@virtual
async def test_plugins_at_fault_stop_no_stream(make_gateway: MakeGateway) -> None:
    class Deaf(RoundRobin):
        def observe(self, *_: Any) -> None:
            raise ValueError("observe")

        def report(self, *_: Any) -> None:
            raise ValueError("report")

    worker = FakeWorker(CLOCK)
    gateway = make_gateway(worker, router=Deaf())
    await CLOCK.sleep(1.0)
    worker.event(KVEvent("stored", group=7, hashes=bytes(16)))  # the index knows no such group
    worker.load(running=1)
    assert len(await collect(gateway, request())) == 3
    assert gateway.totals.faults == 3


@virtual
async def test_an_index_at_fault_loses_no_request(make_gateway: MakeGateway) -> None:
    class Deaf(MemoryIndex):
        def join(self, *_: Any) -> None:
            raise ValueError("join")

        def leave(self, *_: Any) -> None:
            raise ValueError("leave")

        def predict(self, *_: Any) -> None:
            raise ValueError("predict")

    workers = [FakeWorker(CLOCK, f"w{i}", auto=False) for i in range(2)]
    gateway = make_gateway(*workers, index=Deaf(CLOCK), router=RoundRobin())
    running = asyncio.create_task(collect(gateway, request()))
    await CLOCK.sleep(1.0)
    workers[0].die()
    await CLOCK.sleep(1.0)
    ((rid, _),) = workers[1].submitted
    workers[1].emit(rid, 3, finish="length")
    assert sum(output.count for output in await running) == 3
    assert [load.inflight for load in gateway.loads] == [0]


@virtual
async def test_a_plugin_that_exits_ends_nothing_else(make_gateway: MakeGateway) -> None:
    def exits(*_: Any) -> Any:
        sys.exit("a library below it called this")

    class Router(RoundRobin):
        observe = report = close = staticmethod(exits)

    class Index(MemoryIndex):
        join = leave = apply = reset = predict = close = staticmethod(exits)

    worker = FakeWorker(CLOCK)
    gateway = make_gateway(worker, router=(router := Router()), index=Index(CLOCK))
    await CLOCK.sleep(1.0)  # its snapshot is fetched in a task of its own
    worker.load(running=1)
    assert len(await collect(gateway, request())) == 3
    router.choose = exits  # type: ignore[method-assign]
    with pytest.raises(PluginFault, match="a library below it"):
        await collect(gateway, request())
    await gateway.close()
    # leave, join, reset, report, predict, apply, observe, leave, and both at their ends
    assert gateway.totals.faults == 10
    assert gateway.inflight == 0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interrupt_and_a_cancellation_are_no_faults_of_plugins(
    make_gateway: MakeGateway, kind: type[BaseException]
) -> None:
    async def main() -> None:
        router = RoundRobin()
        gateway = make_gateway(FakeWorker(CLOCK), router=router)

        def choose(*_: Any) -> Decision:
            raise kind

        router.choose = choose  # type: ignore[method-assign]
        with pytest.raises(kind):
            await collect(gateway, request())
        assert gateway.totals.faults == 0 and gateway.inflight == 0

    VirtualClock.run(main())


@virtual
async def test_predictions_that_no_cache_can_keep_are_refused(make_gateway: MakeGateway) -> None:
    for cached in (-1, 13, 1.5, None, np.int64(4)):
        router = RoundRobin()
        router.choose = lambda *_, cached=cached: Decision(0, cached)  # type: ignore[method-assign]
        gateway = make_gateway(FakeWorker(CLOCK), router=router)
        with pytest.raises(PluginFault, match="predicted_cached from 0 to 12"):
            await collect(gateway, request())
        assert finished(gateway) == {"error": 1}
        assert [load.inflight for load in gateway.loads] == [0]


@virtual
async def test_a_router_hears_how_it_went(make_gateway: MakeGateway) -> None:
    router = Odd(0)
    worker = FakeWorker(CLOCK, prefill_seconds=0.1)
    gateway = make_gateway(worker, router=router)
    await collect(gateway, request(10, max_tokens=5, seed=1))
    (outcome,) = router.outcomes
    assert (outcome.worker, outcome.cached, outcome.finish) == ("w0", 0, "length")
    assert outcome.ttft == pytest.approx(1.01)
    assert outcome.seconds == pytest.approx(1.05)
    assert outcome.request.prompt_tokens == 10


@virtual
async def test_draining_lets_requests_end_and_admits_no_more(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(FakeWorker(CLOCK))
    running = asyncio.create_task(collect(gateway, request(max_tokens=100)))
    await CLOCK.sleep(0.1)
    drained = asyncio.create_task(gateway.drain())
    await CLOCK.sleep(0.1)
    assert not drained.done()
    assert not gateway.ready
    with pytest.raises(OverloadError, match="going down"):
        gateway.admit()
    await drained
    assert len(await running) == 100


@virtual
async def test_while_it_drains_a_request_waits_for_the_next_worker(make_gateway: MakeGateway) -> None:
    first = FakeWorker(CLOCK, prefill_seconds=1.0)
    gateway = make_gateway(first)
    running = asyncio.create_task(collect(gateway, request()))
    await CLOCK.sleep(0.1)
    drained = asyncio.create_task(gateway.drain())
    await CLOCK.sleep(0.1)
    first.die()
    await CLOCK.sleep(0.1)
    gateway.join(FakeWorker(CLOCK, "w1"))
    assert len(await running) == 3
    await drained


@virtual
async def test_closing_ends_what_runs(make_gateway: MakeGateway) -> None:
    workers = [FakeWorker(CLOCK, f"w{i}", auto=False) for i in range(2)]
    gateway = make_gateway(*workers)
    tasks = [asyncio.create_task(collect(gateway, request())) for _ in range(3)]
    await CLOCK.sleep(1.0)
    await gateway.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [OverloadError] * 3
    assert gateway.totals.deaths == 0
    assert all(w.closed for w in workers)
    assert gateway.inflight == 0
