from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bien.core.clock import VirtualClock
from bien.core.errors import ResourceError, UserError
from bien.core.speculation.counts import DraftCounts, SourceCounts
from bien.replay.driver import Driver
from bien.replay.files import check_folder
from bien.replay.ladder import read_ladder
from bien.replay.measure import measure
from bien.replay.options import ReplayOptions
from bien.replay.record import TurnRecord
from bien.replay.result import DraftsReport, Result, read_result, write_result
from bien.replay.target import TurnRequest
from bien.replay.worker_load import WorkerLoad
from bien.traces.model import Fidelity, Session, TraceMeta
from tests.replay.fakes import FakeTarget, drive, session

META = TraceMeta("weka", 64, "sample", Fidelity(derived_output_tokens=3, output_tokens=4))
DISTRIBUTIONS = ("ttft_ms", "tpot_ms", "e2e_ms", "interactivity")


def result_of(run: Driver, **more: Any) -> Result:
    return measure(run, META, kind="simulated", deployment={"a": 1}, **more)


def cached(request: TurnRequest) -> int:
    return 48 if request.id.endswith("/1") else 0


def test_what_became_of_drafts() -> None:
    class Drafting(FakeTarget):
        async def generate(self, request: TurnRequest, record: TurnRecord) -> None:
            await super().generate(request, record)
            counts = {"a": SourceCounts(4, 9, 5, [4, 3, 2], [3, 1, 1]), "b": SourceCounts(1, 1, 0, [1], [0])}
            record.drafts = DraftCounts(counts)
            record.drafted, record.accepted, record.rounds = 10, 5, 5

    run = drive(Drafting(), [session(f"s{i}", (0, 50, 11)) for i in range(3)], ReplayOptions())
    found = result_of(run).speculation
    assert found.acceptance_length == 2
    assert [(p.rounds, p.accepted) for p in found.by_position] == [(15, 9), (9, 3), (6, 3)]
    assert found.by_source["a"] == DraftsReport(12, 15, 27, 2.25)
    assert found.by_source["b"].acceptance_length == 1
    assert found.forced == {}
    assert result_of(run).card.forced_acceptance is None
    spec = {"speculation": {"acceptance": [0.5, 0.5]}}
    pools = [
        {"name": "x", "speculator": {"use": "mtp"}, **spec},
        {"name": "y"},
        {"name": "z", "speculator": None, **spec},  # nothing was there to use it
        {"name": "s", "executor": {"use": "simulated"}, "speculator": {"use": "mtp"}, **spec},
    ]
    forced = measure(run, META, kind="live", deployment={"pool": pools})
    assert forced.speculation.forced == {"x": [0.5, 0.5]}
    assert forced.card.forced_acceptance == 1.75


def test_every_field_of_a_run() -> None:
    sessions = [session(f"s{i}", (0, 50, 11), (3, 20, 1)) for i in range(2)]
    run = drive(FakeTarget(cached=cached), sessions, ReplayOptions(concurrency=2))
    result = result_of(run)
    assert result.validity.valid and result.validity.reasons == []
    assert (result.sessions.count, result.sessions.completed, result.turns.count, result.turns.errors) == (
        2, 2, 4, 0,
    )  # fmt: skip
    tokens = result.tokens
    assert (tokens.logical_input, tokens.computed_input, tokens.cached_input, tokens.output) == (
        262, 166, 96, 24,
    )  # fmt: skip
    assert result.ttft_ms.p50 == 1000 and result.tpot_ms.p50 == pytest.approx(100)
    # Everything took 2 + 3 + 1 seconds.
    assert result.throughput.seconds == pytest.approx(6)
    assert result.throughput.logical == pytest.approx((262 + 24) / 6)
    assert result.throughput.output == pytest.approx(24 / 6)
    assert result.throughput.per_accelerator.output == pytest.approx(24 / 12)
    assert result.jobs.count == 2 and result.jobs.per_hour == pytest.approx(1200)
    assert result.jobs.per_hour_per_user == pytest.approx(600)
    assert result.jobs.slowdown is None
    # 61 of the second prompt's 81 tokens are shared, 48 of them in whole blocks.
    assert result.cache.ideal == pytest.approx(122 / 262)
    assert result.cache.achieved == pytest.approx(96 / 262)
    assert result.cache.loss is not None and result.cache.loss.rounding == pytest.approx(26 / 262)
    assert result.router.parity == 1.0
    assert result.fidelity.turns == result.fidelity.tokens == result.fidelity.reuse == 1.0
    assert result.fidelity.derived_output == 0.75
    assert result.card.corpus.hash == run.corpus.digest and result.card.coverage == 1.0


def test_errors_stay_in_the_denominator() -> None:
    run = drive(FakeTarget(fails=lambda r: r.id == "a/0/0"), [session(n, (0, 50, 1)) for n in "ab"])
    result = result_of(run)
    assert (result.turns.count, result.turns.errors) == (2, 1)
    assert (result.sessions.completed, result.sessions.failed) == (1, 1)
    assert result.jobs.count == 1
    assert result.card.errors == result.card.coverage == 0.5
    assert not result.validity.valid
    assert [r.split(";")[0] for r in result.validity.reasons] == [
        "fidelity.turns is 0.500",
        "fidelity.tokens is 0.500",
        "50.0% of turns failed",
    ]


def test_a_few_skipped_sessions_are_said_many_are_invalid() -> None:
    few = [session(f"s{i}", (0, 50, 1)) for i in range(40)] + [session("long", (0, 100, 1))]
    result = result_of(drive(FakeTarget(max_context=60), few))
    assert result.validity.valid
    assert "1 sessions skipped: longer than the window of 60" in result.fidelity.notes
    many = [session(f"s{i}", (0, 50, 1)) for i in range(4)] + [session("long", (0, 100, 1))]
    result = result_of(drive(FakeTarget(max_context=60), many))
    assert result.sessions.skipped == 1 and result.sessions.count == 4
    assert any("fidelity.turns is 0.800" in r for r in result.validity.reasons)


def test_a_scaled_run_keeps_its_fidelity() -> None:
    sessions = [session(f"s{i}", (0, 500, 40), (1, 90, 50), (1, 80, 30)) for i in range(3)]
    fidelity = result_of(drive(FakeTarget(), sessions, ReplayOptions(token_scale=1 / 8))).fidelity
    assert fidelity.turns == 1
    assert fidelity.tokens > 0.98 and fidelity.reuse > 0.98


def test_an_interrupted_run_is_not_valid() -> None:
    run = drive(FakeTarget(), [session("a", (0, 50, 1))])
    run.records[-1].ended = -1.0
    result = result_of(run, interrupted=True)
    assert result.turns.unfinished == 1
    assert any(r.startswith("interrupted: 1 turns") for r in result.validity.reasons)


def test_nothing_measured_is_null_not_zero() -> None:
    run = drive(FakeTarget(max_context=10), [session("a", (0, 50, 1))])
    result = result_of(run)
    assert result.ttft_ms.p50 is None and result.cache.ideal is None and result.jobs.per_hour is None
    assert result.validity.reasons == ["no turn ended"]


def test_imbalance_is_weighted_over_windows() -> None:
    readings = iter([{"a": 0.0, "b": 0.0}, {"a": 30.0, "b": 10.0}, {"a": 30.0, "b": 20.0}])

    async def read() -> dict[str, float]:
        return next(readings)

    async def main() -> float | None:
        load = WorkerLoad(VirtualClock(), read)
        for _ in range(3):
            await load.sample()
        return load.imbalance

    # 1.5 while 40 s were busy, 2.0 while 10 s were.
    assert VirtualClock.run(main()) == pytest.approx((1.5 * 40 + 2.0 * 10) / 50)


def test_the_file_has_the_shape_that_is_promised(tmp_path: Path) -> None:
    run = drive(FakeTarget(cached=cached), [session("a", (0, 50, 11), (3, 20, 1))])
    path = tmp_path / "result.json"
    write_result(path, result_of(run))
    raw = json.loads(path.read_text())
    assert list(raw)[:2] == ["schema", "kind"] and raw["schema"] == "bien.result/1"
    for name in DISTRIBUTIONS:
        assert set(raw[name]) == {"mean", "p50", "p90", "p95", "p99"}
    for name, fields in {
        "validity": {"valid", "reasons"},
        "fidelity": {"turns", "tokens", "reuse"},
        "sessions": {"count", "completed"},
        "turns": {"count", "errors"},
        "tokens": {"logical_input", "computed_input", "cached_input", "output"},
        "cache": {"ideal", "achieved", "loss"},
        "throughput": {"logical", "computed", "output"},
        "jobs": {"count", "per_hour", "slowdown"},
        "client": {"cpu_ms_per_request", "send_lag_ms", "loop_lag_ms"},
        "router": {"parity", "imbalance"},
        "speculation": {"acceptance_length"},
    }.items():
        assert fields <= set(raw[name]), name
    assert {"card", "deployment"} <= set(raw)
    assert read_result(path) == result_of(run)
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_results_that_cannot_be_written_or_read_are_named(tmp_path: Path) -> None:
    result = result_of(drive(FakeTarget(), [session("a", (0, 50, 1))]))
    with pytest.raises(ResourceError, match="cannot write result .*none/r.json"):
        write_result(tmp_path / "none" / "r.json", result)
    for bad in ("none/r.json", "", "/proc/r.json"):
        with pytest.raises(ResourceError, match="cannot write result .*; valid: a file in a folder"):
            check_folder(tmp_path / bad)
    check_folder(tmp_path / "r.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match=r"x\.json is no result"):
        read_result(tmp_path / "x.json")


def test_another_schema_is_named_before_its_fields_are_missed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for read, valid in ((read_result, "bien.result/1"), (read_ladder, "bien.ladder/1")):
        path.write_text('{"schema": "bien.result/0", "turns": []}')
        with pytest.raises(UserError, match=rf"x\.json has schema 'bien\.result/0'; valid: '{valid}'"):
            read(path)
        path.write_text(f'{{"schema": "{valid}"}}')
        with pytest.raises(UserError, match=r"x\.json is no .*missing required field"):
            read(path)
    for data in ("[]", "{", "", "3"):
        path.write_text(data)
        with pytest.raises(UserError, match=r"x\.json is no result"):
            read_result(path)


def test_sessions_of_one_scope_share_what_is_ideal() -> None:
    sessions: list[Session] = [session(n, (0, 64, 1)) for n in "ab"]
    for each in sessions:
        each.scope = "shared"
    result = result_of(drive(FakeTarget(), sessions, ReplayOptions(concurrency=1)))
    assert result.cache.ideal == pytest.approx(64 / 128)
