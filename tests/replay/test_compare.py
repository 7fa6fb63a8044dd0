from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bien.core.errors import UserError
from bien.replay.compare import Figure, compare
from bien.replay.compare_display import print_comparison
from bien.replay.measure import measure
from bien.replay.metrics import Distribution
from bien.replay.options import ReplayOptions
from bien.replay.result import Card, CorpusCard, Result, write_result
from bien.traces.model import TraceMeta
from tests.replay.fakes import FakeTarget, drive, session

NAMES = (Path("a.json"), Path("b.json"))


def result(prefill: float = 1.0, slots: int = 8, **options: int) -> Result:
    sessions = [session(f"s{i}", (0, 50, 11), (3, 20, 1)) for i in range(2)]
    run = drive(FakeTarget(prefill=prefill), sessions, ReplayOptions(**options))  # type: ignore[arg-type]
    deployment = {"pool": [{"name": "main", "slots": slots}], "gateway": {"port": 1}}
    return measure(run, TraceMeta("weka", 64), kind="simulated", deployment=deployment)


def with_card(**fields: object) -> Result:
    made = result()
    made.card = msgspec.structs.replace(made.card, **fields)
    return made


def figures(a: Result, b: Result) -> dict[str, Figure]:
    return {f.name: f for f in compare(a, b, NAMES).figures}


def test_ratios_are_b_over_a() -> None:
    a, b = result(concurrency=2), result(prefill=2.0, slots=16, concurrency=2)
    comparison = compare(a, b, NAMES)
    assert comparison.alike and not comparison.unlike and not comparison.invalid
    by_name = {f.name: f for f in comparison.figures}
    ttft = by_name["ttft_ms.p50"]
    assert (ttft.a, ttft.b, ttft.ratio) == pytest.approx((1000, 2000, 2))
    assert by_name["tpot_ms.p90"].ratio == pytest.approx(1)
    assert by_name["throughput.seconds"].ratio == pytest.approx(8 / 6)
    assert by_name["throughput.output"].ratio == pytest.approx(6 / 8)
    assert a.throughput.steady and by_name["throughput.steady.output"].a == a.throughput.steady.output
    assert by_name["jobs.per_hour"].ratio == pytest.approx(6 / 8)
    assert by_name["tokens_per_job.output"].a == 12
    assert by_name["accelerator_seconds_per_job"].a == pytest.approx(2 * 6 / 2)  # two accelerators, two jobs
    assert by_name["jobs.slowdown"] == Figure("jobs.slowdown", None, None, None)
    assert [(d.field, d.a, d.b) for d in comparison.deployment] == [("pool[0].slots", 8, 16)]


def test_a_ratio_to_nothing_is_null() -> None:
    assert figures(result(), result())["turns.errors"] == Figure("turns.errors", 0, 0, None)


def test_every_unlike_field_is_named_with_both_values() -> None:
    other = with_card(seed=7, concurrency=9, corpus=CorpusCard("ff"), gap_cap=2.0, forced_tokens=False)
    with pytest.raises(UserError) as caught:
        compare(result(), other, NAMES)
    text = str(caught.value)
    assert text.startswith("a.json and b.json did not measure the same load: card.corpus.hash is '")
    for part in (
        "card.seed is 0 and 7",
        "card.concurrency is 4 and 9",
        "card.gap_cap is null and 2",
        "card.forced_tokens is True and False",
        "valid: results with equal cards, or --force",
    ):
        assert part in text
    assert "token_scale" not in text


ASKED = {
    "seed": 1, "concurrency": 5, "token_scale": 0.5, "time_scale": 2.0, "gap_cap": 1.0, "sessions": 1,
    "window": 99, "model": "other", "loop": "open", "content": "text", "forced_tokens": False,
    "forced_acceptance": 0.5, "advance": (0.25, 0.75), "duration": 60.0,
}  # fmt: skip
MEASURED = {
    "coverage": 0.9, "overload": 0.1, "errors": 0.1, "length_mismatch": 0.1,
    "send_lag_ms": Distribution(p99=501.0), "loop_lag_ms": Distribution(p99=501.0),
}  # fmt: skip
UNREAD = {"corpus", "version"}


@pytest.mark.parametrize("field", sorted(set(Card.__struct_fields__) - UNREAD))
def test_each_field_of_a_card_counts(field: str) -> None:
    other = with_card(**{field: (ASKED | MEASURED)[field]})
    with pytest.raises(UserError, match=f"card.{field}[ .]"):
        compare(result(), other, NAMES)


def test_what_does_not_touch_the_load_may_differ() -> None:
    near = with_card(
        version="9",
        coverage=0.995,
        errors=0.005,
        send_lag_ms=Distribution(p99=400.0),
        loop_lag_ms=Distribution(),
    )
    near.card.corpus = msgspec.structs.replace(near.card.corpus, source="elsewhere", format="native")
    assert compare(result(), near, NAMES).versions == (result().card.version, "9")


def test_forced_is_said_in_the_table() -> None:
    comparison = compare(result(), with_card(seed=7), NAMES, force=True)
    assert not comparison.alike and [d.field for d in comparison.unlike] == ["card.seed"]
    console = Console(width=120, record=True, file=io.StringIO())
    print_comparison(comparison, console)
    text = console.export_text()
    assert "FORCED, cards are unlike: card.seed: 0 | 7" in text
    assert "forced: the cards are unlike" in text


def test_results_that_are_not_valid_are_said() -> None:
    bad = result()
    bad.validity.valid, bad.validity.reasons = False, ["cut [bold]short"]
    console = Console(width=120, record=True, file=io.StringIO())
    print_comparison(compare(result(), bad, NAMES), console)
    assert "b.json is not valid: cut [bold]short" in console.export_text()


def test_names_do_not_move_the_cursor() -> None:
    a, b = result(), result()
    a.deployment, b.deployment = {"\x1b[2J": "\x1b]0;x\x07"}, {}
    console = Console(width=120, file=(out := io.StringIO()))
    print_comparison(compare(a, b, NAMES), console)
    assert "\x1b" not in out.getvalue() and "\x07" not in out.getvalue()


def test_lags_that_are_too_long_must_be_the_same() -> None:
    late, later = (with_card(send_lag_ms=Distribution(p99=ms)) for ms in (600.0, 700.0))
    assert compare(late, late, NAMES).alike
    with pytest.raises(UserError, match=r"card\.send_lag_ms\.p99 is 600 and 700"):
        compare(late, later, NAMES)


def test_the_command(tmp_path: Path) -> None:
    write_result(tmp_path / "a.json", result())
    write_result(tmp_path / "b.json", result(concurrency=2))

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bien.replay.cli", "compare", "a.json", "b.json", *more]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    refused = run("--json", "c.json")
    assert refused.returncode == 2 and "card.concurrency is 4 and 2" in refused.stderr
    assert not refused.stdout and not (tmp_path / "c.json").exists()
    forced = run("--force", "--json", "c.json")
    assert forced.returncode == 0 and "forced" in forced.stdout
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["schema"] == "bien.comparison/1" and written["alike"] is False
    assert written["unlike"] == [{"field": "card.concurrency", "a": 4, "b": 2}]
    assert {"name": "ttft_ms.p50", "a": 1000.0, "b": 1000.0, "ratio": 1.0} in written["figures"]
    for place in ("a.json", "./b.json"):
        spared = run("--force", "--json", place)
        assert spared.returncode == 2 and "is read to make the comparison" in spared.stderr
        assert '"bien.result/1"' in (tmp_path / place).read_text()
    assert "cannot write comparison ." in run("--force", "--json", ".").stderr
