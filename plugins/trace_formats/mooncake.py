"""Mooncake traces (FAST'25): one request a line, prompts as global ids of blocks of 512 tokens.

    {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}

`timestamp` is in milliseconds; the last block of a prompt may be partial. A request is a session of its own
that starts at its timestamp: who follows whom is not recorded. Outputs have no ids and get fresh ones.
"""

from __future__ import annotations

import array
import io
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import zstandard

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.traces.api import (
    BlockRuns,
    Fidelity,
    Session,
    Stream,
    TraceError,
    TraceMeta,
    Turn,
    head,
    open_stream,
)

BLOCK = 512
_FRESH = 1 << 50  # first id of outputs, above all that blocks name
_HEAD = 65536
_MOST = (1 << 46) // BLOCK  # ids: beyond it scaling could not tell tokens apart
_FIELDS = {"arrival": "exact", "input": "exact", "output": "lost", "gap": "lost", "text": "lost"}
_DAMAGE = (lzma.LZMAError, zlib.error, zstandard.ZstdError, EOFError, OSError)

# Fields that only other dialects have.
_DIALECTS = {
    "AIPerf's": ("session_id", "delay", "text_input", "messages", "payload", "tools", "extra"),
    "Dynamo's agentic": ("request_id", "wait_for", "branches", "prefix_reset", "tool_wait_ms"),
    "Bailian's": ("chat_id", "parent_chat_id", "turn"),
}


class _Request(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=_MOST)]]


class MooncakeReader:
    """Reads a file, compressed or not."""

    name = "mooncake"

    def __init__(self) -> None:
        self.meta = TraceMeta("mooncake", BLOCK, fidelity=Fidelity(dict(_FIELDS)))

    def matches(self, path: Path) -> bool:
        if not path.is_file():
            return False
        line = head(path, _HEAD).lstrip().partition(b"\n")[0]
        return line.startswith(b"{") and b'"input_length"' in line

    def sessions(self, path: Path) -> Iterator[Session]:
        self.meta.source = path.name
        decoder = msgspec.json.Decoder(_Request)
        scope, fidelity = f"mooncake:{path.name}", self.meta.fidelity
        fresh, before = _FRESH, 0.0
        for number, line in _lines(path):
            try:
                request = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"trace {path}, line {number}: {_dialect(line) or error}") from None
            blocks = -(-request.input_length // BLOCK)
            if len(request.hash_ids) != blocks:
                raise TraceError(
                    f"trace {path}, line {number}: {len(request.hash_ids)} hash_ids for input_length = "
                    f"{request.input_length}; valid: {blocks}, one per {BLOCK} tokens"
                )
            if request.timestamp < before:
                raise TraceError(
                    f"trace {path}, line {number}: timestamp {request.timestamp:g} is before the last "
                    f"line's, {before:g}; valid: in order"
                )
            before = request.timestamp
            output = BlockRuns.of([(fresh, request.output_length)])
            fresh += request.output_length
            fidelity.output_tokens += request.output_length
            turn = Turn(_content(request), output, gap_kind="start")
            yield Session(f"{number}", [Stream(0, [turn])], scope=scope, start=request.timestamp / 1000)

    def close(self) -> None:
        pass


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    with open_stream(path) as stream:
        try:
            for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):  # type: ignore[type-var]
                if line.strip():
                    yield number, line
        except _DAMAGE as error:
            raise TraceError(f"trace {path} is damaged after line {number}: {error}") from None


def _content(request: _Request) -> BlockRuns:
    """The blocks as runs; what follows on is merged, as everywhere."""
    flat = array.array("q")
    end = -1
    for id in request.hash_ids:
        if id == end:
            flat[-1] += BLOCK
        else:
            flat.append(id * BLOCK)
            flat.append(BLOCK)
        end = id + 1
    flat[-1] -= len(request.hash_ids) * BLOCK - request.input_length
    return BlockRuns(flat.tobytes(), request.input_length)


def _dialect(line: bytes) -> str:
    """What to say of a line that another dialect has."""
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return ""
    for name, fields in _DIALECTS.items():
        own = [field for field in fields if isinstance(row, dict) and field in row]
        if own:
            return (
                f"{own[0]!r} is a field of {name} dialect, which is not read; valid: timestamp, "
                "input_length, output_length and hash_ids"
            )
    return ""


def _mooncake(config: NoParameters, ctx: Context) -> MooncakeReader:
    return MooncakeReader()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider("trace_format", "mooncake", _mooncake, summary="Mooncake (FAST'25): arrivals and block ids")
    ]
