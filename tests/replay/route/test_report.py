from __future__ import annotations

import io
import json

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from bien.core.errors import BienError, UserError
from bien.gateway.routing import Decision
from bien.plugins.routers.blocks import Blocks
from bien.replay.cli import make_app
from bien.replay.metrics import Distribution
from bien.replay.route.costliest import costliest
from bien.replay.route.display import parse_ladder, print_report
from bien.replay.route.explain import RoutePlan, explain
from bien.replay.route.plot import write_plot
from bien.replay.route.report import RouteReport, best_of, found, imbalance, losses, policy_report
from bien.replay.route.variant import COLUMNS, Seen


def seen(name: str = "x", errors: dict[str, int] | None = None, **columns: list[float]) -> Seen:
    count = len(next(iter(columns.values())))
    packed = {c: np.asarray(columns.get(c, [0.0] * count), np.float64).tobytes() for c in COLUMNS}
    ids = [f"s/0/{i}" for i in range(count)]
    return Seen(name, ["w0", "w1"], [3.0, 1.0], 10.0, ids, packed, errors=errors or {})


def test_losses_are_steps_that_add_up():
    one = seen(prompt=[1000], shared=[900], whole=[896], best=[640], here=[128], cached=[64])
    loss = losses(one)
    assert loss.rounding == pytest.approx(0.004)
    assert loss.evicted == pytest.approx(0.256)
    assert loss.other_replica == pytest.approx(0.512)
    assert loss.gone == pytest.approx(0.064)
    assert one.hit + sum(msgspec.structs.astuple(loss)) == pytest.approx(0.9)


def test_what_is_computed_while_a_request_waits_is_no_loss():
    one = seen(prompt=[1000], shared=[900], whole=[896], best=[0], here=[0], cached=[896])
    assert msgspec.structs.astuple(losses(one)) == pytest.approx((0.004, 0, 0, 0))


def test_the_oracle_has_the_best_of_each_figure_and_no_regret_is_negative():
    a = seen("a", ttft=[1.0, 1.0, 4.0], prompt=[10, 10, 10], cached=[9, 9, 0])
    b = seen("b", ttft=[1.5, 1.5, 1.5], prompt=[10, 10, 10], cached=[5, 5, 5])
    c = seen("c", ttft=[0.1, 0.1, 0.1], prompt=[10, 10, 10], cached=[9, 9, 9], errors={"broken": 3})
    oracle = found({"a": a, "c": c}, {"b": b})
    assert oracle.by == {"ttft_mean_ms": "b", "ttft_p90_ms": "b", "hit": "a"}
    report = policy_report(a, 0.8, oracle)
    assert report.regret == pytest.approx(2.0 / 1.5 - 1)
    assert report.regrets is not None
    assert (report.regrets.ttft_mean_ms, report.regrets.hit) == (pytest.approx(500.0), 0.0)
    broken = policy_report(c, 0.8, oracle)
    assert (broken.regret, broken.regrets, broken.errors) == (None, None, 3)
    best = best_of({"a": report, "c": broken})
    assert set(map(tuple, best.values())) == {("a",)}


def test_imbalance_is_the_busiest_over_the_mean():
    assert imbalance(seen(ttft=[1.0])) == 1.5
    assert imbalance(Seen("idle", ["w0"], [0.0])) is None


def test_ties_are_all_best():
    one = policy_report(seen(ttft=[1.0], prompt=[10]), 0.5, found({"a": seen(ttft=[1.0], prompt=[10])}, {}))
    assert best_of({"a": one, "b": one})["ttft_ms.mean"] == ["a", "b"]


def test_the_costliest_are_those_that_hindsight_would_have_saved():
    ours = seen(ttft=[1.0, 5.0, 3.0], prompt=[100, 200, 300], best=[0, 128, 0], holder=[0, 1, 0])
    ours.reasons = [{"n": 0}, {"n": 1}, {"n": 2}]
    oracle = seen(ttft=[2.0, 1.0, 2.0], worker=[1, 1, 1], cached=[0, 128, 0])
    first, second = costliest(ours, oracle, 5)
    assert (first.id, first.saved_ms, first.reasons) == ("s/0/1", 4000.0, {"n": 1})
    assert (first.worker, first.holder, first.held) == ("w0", "w1", 128)
    assert (first.oracle_worker, first.oracle_cached, first.oracle_ttft_ms) == ("w1", 128, 1000.0)
    assert second.id == "s/0/2"
    assert [d.id for d in costliest(ours, oracle, 1)] == ["s/0/1"]


@pytest.fixture(scope="module")
def report(fleet, manager) -> RouteReport:
    plan = RoutePlan(
        (), fleet, concurrency=4, policies=("kv-aware", "round-robin"), ladder=(2, 4), requests=2
    )
    return explain(plan, manager)


def test_a_report_holds_together(report: RouteReport):
    assert set(report.policies) == {"kv-aware", "round-robin"}
    assert {"hindsight 1a", "hindsight 1b"} == set(report.oracle.tried)
    for policy in report.policies.values():
        assert policy.ideal == report.ideal
        assert policy.infinite == pytest.approx(policy.achieved + sum(msgspec.structs.astuple(policy.loss)))
        assert policy.regret is not None and policy.regret >= 0
        assert policy.regrets is not None and min(msgspec.structs.astuple(policy.regrets)) >= 0
        assert policy.imbalance is not None and policy.imbalance >= 1
        assert policy.turns == report.trace.turns and not policy.errors
    assert report.policies["kv-aware"].achieved > report.policies["round-robin"].achieved
    assert [level.concurrency for level in report.levels] == [2, 4]
    same = report.levels[1].policies["round-robin"]
    assert same.ttft_ms == report.policies["round-robin"].ttft_ms
    assert len(report.policies["round-robin"].costliest) == 2
    assert "turn" in report.policies["round-robin"].costliest[0].reasons


def test_tables_fit_a_narrow_terminal_and_mark_the_best(report: RouteReport):
    console = Console(width=80, record=True, file=io.StringIO())
    print_report(report, console)
    text = console.export_text()
    assert "…" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("kv-aware") and "%*" in line]
    assert f"{report.policies['kv-aware'].achieved:.1%}*" in row
    assert "the decisions that cost most" in text and "TTFT p90 ms, by session trees" in text


@pytest.mark.parametrize("levels", [True, False])
def test_the_plot_is_drawn(report: RouteReport, tmp_path, levels: bool):
    path = tmp_path / "x.png"
    write_plot(path, report if levels else msgspec.structs.replace(report, levels=[]))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_same_trace_gives_the_same_report(report: RouteReport, fleet, manager):
    plan = RoutePlan((), fleet, concurrency=4, policies=("kv-aware",))
    again = explain(plan, manager).policies["kv-aware"]
    assert again.ttft_ms == report.policies["kv-aware"].ttft_ms
    assert again.achieved == report.policies["kv-aware"].achieved


def test_ladders_are_read():
    assert parse_ladder("8,16") == (8, 16) and parse_ladder(None) == ()
    with pytest.raises(UserError, match="--ladder is '8;9'"):
        parse_ladder("8;9")


def test_where_every_run_has_failed_turns_nothing_is_compared(fleet, manager, monkeypatch):
    from bien.replay.route import stack

    def broken(self, request, targets):
        raise ValueError("no")

    monkeypatch.setattr(stack.Watched, "choose", broken)
    with pytest.raises(BienError, match="kv-aware: .* turns failed, most often: .*no"):
        explain(RoutePlan((), fleet, policies=("kv-aware",)), manager)


@pytest.mark.parametrize("how", ["choice", "start"])
def test_a_router_that_fails_is_named_and_falsifies_no_other(
    report: RouteReport, fleet, manager, monkeypatch, how: str
):
    """`blocks` comes first by name; the pool and hindsight go on without it."""
    if how == "choice":
        monkeypatch.setattr(Blocks, "choose", lambda self, request, targets: Decision(99, 0))
    else:
        monkeypatch.setattr(Blocks, "__init__", lambda *_, **__: 1 / 0)
    plan = RoutePlan((), fleet, concurrency=4, policies=("blocks", "kv-aware"), ladder=(2, 4), rounds=0)
    broken = explain(plan, manager)
    assert broken.ideal == report.ideal > 0
    assert broken.policies["kv-aware"].achieved == report.policies["kv-aware"].achieved
    one = broken.policies["blocks"]
    assert (one.achieved, one.infinite, one.loss, one.regret) == (None, None, None, None)
    assert one.errors and broken.failed == ["blocks"] and report.failed == []
    assert broken.levels[0].policies["blocks"].achieved is None
    assert "blocks" not in str(broken.best)
    console = Console(width=80, record=True, file=io.StringIO())
    print_report(broken, console)
    text = console.export_text()
    rows = [line for line in text.splitlines() if line.startswith("blocks ")]
    assert len(rows) == 2 and "failed" in rows[0] and rows[1].split() == ["blocks", "failed", "failed"]
    assert "0.0%" not in rows[0] and "failed: blocks" in text


def test_the_command_fails_with_a_router(monkeypatch, tmp_path):
    monkeypatch.setattr(Blocks, "choose", lambda self, request, targets: Decision(99, 0))
    words = ["--policy", "blocks", "--policy", "sticky", "--jobs", "1", "--rounds", "0", "--sessions", "1"]
    out = tmp_path / "r.json"
    result = CliRunner().invoke(make_app(), ["route", "explain", *words, "--json", str(out)])
    assert result.exit_code == 1, result.output
    found = json.loads(out.read_text())
    assert found["failed"] == ["blocks"] and found["policies"]["blocks"]["achieved"] is None
    assert found["policies"]["sticky"]["achieved"] is not None


def test_an_empty_distribution_is_shown(report: RouteReport):
    bare = msgspec.structs.replace(report.policies["kv-aware"], ttft_ms=Distribution(), regret=None)
    console = Console(width=80, record=True, file=io.StringIO())
    print_report(msgspec.structs.replace(report, policies={"kv-aware": bare}), console)
    assert {"-", "-*"} & set(console.export_text().split())
