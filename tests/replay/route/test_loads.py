from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bien.replay.bench.route_loads import Loss, losses, main, table
from bien.traces.model import Session, TraceMeta
from bien.traces.native import write_native

TIMES = {
    4: {"ours": [10.0, 20.0, 30.0], "near": [9.0, 25.0, 29.0], "far": [100.0]},
    8: {"ours": [10.0, 20.0, 30.0], "near": [8.0, 16.0, 29.0], "far": [100.0]},
}


def test_who_is_slower_with_every_seed_loses_and_who_is_in_the_median_is_within_the_spread() -> None:
    always, sometimes = losses(TIMES, "ours")
    assert always == Loss(8, "near", pytest.approx(0.25), True)
    assert sometimes == Loss(4, "near", pytest.approx(30 / 29 - 1), False)
    assert losses(TIMES, "near") == []
    assert {(loss.trees, loss.to) for loss in losses(TIMES, "far")} == {
        (n, o) for n in TIMES for o in ("ours", "near")
    }


def test_the_table_has_medians_and_marks_the_best() -> None:
    assert table(TIMES).splitlines() == [
        "| trees | ours | near | far |",
        "|---|---|---|---|",
        "| 4 | **20** | 25 | 100 (1) |",
        "| 8 | 20 | **16** | 100 (1) |",
    ]


def test_it_plays_a_trace(tmp_path: Path, sessions: list[Session], capsys: Any) -> None:
    trace, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    write_native(trace, TraceMeta("native", 16), sessions[:4])
    options = f"--levels 1,3 --sessions 3 --seeds 2 --policy kv-aware --policy sticky --json {result}"
    main([str(trace), *options.split()])
    found = msgspec.json.decode(result.read_bytes())
    assert found["router"] == "kv-aware"
    assert set(found["p90_ttft_ms"]) == {"1", "3"}
    for policies in found["p90_ttft_ms"].values():
        assert len(policies["kv-aware"]) == 2 and set(policies) == {"kv-aware", "sticky"}
        assert all(0 < ms < float("inf") for times in policies.values() for ms in times)
    text = capsys.readouterr().out
    assert text.startswith("| trees | kv-aware | sticky |")
    assert ("kv-aware loses nowhere" in text) is not any(loss["always"] for loss in found["slower"])
