"""Weka traces (kv-cache-tester): one JSON document per session, prompts as lists of block ids.

A listed block id covers `block_size` tokens; the tail of a prompt beyond its last full block and all
outputs have no ids. They follow from the next prompt of the same stream where that one continues this
one (holds all its full blocks), and get fresh ids elsewhere.

Gaps: `t[k] - (t[k-1] + api_time[k-1])`, at least 0. Both are given to the second; `think_time` says the
same, but counts from the last request whose end was recorded, so it is used only where the previous
`api_time` is missing and it is the smaller of the two.

A sub-agent's own times are absolute when its first one is not before its marker, else relative to its
start. That start is the marker's `t`, unless a marker of the session can only be an end (a start there
would let the sub-agent outlive the parent's next turn): then it is `t - duration_ms`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.traces.api import (
    BlockRuns,
    Fidelity,
    Session,
    Stream,
    TraceError,
    TraceMeta,
    Turn,
    document_files,
    documents,
    head,
    left_out,
)

_FIELDS = {
    "input": "exact",
    "input tail": "derived",
    "output": "derived",
    "gap": "exact",
    "spawn": "derived",
    "join": "derived",
    "tool": "lost",
    "text": "lost",
}
_HEAD = 65536  # bytes that tell a document from one of another format
_SLACK = 0.6  # times are rounded to whole seconds
_MOST = 1 << 46  # tokens that ids can name: beyond it scaling could not tell them apart


Seconds = Annotated[float, msgspec.Meta(ge=-1e8, le=1e8)]  # three years either way


class _Entry(msgspec.Struct, rename={"tokens_in": "in", "tokens_out": "out"}):
    """A request, or a sub-agent that holds requests of its own."""

    t: Seconds
    type: str
    tokens_in: int = 0
    tokens_out: int = 0
    hash_ids: list[int] = []
    input_types: list[str] = []
    stop: str | None = ""
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    ttft: Seconds | None = None
    agent_id: str = ""
    subagent_type: str | None = ""
    duration_ms: float | None = None
    requests: list[_Entry] = []

    @property
    def end(self) -> float:
        return self.t + (self.api_time or 0.0)


class _Document(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Entry]
    hash_id_scope: str = "local"


class WekaReader:
    """Reads a file, a folder or an archive of such documents."""

    name = "weka"

    def __init__(self) -> None:
        self.meta = TraceMeta("weka", 1, fidelity=Fidelity(dict(_FIELDS)))
        self._decoder = msgspec.json.Decoder(_Document)
        self._fresh = 1 << 50  # next fresh id where ids are shared between documents
        self._estimated = 0  # gaps after a turn whose end is unknown
        self._turns = 0
        self._left_out: list[str] = []  # documents that are none of this format

    def matches(self, path: Path) -> bool:
        files = document_files(path) if path.is_dir() else [path]
        return any(_looks_weka(head(file, _HEAD)) for file in files)

    def sessions(self, path: Path) -> Iterator[Session]:
        self.meta.source = path.name
        for name, content in documents(path):
            try:
                document = self._decode(name, content)
            except TraceError:
                if name == str(path) or _looks_weka(content[:_HEAD]):
                    raise
                self._left_out.append(name.removeprefix(str(path)).lstrip("/:"))
                self._note()
                continue
            yield self._session(name, document)

    def close(self) -> None:
        pass

    def _decode(self, name: str, content: bytes) -> _Document:
        try:
            document = self._decoder.decode(content)
        except msgspec.ValidationError as error:
            raise TraceError(f"trace {name}: {error}") from None
        except msgspec.DecodeError as error:
            position = "" if "byte" in str(error) else f" (cut off at byte {len(content)})"
            raise TraceError(f"trace {name} is damaged: {error}{position}") from None
        if document.block_size < 1:
            raise TraceError(f"trace {name}: `$.block_size` is {document.block_size}; valid: 1 or more")
        return document

    def _session(self, name: str, document: _Document) -> Session:
        self.meta.block_tokens = document.block_size
        local = document.hash_id_scope == "local"
        builder = _Builder(name, document.block_size, _first_fresh(document) if local else self._fresh)
        builder.add(document.requests, "$.requests")
        if not local:
            self._fresh = builder.fresh
        self._count(builder)
        scope = document.id if local else f"weka:{document.hash_id_scope}"
        return Session(document.id, builder.streams, scope=scope, provenance=name)

    def _count(self, builder: _Builder) -> None:
        turns = [t for s in builder.streams for t in s.turns]
        self._turns += len(turns)
        self._estimated += builder.estimated
        fidelity = self.meta.fidelity
        fidelity.derived_output_tokens += sum(t.derived for t in turns)
        fidelity.output_tokens += sum(t.output_tokens for t in turns)
        self._note()

    def _note(self) -> None:
        notes = [left_out(self._left_out)] if self._left_out else []
        if self._estimated:
            share = self._estimated / self._turns
            notes.append(f"{share:.1%} of gaps estimated: the turn before them has no recorded end")
        self.meta.fidelity.notes = notes


def _looks_weka(start: bytes) -> bool:
    if b'"input_length"' in start:  # a Mooncake trace, whose lines have hash_ids too
        return False
    return start.lstrip()[:1] == b"{" and (b'"hash_ids"' in start or b'"hash_id_scope"' in start)


def _first_fresh(document: _Document) -> int:
    entries = [*document.requests, *(r for e in document.requests for r in e.requests)]
    return (max((max(e.hash_ids, default=0) for e in entries), default=0) + 1) * document.block_size


class _Builder:
    """Turns one document's entries into streams."""

    def __init__(self, name: str, block: int, fresh: int) -> None:
        self.name = name
        self.block = block
        self.fresh = fresh  # next unused virtual id
        self.estimated = 0
        self.streams: list[Stream] = []

    def add(
        self,
        entries: list[_Entry],
        path: str,
        *,
        shift: float = 0.0,
        spawned: float = 0.0,
        place: tuple[int | None, int | None, int | None] = (None, None, None),
        label: str = "",
    ) -> float:
        """Add a stream and those below it. `shift` makes its times absolute, `spawned` is when it could
        start, `place` is (parent, parent's turn before, parent's turn after). Returns its end."""
        parent, after, before = place
        stream = Stream(len(self.streams), [], parent, after, before, label)
        self.streams.append(stream)
        places = [i for i, e in enumerate(entries) if e.type != "subagent"]
        own = [entries[i] for i in places]
        ready = [spawned] + [shift + e.end for e in own]  # when turn k could start
        joins: list[list[int]] = [[] for _ in own]
        marks_end = self._marks_end(entries, own)
        at = 0
        for index, entry in enumerate(entries):
            if entry.type != "subagent":
                at += 1
            elif entry.requests:
                previous = shift + own[at - 1].end if at else shift
                child = len(self.streams)
                end = self.add(
                    entry.requests,
                    f"{path}[{index}].requests",
                    shift=_start(entry, shift, previous, marks_end),
                    spawned=previous,
                    place=(stream.id, at - 1 if at else None, at if at < len(own) else None),
                    label=entry.subagent_type or entry.agent_id,
                )
                if at < len(own):
                    joins[at].append(child)
                    ready[at] = max(ready[at], end)
        stream.turns = self._turns(own, [f"{path}[{i}]" for i in places])
        for k, turn in enumerate(stream.turns):
            turn.joins = tuple(joins[k])
            turn.gap = max(0.0, shift + own[k].t - ready[k])
            turn.gap_kind = _gap_kind(own, k) if k else "start" if parent is None else "spawn"
            if k and own[k - 1].api_time is None:
                self.estimated += 1
                turn.gap = min(turn.gap, turn.gap if own[k].think_time is None else own[k].think_time or 0.0)
        return max([spawned, *(shift + e.end for e in own)])

    def _marks_end(self, entries: list[_Entry], own: list[_Entry]) -> bool:
        at = 0
        for entry in entries:
            if entry.type != "subagent":
                at += 1
            elif entry.requests and entry.duration_ms and 0 < at < len(own) and _relative(entry):
                outlives = entry.t + entry.requests[-1].end > own[at].t + _SLACK
                if outlives and entry.t - entry.duration_ms / 1000 >= own[at - 1].end - _SLACK:
                    return True
        return False

    def _turns(self, own: list[_Entry], paths: list[str]) -> list[Turn]:
        """Content, last turn first: each continues into the one after it."""
        turns: list[Turn] = []
        later: BlockRuns | None = None
        later_ids: NDArray[np.int64] = np.empty(0, np.int64)
        for k in range(len(own) - 1, -1, -1):
            entry = own[k]
            ids = self._ids(entry, paths[k])
            full = min(len(ids), entry.tokens_in // self.block)
            continues = full > 0 and np.array_equal(later_ids[:full], ids[:full])
            source = later if continues else None
            tokens_in, tokens_out = max(1, entry.tokens_in), max(1, entry.tokens_out)
            tail, _ = self._content(source, full * self.block, tokens_in)
            output, derived = self._content(source, tokens_in, tokens_in + tokens_out)
            later, later_ids = _runs(ids[:full], self.block).join(tail), ids
            turns.append(
                Turn(
                    later,
                    output,
                    ttft=entry.ttft,
                    duration=entry.api_time,
                    stop=entry.stop or "",
                    derived=derived,
                )
            )
        return turns[::-1]

    def _ids(self, entry: _Entry, path: str) -> NDArray[np.int64]:
        if entry.tokens_in < 0 or entry.tokens_out < 0:
            raise TraceError(f"trace {self.name}: `{path}`: `in` and `out` are counts; valid: 0 or more")
        if len(entry.hash_ids) > -(-entry.tokens_in // self.block):
            raise TraceError(
                f"trace {self.name}: `{path}.hash_ids` has {len(entry.hash_ids)} blocks of {self.block} "
                f"tokens, more than `in` = {entry.tokens_in} holds"
            )
        ids = entry.hash_ids
        if ids and not 0 <= min(ids) <= max(ids) < _MOST // self.block:
            raise TraceError(
                f"trace {self.name}: `{path}.hash_ids` has ids from {min(ids)} to {max(ids)}; valid with "
                f"blocks of {self.block} tokens: 0 to {_MOST // self.block - 1}"
            )
        return np.asarray(ids, np.int64)

    def _content(self, source: BlockRuns | None, start: int, stop: int) -> tuple[BlockRuns, int]:
        """Positions start..stop as `source` holds them, fresh ids beyond; and how many it held."""
        known = source.slice(start, stop) if source is not None else BlockRuns()
        missing = stop - start - len(known)
        first, self.fresh = self.fresh, self.fresh + missing
        return known.join(BlockRuns.of([(first, missing)])), len(known)


def _relative(entry: _Entry) -> bool:
    return entry.requests[0].t < entry.t


def _start(entry: _Entry, shift: float, previous: float, marks_end: bool) -> float:
    """What makes the sub-agent's own times absolute."""
    if not _relative(entry):
        return shift
    ran = (entry.duration_ms or 0.0) / 1000
    if marks_end and shift + entry.t - ran >= previous - _SLACK:
        return shift + entry.t - ran
    return shift + entry.t


def _gap_kind(own: list[_Entry], k: int) -> Literal["tool", "think"]:
    types = own[k].input_types
    if "tool_result" in types or (not types and own[k - 1].stop == "tool_use"):
        return "tool"
    return "think"


def _runs(ids: NDArray[np.int64], block: int) -> BlockRuns:
    if not len(ids):
        return BlockRuns()
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(ids)])))
    flat = np.empty(2 * len(starts), np.int64)
    flat[::2] = ids[starts] * block
    flat[1::2] = lengths * block
    return BlockRuns(flat.tobytes(), len(ids) * block)


def _weka(config: NoParameters, ctx: Context) -> WekaReader:
    return WekaReader()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("trace_format", "weka", _weka, summary="Claude Code sessions of kv-cache-tester")]
