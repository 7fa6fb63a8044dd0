from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry, generate_latest

from bien.core.clock import VirtualClock
from bien.core.errors import OverloadError, WorkerDiedError
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.speculation.counts import DraftCounts, SourceCounts
from bien.gateway.core import Gateway
from bien.gateway.departed import MOST, NAME, SECONDS
from bien.gateway.testing.fake_worker import FakeWorker
from bien.plugins.routers.round_robin import RoundRobin

MakeGateway = Callable[..., Gateway]
CLOCK = VirtualClock()


def request(max_tokens: int = 5) -> GenerateRequest:
    return GenerateRequest("r", TokenIds.of(range(20)), SamplingParams(max_tokens=max_tokens), session="s")


def test_metrics_tell_what_happened(make_gateway: MakeGateway) -> None:
    registry = CollectorRegistry()

    async def main() -> None:
        worker = FakeWorker(CLOCK, prefill_seconds=0.1, step_seconds=0.5)
        gateway = make_gateway(worker, metrics=registry, max_inflight=1)
        for _ in range(2):
            async with gateway.generate(request()) as stream:
                async for _output in stream:
                    pass
        async with gateway.generate(request()) as stream:
            with pytest.raises(OverloadError):
                async with gateway.generate(request()):
                    pass
            worker.load(running=3, waiting=2, used_blocks=250, cached_blocks=500, total_blocks=1000)
            assert value("bien_inflight_requests") == 1
            assert value("bien_worker_inflight", worker="w0") == 1
        assert value("bien_requests_total", finish="length") == 2
        assert value("bien_requests_total", finish="abort") == 1
        assert value("bien_placements_total", worker="w0") == 3
        assert value("bien_refused_total") == 1
        assert value("bien_prompt_tokens_total") == 40
        assert value("bien_cached_tokens_total") == value("bien_router_predicted_cached_tokens_total") == 16
        assert value("bien_router_overpredicted_tokens_total") == 0
        assert value("bien_output_tokens_total") == 10
        # 20 and then 4 uncached tokens at 0.1 s, plus a step each.
        assert value("bien_time_to_first_token_seconds_sum") == pytest.approx(2.5 + 0.9)
        assert value("bien_inter_token_seconds_sum") == pytest.approx(2 * 0.5)
        assert value("bien_request_seconds_count") == 3
        assert value("bien_worker_running", worker="w0") == 3
        assert value("bien_worker_waiting", worker="w0") == 2
        assert value("bien_worker_kv_usage_ratio", worker="w0") == 0.25
        assert value("bien_worker_kv_cached_ratio", worker="w0") == 0.5
        worker.die()
        assert value("bien_worker_deaths_total") == 1
        assert value("bien_worker_running", worker="w0") is None
        assert b"bien_index_resyncs_total 0.0" in generate_latest(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    VirtualClock.run(main())


def test_drafts_in_vllms_names(make_gateway: MakeGateway) -> None:
    registry = CollectorRegistry()

    async def main() -> None:
        worker = FakeWorker(CLOCK)
        make_gateway(worker, metrics=registry)
        drafts = {"mine": SourceCounts(9, 20, 12, [9, 7, 4], [8, 3, 1]), "prediction": SourceCounts(1, 2, 0)}
        worker.load(drafts=DraftCounts(drafts))
        await CLOCK.sleep(1.0)

    VirtualClock.run(main())

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"bien_spec_decode_{name}_total", {"worker": "w0", **labels})

    assert value("num_drafts", source="mine") == 9
    assert value("num_draft_tokens", source="mine") == 20
    assert value("num_accepted_tokens", source="mine") == 12
    assert value("num_accepted_tokens_per_pos", source="mine", position="0") == 8
    assert value("num_accepted_tokens_per_pos", source="mine", position="2") == 1
    assert value("num_draft_tokens_per_pos", source="mine", position="1") == 7
    assert value("num_accepted_tokens_per_pos", source="mine", position="3") is None
    assert value("num_accepted_tokens", source="prediction") == 0


def test_first_and_last_token_of_a_jump_count_at_their_own_times(make_gateway: MakeGateway) -> None:
    registry = CollectorRegistry()

    async def main() -> None:
        worker = FakeWorker(CLOCK, auto=False)
        gateway = make_gateway(worker, metrics=registry)
        async with gateway.generate(request()) as stream:
            await CLOCK.sleep(10.0)
            worker.emit(stream.rid, 5, "length", cached=0, times=(2.0, 10.0))
        assert registry.get_sample_value("bien_time_to_first_token_seconds_sum") == 2.0
        assert registry.get_sample_value("bien_inter_token_seconds_sum") == 2.0

    VirtualClock.run(main())


def test_one_span_per_request_with_events(make_gateway: MakeGateway) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def main() -> None:
        workers = [FakeWorker(CLOCK, f"w{i}", auto=False) for i in range(3)]
        gateway = make_gateway(*workers, router=RoundRobin(), tracer=provider.get_tracer("test"))
        by_name = {worker.info.id: worker for worker in workers}
        work = request()
        work.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        async with gateway.generate(work) as stream:
            workers[0].die("gone")
            reading = asyncio.create_task(anext(stream))
            await CLOCK.sleep(1.0)
            second = by_name[stream.worker]
            second.emit(stream.rid, cached=0)
            assert (await reading).count == 1
            second.emit(stream.rid, finish="stop")
            assert [o.count async for o in stream] == [1]
        sent = second.submitted[0][1].traceparent
        assert "0af7651916cd43dd8448eb211c80319c" in sent
        assert "b7ad6b7169203331" not in sent
        async with gateway.generate(request()) as stream:
            by_name[stream.worker].emit(stream.rid)
            assert (await anext(stream)).count == 1
            by_name[stream.worker].die()
            with pytest.raises(WorkerDiedError):
                await anext(stream)

    VirtualClock.run(main())
    ended, failed = exporter.get_finished_spans()
    assert format(ended.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert [event.name for event in ended.events] == ["placed", "worker_died", "placed", "first_token"]
    assert ended.attributes is not None
    assert ended.attributes["bien.output_tokens"] == 2
    assert ended.attributes["bien.finish"] == "stop"
    assert failed.status.status_code is StatusCode.ERROR


def test_names_that_never_return_are_counted_as_one(make_gateway: MakeGateway) -> None:
    """A fleet that gives each worker a new name: pages and memory stay as large as they are."""
    registry = CollectorRegistry()
    sizes: list[int] = []

    async def main() -> None:
        gateway = make_gateway(FakeWorker(CLOCK, "stays"), metrics=registry, router=RoundRobin())
        for n in range(4 * MOST):
            worker = FakeWorker(CLOCK, f"w{n:05}")
            gateway.join(worker)
            for _ in range(2):
                async with gateway.generate(request()) as stream:
                    async for _output in stream:
                        pass
            worker.die()
            sizes.append(len(generate_latest(registry).splitlines()))
        totals = gateway.totals
        assert len(totals.placements) == len(totals.compared) == MOST + 2
        assert sizes[-1] == sizes[2 * MOST]
        assert sum(totals.placements.values()) == 8 * MOST == totals.started
        assert sum(one.found for one in totals.compared.values()) == totals.cached_tokens
        assert sum(one.predicted for one in totals.compared.values()) == totals.predicted_cached_tokens
        assert totals.placements[NAME] == 3 * MOST

        again = FakeWorker(CLOCK, f"w{4 * MOST - 2:05}")
        gateway.join(again)  # it is back, and stays itself
        await CLOCK.sleep(2 * SECONDS)
        last = FakeWorker(CLOCK, "last")
        gateway.join(last)
        last.die()
        assert set(totals.placements) == {"stays", again.info.id, NAME}
        await gateway.close()

    VirtualClock.run(main())
