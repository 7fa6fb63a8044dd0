"""Mooncake traces: arrivals and global block ids kept, everything else refused by line."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from bien.core.errors import TraceError
from bien.core.plugins import PluginManager
from bien.plugins.trace_formats.mooncake import MooncakeReader
from bien.replay.traces import open_paths
from bien.traces.model import Session
from bien.traces.native import read_native, write_native
from bien.traces.scale import scale_session

ROWS: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 5]},
    {"timestamp": 1500, "input_length": 1, "output_length": 1, "hash_ids": [9]},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    return path


def read(path: Path) -> list[Session]:
    return list(open_paths([path], PluginManager.load()).sessions())


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz"])
def test_requests_are_sessions_that_start_at_their_timestamps(name: str, tmp_path: Path) -> None:
    sessions = read(write(tmp_path / name, ROWS))
    assert [s.start for s in sessions] == [0, 1.5, 1.5]
    assert len({s.scope for s in sessions}) == 1  # ids are global
    turns = [s.streams[0].turns[0] for s in sessions]
    assert [t.input.runs() for t in turns] == [[(0, 1100)], [(0, 512), (5 * 512, 512)], [(9 * 512, 1)]]
    assert [t.output_tokens for t in turns] == [50, 7, 1]
    outputs = sorted(t.output.runs()[0] for t in turns)
    ends = [0, *(start + n for start, n in outputs)]
    assert all(start >= end for (start, _), end in zip(outputs, ends, strict=False)), "fresh ids overlap"


def test_starts_are_kept_by_the_native_format_and_by_scaling(tmp_path: Path) -> None:
    reader = MooncakeReader()
    sessions = list(reader.sessions(write(tmp_path / "t.jsonl", ROWS)))
    write_native(tmp_path / "t.bien.jsonl.zst", reader.meta, sessions)
    assert list(read_native(tmp_path / "t.bien.jsonl.zst")) == sessions
    assert [scale_session(s, 3).start for s in sessions] == [0, 1.5, 1.5]
    assert reader.meta.fidelity.output_tokens == 58 and reader.meta.block_tokens == 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": [0, 5, 6]}, "3 hash_ids for input_length = 1024; valid: 2"),
        ({"hash_ids": [0, -5]}, ">= 0"),
        ({"hash_ids": [0, 1 << 40]}, "Expected `int` <="),
        ({"input_length": 0, "hash_ids": []}, ">= 1"),
        ({"output_length": 0}, ">= 1"),
        ({"timestamp": -1}, ">= 0"),
        ({"timestamp": "now"}, "Expected `float`"),
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"session_id": "a", "delay": 5}, "'session_id' is a field of AIPerf's dialect"),
        ({"wait_for": []}, "'wait_for' is a field of Dynamo's agentic dialect"),
        ({"chat_id": 1, "turn": 1}, "'chat_id' is a field of Bailian's dialect"),
    ],
)
def test_a_wrong_line_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [ROWS[0], {**ROWS[1], **change}])
    with pytest.raises(TraceError, match=rf"t\.jsonl, line 2: .*{message}"):
        read(path)


def test_times_go_forward_and_files_are_whole(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2: timestamp 0 is before the last line's, 1500"):
        read(write(tmp_path / "t.jsonl", [ROWS[1], ROWS[0]]))
    whole = lzma.compress("".join(json.dumps(row) + "\n" for row in ROWS * 1).encode() * 1)
    (tmp_path / "cut.jsonl.xz").write_bytes(whole[:-20])
    with pytest.raises(TraceError, match="damaged"):
        read(tmp_path / "cut.jsonl.xz")
    (tmp_path / "half.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"timestamp": 1, "inp')
    with pytest.raises(TraceError, match="line 2: "):
        read(tmp_path / "half.jsonl")
