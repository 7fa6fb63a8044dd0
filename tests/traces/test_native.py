from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.errors import TraceError
from bien.core.request import BlockRuns
from bien.traces.model import Fidelity, Session, Stream, TraceMeta, Turn
from bien.traces.native import NativeWriter, read_header, read_native, write_native
from bien.traces.synthesize import SynthesisParameters, sample_meta, synthesize

runs = st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(1, 200)), min_size=1, max_size=4).map(
    BlockRuns.of
)
turns = st.builds(
    Turn,
    runs,
    runs,
    gap=st.floats(0, 1e6),
    gap_kind=st.sampled_from(["start", "think", "tool", "spawn"]),
    tool=st.text(max_size=3),
    cached_tokens=st.none() | st.integers(0, 9),
    ttft=st.none() | st.floats(0, 9),
    duration=st.none() | st.floats(0, 9),
    stop=st.sampled_from(["", "end_turn"]),
    derived=st.integers(0, 9),
    joins=st.lists(st.integers(0, 5), max_size=2).map(tuple),
)
streams = st.builds(
    Stream,
    st.integers(0, 9),
    st.lists(turns, max_size=3),
    st.none() | st.integers(0, 3),
    st.none() | st.integers(0, 3),
    st.none() | st.integers(0, 3),
    st.text(max_size=4),
)
sessions = st.builds(
    Session, st.text(max_size=5), st.lists(streams, max_size=3), st.text(max_size=3), st.text(max_size=3)
)


@settings(max_examples=25)
@given(st.lists(sessions, max_size=3), st.sampled_from(["t.bien.jsonl", "t.bien.jsonl.zst"]))
def test_round_trip_is_exact(
    tmp_path_factory: pytest.TempPathFactory, content: list[Session], name: str
) -> None:
    path = tmp_path_factory.mktemp("native") / name
    meta = TraceMeta("weka", 64, "x", Fidelity({"gap": "exact"}, ["n"], 3, 4))
    write_native(path, meta, content)
    assert read_header(path) == meta
    assert list(read_native(path)) == content


def sample(path: Path) -> bytes:
    write_native(path, sample_meta(), synthesize(SynthesisParameters(sessions=3)))
    return path.read_bytes()


@pytest.mark.parametrize("name", ["t.bien.jsonl", "t.bien.jsonl.zst"])
def test_a_file_cut_anywhere_is_noticed(tmp_path: Path, name: str) -> None:
    whole = sample(tmp_path / name)
    cuts = {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1}
    cuts |= (
        {i + 1 for i in range(len(whole) - 1) if whole[i : i + 1] == b"\n"} if name.endswith("l") else set()
    )
    for cut in cuts:
        (tmp_path / name).write_bytes(whole[:cut])
        with pytest.raises(TraceError, match=name):
            list(read_native(tmp_path / name))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = sample(path).split(b"\n")
    lines[2] = lines[2].replace(b'"streams"', b'"strems"', 1)
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(TraceError, match=r"line 3: .*strems"):
        list(read_native(path))


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(sample(path).replace(b"bien.trace/1", b"bien.trace/9", 1))
    with pytest.raises(TraceError, match="bien.trace/9.*reads 'bien.trace/1'"):
        list(read_native(path))


def test_an_error_while_writing_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), NativeWriter(tmp_path / "t.jsonl", sample_meta()):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
