"""The native format: JSON lines, plain or zstd, streamed both ways, exact.

Line 1 is the header, then one session a line, and last the number of sessions, so that a file cut at
any place is noticed. Content is two flat lists of `start, length` pairs:
`b` in units of the trace's block for the aligned beginning, `t` in tokens for the rest.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal

import msgspec
import zstandard

from bien.core.errors import TraceError
from bien.core.request import BlockRuns
from bien.traces.files import open_stream
from bien.traces.model import Fidelity, Session, Stream, TraceMeta, Turn

SCHEMA = "bien.trace/1"


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    block_tokens: int
    format: str = "native"
    source: str = ""
    fidelity: Fidelity = msgspec.field(default_factory=Fidelity)


class _End(msgspec.Struct, forbid_unknown_fields=True):
    end: int  # sessions written


class _Content(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    b: list[int] = []
    t: list[int] = []


class _Turn(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    input: _Content
    output: _Content
    gap: float = 0.0
    kind: Literal["start", "think", "tool", "spawn"] = "think"
    tool: str = ""
    cached: int | None = None
    ttft: float | None = None
    duration: float | None = None
    stop: str = ""
    derived: int = 0
    joins: list[int] = []


class _Stream(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    id: int
    turns: list[_Turn]
    parent: int | None = None
    after: int | None = None
    before: int | None = None
    label: str = ""


class _Session(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    id: str
    streams: list[_Stream]
    tenant: str = ""
    scope: str = ""
    provenance: str = ""
    start: float | None = None


class NativeWriter:
    """Writes sessions as they come. Use as a context manager; the file appears whole when it closes
    without an error, never half."""

    def __init__(self, path: Path, meta: TraceMeta) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.part")
        self._block = meta.block_tokens
        self._encoder = msgspec.json.Encoder()
        self._written = 0
        self._raw = self._part.open("wb")
        self._out: IO[bytes] = self._raw
        if path.suffix == ".zst":
            self._out = zstandard.ZstdCompressor(level=12).stream_writer(self._raw, closefd=False)
        self._line(_Header(SCHEMA, meta.block_tokens, meta.format, meta.source, meta.fidelity))

    def write(self, session: Session) -> None:
        self._line(_pack(session, self._block))
        self._written += 1

    def _line(self, value: msgspec.Struct) -> None:
        self._out.write(self._encoder.encode(value) + b"\n")

    def __enter__(self) -> NativeWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._line(_End(self._written))
        if self._out is not self._raw:
            self._out.close()
        self._raw.close()
        if kind is None:
            os.replace(self._part, self._path)
        else:
            self._part.unlink(missing_ok=True)


def write_native(path: Path, meta: TraceMeta, sessions: Iterable[Session]) -> None:
    """Write a whole trace; zstd when `path` ends in .zst."""
    with NativeWriter(path, meta) as writer:
        for session in sessions:
            writer.write(session)


def read_header(path: Path) -> TraceMeta:
    """The first line.

    Raises:
        TraceError: it is no header of this format's version.
    """
    with open_stream(path) as stream:
        for number, line in _lines(path, stream):
            return _header(path, number, line)
    raise TraceError(f"trace {path} is empty")


def read_native(path: Path) -> Iterator[Session]:
    """The sessions, one line in memory at a time.

    Raises:
        TraceError: naming file and line of the damage.
    """
    decoder = msgspec.json.Decoder(_Session)
    block = read = number = 0
    end: int | None = None
    with open_stream(path) as stream:
        for number, line in _lines(path, stream):
            try:
                if not block:
                    block = _header(path, number, line).block_tokens
                elif end is not None:
                    raise ValueError("content after the end line")
                elif line.startswith(b'{"end":'):
                    end = msgspec.json.decode(line, type=_End).end
                else:
                    yield _unpack(decoder.decode(line), block)
                    read += 1
            except (msgspec.DecodeError, ValueError) as error:
                raise TraceError(f"trace {path}, line {number}: {error}") from None
    if not block:
        raise TraceError(f"trace {path} is empty")
    if end is None:
        raise TraceError(f"trace {path} is cut off after line {number}: its end line is missing")
    if end != read:
        raise TraceError(f"trace {path}, line {number}: {end} sessions were written, {read} are there")


def _header(path: Path, number: int, line: bytes) -> TraceMeta:
    try:
        head = msgspec.json.decode(line, type=_Header)
    except msgspec.DecodeError as error:
        raise TraceError(f"trace {path}, line {number}: not a header: {error}") from None
    if head.schema != SCHEMA:
        raise TraceError(f"trace {path} has schema {head.schema!r}; this version reads {SCHEMA!r}")
    if head.block_tokens < 1:
        raise TraceError(f"trace {path}: block_tokens is {head.block_tokens}; valid: 1 or more")
    return TraceMeta(head.format, head.block_tokens, head.source, head.fidelity)


def _lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):  # type: ignore[type-var]
            if line.strip():
                if not line.endswith(b"\n"):
                    raise TraceError(f"trace {path} is cut off in line {number}")
                yield number, line
    except (zstandard.ZstdError, EOFError, OSError) as error:
        raise TraceError(f"trace {path} is damaged after line {number}: {error}") from None


def _pack(session: Session, block: int) -> _Session:
    streams = [
        _Stream(
            s.id,
            [
                _Turn(
                    _pack_runs(t.input, block),
                    _pack_runs(t.output, block),
                    t.gap,
                    t.gap_kind,
                    t.tool,
                    t.cached_tokens,
                    t.ttft,
                    t.duration,
                    t.stop,
                    t.derived,
                    list(t.joins),
                )
                for t in s.turns
            ],
            s.parent,
            s.spawned_after,
            s.joined_before,
            s.label,
        )
        for s in session.streams
    ]
    return _Session(session.id, streams, session.tenant, session.scope, session.provenance, session.start)


def _pack_runs(content: BlockRuns, block: int) -> _Content:
    blocks: list[int] = []
    tokens: list[int] = []
    for start, n in content.runs():
        if not tokens and start % block == 0 and n >= block:
            whole = n // block
            blocks += (start // block, whole)
            start, n = start + whole * block, n - whole * block
        if n:
            tokens += (start, n)
    return _Content(blocks, tokens)


def _unpack(packed: _Session, block: int) -> Session:
    streams = [
        Stream(
            s.id,
            [
                Turn(
                    _unpack_runs(t.input, block),
                    _unpack_runs(t.output, block),
                    t.gap,
                    t.kind,
                    t.tool,
                    t.cached,
                    t.ttft,
                    t.duration,
                    t.stop,
                    t.derived,
                    tuple(t.joins),
                )
                for t in s.turns
            ],
            s.parent,
            s.after,
            s.before,
            s.label,
        )
        for s in packed.streams
    ]
    return Session(packed.id, streams, packed.tenant, packed.scope, packed.provenance, packed.start)


def _unpack_runs(packed: _Content, block: int) -> BlockRuns:
    if len(packed.b) % 2 or len(packed.t) % 2:
        raise ValueError("runs are pairs of start and length; one is incomplete")
    runs = [(s * block, n * block) for s, n in zip(packed.b[::2], packed.b[1::2], strict=True)]
    runs += zip(packed.t[::2], packed.t[1::2], strict=True)
    if any(n < 1 for _, n in runs):
        raise ValueError("a run has no tokens")
    return BlockRuns.of(runs)
