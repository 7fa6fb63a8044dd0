from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bien.core.errors import TraceError
from bien.core.request import BlockRuns
from bien.plugins.trace_formats.native import NativeReader
from bien.plugins.trace_formats.weka import WekaReader
from bien.traces.model import Session, Stream, TraceMeta, Turn
from bien.traces.native import write_native
from bien.traces.open import open_trace
from bien.traces.stats import measure, turn_order

READERS = {"native": NativeReader, "weka": WekaReader}


def turn(t: float, n: int, out: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": n, "out": out, "hash_ids": ids, "api_time": 2.0} | more


def agent(t: float, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "a", "requests": requests, "status": "completed"} | more


def document(*requests: dict[str, Any], id: str = "s1", **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": list(requests),
    } | more


def session(id: str) -> Session:
    return Session(id, [Stream(0, [Turn(BlockRuns.of([(0, 40)]), BlockRuns.of([(40, 5)]))])], scope=id)


def read(tmp_path: Path, *documents: dict[str, Any]) -> list[Session]:
    for number, each in enumerate(documents):
        (tmp_path / f"{number}.json").write_text(json.dumps(each))
    return list(WekaReader().sessions(tmp_path))


def test_blocks_become_runs_and_the_next_prompt_gives_tail_and_output(tmp_path: Path) -> None:
    (session,) = read(
        tmp_path, document(turn(0, 200, 30, [1, 2, 3]), turn(10, 400, 50, [1, 2, 3, 4, 9, 10], api_time=1.0))
    )
    first, second = session.streams[0].turns
    assert second.input.slice(0, 384).runs() == [(64, 256), (9 * 64, 128)]
    assert second.input_tokens == 400
    # Tail and output of the first turn are what the second holds there: block 4 from offset 0 on.
    assert first.input.runs() == [(64, 200)]
    assert first.output.runs() == [(64 + 200, 30)]
    assert first.derived == 30
    assert second.derived == 0 and second.output_tokens == 50
    fresh = second.input.slice(384, 400).runs() + second.output.runs()
    assert all(start >= 11 * 64 for start, _ in fresh)


def test_output_is_derived_as_far_as_the_next_prompt_reaches(tmp_path: Path) -> None:
    (session,) = read(tmp_path, document(turn(0, 64, 100, [1]), turn(9, 128, 1, [1, 2])))
    first = session.streams[0].turns[0]
    assert first.derived == 64 and first.output_tokens == 100
    assert first.output.runs()[0] == (2 * 64, 64)


def test_a_prompt_that_does_not_continue_gives_nothing(tmp_path: Path) -> None:
    reader = WekaReader()
    (tmp_path / "a.json").write_text(
        json.dumps(document(turn(0, 130, 7, [1, 2]), turn(9, 300, 9, [1, 5, 6, 7])))
    )
    (session,) = reader.sessions(tmp_path)
    first, second = session.streams[0].turns
    assert first.derived == 0
    assert first.input.slice(0, 64) == second.input.slice(0, 64)
    ids = [run for t in (first, second) for run in t.output.runs()]
    assert len(set(ids)) == len(ids)
    assert (reader.meta.fidelity.derived_output_tokens, reader.meta.fidelity.output_tokens) == (0, 16)


def test_zero_counts_become_one(tmp_path: Path) -> None:
    (session,) = read(tmp_path, document(turn(0, 0, 0, [])))
    (only,) = session.streams[0].turns
    assert (only.input_tokens, only.output_tokens) == (1, 1)


def test_gaps_run_from_end_to_start(tmp_path: Path) -> None:
    (session,) = read(
        tmp_path,
        document(
            turn(0, 64, 5, [1], stop="tool_use"),
            turn(5, 128, 5, [1, 2], input_types=["tool_result"]),
            turn(6, 192, 5, [1, 2, 3], input_types=["text"]),
            turn(20, 256, 5, [1, 2, 3, 4], api_time=None, think_time=12.0),
            turn(50, 256, 5, [1, 2, 3, 5], think_time=21.0),
        ),
    )
    turns = session.streams[0].turns
    assert [t.gap for t in turns] == [0, 3, 0, 12, 21]
    assert [t.gap_kind for t in turns] == ["start", "tool", "think", "think", "think"]


@pytest.mark.parametrize("absolute", [False, True])
def test_sub_agents_spawn_after_and_join_before_the_parents_turns(tmp_path: Path, absolute: bool) -> None:
    shift = 5.0 if absolute else 0.0
    inner = [turn(shift + 0.5, 64, 5, [9]), turn(shift + 3.0, 128, 5, [9, 10])]
    (session,) = read(
        tmp_path,
        document(turn(0, 64, 5, [1]), agent(5.0, inner, duration_ms=4000), turn(12, 128, 5, [1, 2])),
    )
    root, sub = session.streams
    assert (sub.parent, sub.spawned_after, sub.joined_before) == (0, 0, 1)
    assert [t.gap for t in sub.turns] == [3.5, 0.5]
    assert sub.turns[0].gap_kind == "spawn"
    assert root.turns[1].joins == (1,)
    assert root.turns[1].gap == 2.0  # after the sub-agent's end at 5 + 3 + 2


def test_a_marker_that_can_only_be_an_end_is_read_as_one(tmp_path: Path) -> None:
    inner = [turn(0, 64, 5, [9]), turn(80, 128, 5, [9, 10])]
    (session,) = read(
        tmp_path,
        document(turn(0, 64, 5, [1]), agent(92.5, inner, duration_ms=90_000), turn(100, 128, 5, [1, 2])),
    )
    root, sub = session.streams
    assert sub.turns[0].gap == 0.5
    assert root.turns[1].gap == 100 - 84.5


def test_sub_agents_at_the_ends(tmp_path: Path) -> None:
    (session,) = read(
        tmp_path,
        document(
            agent(0.0, [turn(0, 64, 5, [8])]),
            turn(1, 64, 5, [1]),
            agent(5.0, [turn(0, 64, 5, [9])], status="async_launched", duration_ms=None),
        ),
    )
    _, early, late = session.streams
    assert (early.spawned_after, early.joined_before) == (None, 0)
    assert (late.spawned_after, late.joined_before) == (0, None)
    assert [s.label for s in session.streams] == ["", "a", "a"]
    assert [t.input.runs()[0][0] // 64 for _, t in turn_order(session)] == [8, 1, 9]


def test_scopes(tmp_path: Path) -> None:
    one, two = read(tmp_path, document(turn(0, 64, 1, [1])), document(turn(0, 64, 1, [1]), id="s2"))
    assert (one.scope, two.scope) == ("s1", "s2")
    shared = [document(turn(0, 70, 9, [1]), id=i, hash_id_scope="global") for i in "ab"]
    one, two = read(tmp_path, *shared)
    a, b = one.streams[0].turns[0], two.streams[0].turns[0]
    assert one.scope == two.scope
    assert a.input.slice(0, 64) == b.input.slice(0, 64)
    assert a.input.slice(64, 70) != b.input.slice(64, 70) and a.output != b.output


@pytest.mark.parametrize("name", ["t.json.xz", "t.tar.xz", "folder"])
def test_containers(tmp_path: Path, name: str) -> None:
    content = json.dumps(document(turn(0, 64, 5, [1]))).encode()
    path = tmp_path / name
    if name == "folder":
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "a.json").write_bytes(content)
        (path / "README.md").write_text("no trace")
    elif name == "t.tar.xz":
        with tarfile.open(path, "w:xz") as archive:
            for member in ("x/a.json", "x/LICENSE"):
                info = tarfile.TarInfo(member)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    else:
        path.write_bytes(lzma.compress(content))
    trace = open_trace([path], READERS)
    assert [s.id for s in trace.sessions()] == ["s1"]
    assert trace.meta.format == "weka" and trace.meta.block_tokens == 64


def test_equal_ids_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document(turn(0, 64, 5, [1]))))
    sessions = list(open_trace([path, path], READERS).sessions())
    assert [(s.id, s.scope) for s in sessions] == [("s1", "s1"), ("s1#2", "s1#2")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(document(turn(0, 64, 5, [1, 2, 3])))[:-40], r"damaged: .*byte"),
        (
            json.dumps(document(turn(0, 64, 5, [1, 2, 3]))),
            r"requests\[0\].hash_ids` has 3 blocks .* `in` = 64",
        ),
        (json.dumps(document(turn(0, 64, 5, [-1]))), r"hash_ids` has ids from -1 to -1; valid .*: 0 to"),
        (json.dumps(document(turn(0, 64, 5, [1 << 80]))), r"requests\[0\].hash_ids` has ids from"),
        (json.dumps(document(turn(0, 64, -1, [1]))), r"requests\[0\]`: `in` and `out`"),
        (json.dumps(document(turn(0, 64, 5, [1]) | {"in": "x"})), r"\$.requests\[0\].in"),
        (json.dumps(document(turn(0, 64, 5, [1]), block_size=0)), r"block_size` is 0"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "half.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"half\.json.*" + message):
        list(WekaReader().sessions(path))


def test_a_cut_archive_is_named(tmp_path: Path) -> None:
    whole = tmp_path / "w.tar.xz"
    with tarfile.open(whole, "w:xz") as archive:
        for number in range(3):
            content = json.dumps(document(turn(0, 64, 5, [1]), id=str(number))).encode()
            info = tarfile.TarInfo(f"{number}.json")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path = tmp_path / "cut.tar.xz"
    path.write_bytes(whole.read_bytes()[:-60])
    with pytest.raises(TraceError, match=r"cut\.tar\.xz"):
        list(WekaReader().sessions(path))


def test_a_pipe_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="pipe is a pipe or device; write its content to a file and give"):
        open_trace([tmp_path / "pipe"], READERS)


def test_a_folder_of_several_formats_is_read_as_far_as_it_can_be(tmp_path: Path) -> None:
    """What comes first does not decide."""
    folder = tmp_path / "mixed"
    (folder / "sub").mkdir(parents=True)
    write_native(folder / "0.jsonl", TraceMeta("native", 16), [])
    (folder / "1.json").write_text('{"hello": 1}')
    (folder / "2.json").touch()
    (folder / "sub" / "3.json").write_text(json.dumps(document(turn(0, 64, 5, [1]))))
    trace = open_trace([folder], READERS)
    assert [s.id for s in trace.sessions()] == ["s1"]
    assert trace.meta.fidelity.notes == ["documents of another format left out: 0.jsonl, 1.json, 2.json"]
    (folder / "sub" / "3.json").write_text(json.dumps(document(turn(0, 64, 5, [1])))[:-4])
    with pytest.raises(TraceError, match=r"3\.json is damaged"):
        list(open_trace([folder], READERS).sessions())


def test_native_files_of_a_folder_are_read_one_by_one(tmp_path: Path) -> None:
    for name in "ab":
        write_native(tmp_path / f"{name}.jsonl", TraceMeta("native", 16), [session(name)])
    for number in range(7):
        (tmp_path / f"{number}.json").write_text("{}")
    trace = open_trace([tmp_path], READERS)
    assert [s.id for s in trace.sessions()] == ["a", "b"]
    assert (trace.meta.format, trace.meta.source) == ("native", tmp_path.name)
    (note,) = trace.meta.fidelity.notes
    assert note.endswith("left out: 0.json, 1.json, 2.json, 3.json, 4.json and 2 more")


def test_an_archive_may_begin_with_another_file(tmp_path: Path) -> None:
    path = tmp_path / "w.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in (
            ("README", b"hello"),
            ("0.json", json.dumps(document(turn(0, 64, 5, [1]))).encode()),
            ("1.json", b"[]"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    trace = open_trace([path], READERS)
    assert [s.id for s in trace.sessions()] == ["s1"]
    assert trace.meta.fidelity.notes == ["documents of another format left out: 1.json"]


def test_unknown_content_lists_the_formats(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"hello": 1}')
    with pytest.raises(TraceError, match="known: native, weka"):
        open_trace([path], READERS)
    path.write_text("")
    with pytest.raises(TraceError, match=r"x\.json is empty"):
        open_trace([path], READERS)
    with pytest.raises(TraceError, match="no such trace"):
        open_trace([tmp_path / "none"], READERS)


def test_the_given_sample(weka_data: Path) -> None:
    reader = WekaReader()
    sessions = list(reader.sessions(weka_data / "sample"))
    raw = [json.loads(p.read_bytes()) for p in sorted((weka_data / "sample").glob("*.json"))]
    assert [s.id for s in sessions] == [d["id"] for d in raw]
    for session, each in zip(sessions, raw, strict=True):
        totals = each["totals"]["combined_tokens"]
        turns = [t for s in session.streams for t in s.turns]
        assert sum(t.input_tokens for t in turns) == totals["input"]
        assert sum(t.output_tokens for t in turns) == totals["output"]
        assert all(t.gap >= 0 for t in turns)
    assert sum(len(s.streams) > 1 for s in sessions) == 5
    fidelity = reader.meta.fidelity
    assert fidelity.derived_output_tokens / fidelity.output_tokens > 0.7


def test_the_given_samples_reuse_equals_a_slow_oracle(weka_data: Path) -> None:
    names = ["trace_0089", "trace_0265", "trace_0277", "trace_0068"]
    documents = [weka_data / "sample" / f"{n}.json" for n in names]
    sessions = [s for p in documents for s in WekaReader().sessions(p)]
    hits = total = 0
    for path in documents:
        each = json.loads(path.read_bytes())
        seen: set[tuple[int, ...]] = set()
        entries = [r for e in each["requests"] for r in e.get("requests", [e])]
        for entry in entries:
            ids = entry["hash_ids"]
            hit = max((n for n in range(len(ids) + 1) if tuple(ids[:n]) in seen), default=0)
            hits += min(hit * 64, (entry["in"] - 1) // 64 * 64)
            total += entry["in"]
            seen.update(tuple(ids[:n]) for n in range(1, len(ids) + 1))
    stats = measure(sessions, 64)
    assert stats.input_tokens == total
    # The trace's own ids know nothing of outputs; those add whole blocks where a next prompt holds them.
    assert hits <= stats.hit <= hits + stats.output_tokens + 64 * stats.turns
    assert stats.hit_rate > 0.8


def test_the_given_samples_hit_rate(weka_data: Path) -> None:
    stats = measure(WekaReader().sessions(weka_data / "sample"), 64)
    assert stats.sessions == 12 and stats.turns == 847
    assert 0.93 < stats.hit_rate < 0.97


def test_a_reader_that_fails_keeps_no_other_from_reading(tmp_path: Path) -> None:
    class Broken(WekaReader):
        def matches(self, path: Path) -> bool:
            raise RuntimeError("boom")

    path = tmp_path / "x.json"
    path.write_text(json.dumps(document(turn(0, 64, 5, [1]))))
    assert len(list(open_trace([path], {"broken": Broken, **READERS}).sessions())) == 1
    path.write_text("{}")
    with pytest.raises(TraceError, match="known: broken, native, weka; 'broken' failed: RuntimeError: boom"):
        open_trace([path], {"broken": Broken, **READERS})
