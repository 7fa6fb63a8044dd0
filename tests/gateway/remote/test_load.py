"""`Load`: what others have brought to an engine counts, what was ours and has ended does not."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.worker.messages import WorkerStats
from bien.gateway.remote.dialect import Readings
from bien.gateway.remote.load import Load, parse_metrics
from bien.plugins.engines.sglang import SglangDialect
from bien.plugins.engines.vllm import VllmDialect


def test_others_waiting_requests_are_queued_tokens_as_ours_are() -> None:
    load = Load()
    load.add(1, 1000, 600, 0.0)
    load.look(Readings(running=1, waiting=4), ours=1)
    report = load.report(0.1)
    assert (report.running, report.waiting, report.queued_tokens) == (0, 1 + 4, 4 * 600)
    load.gained(1, 1)
    load.look(Readings(running=3, waiting=0), ours=1)
    report = load.report(0.2)
    assert (report.running, report.waiting, report.queued_tokens) == (1 + 2, 0, 0)


def test_ours_that_ended_since_the_poll_are_not_taken_for_others() -> None:
    load = Load()
    for rid in range(3):
        load.add(rid, 100, 100, 0.0)
    load.look(Readings(running=1, waiting=2), ours=3)
    for rid in range(3):
        load.remove(rid, 0.5)
    report = load.report(0.6)
    assert (report.running, report.waiting, report.queued_tokens) == (0, 0, 0)


def test_ours_that_ended_while_it_was_polled_are_ours() -> None:
    load = Load()
    load.look(Readings(running=2, waiting=0), ours=2)
    assert load.report(0.0).running == 0


def test_what_was_never_measured_is_nothing() -> None:
    """Servers write NaN of it, and one that overflows +Inf; a look must not fail of either."""
    for engine, dialect in (("vllm", VllmDialect()), ("sglang", SglangDialect())):
        names = ("num_requests_running", "num_requests_waiting", "num_running_reqs", "max_total_num_tokens")
        page = "".join(f"{engine}:{name} {value}\n" for name in names for value in ("NaN", "+Inf"))
        assert dialect.readings(*parse_metrics(page)) == Readings()


numbers = st.one_of(
    st.sampled_from(["NaN", "+Inf", "-Inf", "1e300", "1e308", "-5", "9" * 400, "x", "1e18"]),
    st.floats().map(repr),
    st.integers(-10, 10).map(str),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["vllm", "sglang"]), st.integers(0, 8), numbers), max_size=12))
def test_no_page_breaks_a_look(samples) -> None:
    names = (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *(
            "num_running_reqs",
            "num_queue_reqs",
            "token_usage",
            "max_total_num_tokens",
            "max_total_num_tokens",
        ),
    )
    page = "".join(f"{engine}:{(*names, 'cache_config_info')[n]} {value}\n" for engine, n, value in samples)
    page += "".join(
        f'vllm:cache_config_info{{num_gpu_blocks="{value}",block_size="{value}"}} 1\n'
        for _, n, value in samples
        if n == 8
    )
    for dialect in (VllmDialect(), SglangDialect()):
        load = Load()
        load.add(1, 100, 50, 0.0)
        load.look(dialect.readings(*parse_metrics(page)), ours=1)
        report = load.report(1.0)
        assert report.running >= 0 and report.waiting >= 0 and report.queued_tokens >= 0
        assert msgspec.convert(msgspec.to_builtins(report), WorkerStats) == report
