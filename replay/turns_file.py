"""The turns of a run, one JSON line each, compressed, beside its result.

The first line names the result by its hash, so that nobody draws one run with the figures of another. The
result has all figures; these lines are for timelines and for questions nobody foresaw.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zstandard

from bien.core.errors import UserError
from bien.replay.files import check_schema, kept, write_whole
from bien.replay.record import TurnRecord

SCHEMA = "bien.turns/1"
SUFFIX = ".turns.jsonl.zst"


class Header(msgspec.Struct, kw_only=True):
    schema: str = SCHEMA
    result: str  # blake2b of result.json


class TurnLine(msgspec.Struct, omit_defaults=True):
    """Times are seconds since the run's start, null where they never came. Fields as in TurnRecord."""

    session: str
    stream: int  # 0: the main agent
    turn: int
    parent: int | None = None  # stream that spawned this one
    label: str = ""  # of the stream
    ready: float | None = None  # the turn before and the sub-agents waited for had ended
    planned: float | None = None  # the gap was over
    sent: float | None = None
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    prompt: int = 0
    asked: int = 0
    first_count: int = 0
    got: int = 0
    cached: int | None = None  # null: the server does not say
    worker: str = ""
    error: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds from send to first chunk."""
        return self.first - self.sent if self.first is not None and self.sent is not None else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first chunk."""
        rest = self.got - self.first_count
        if self.first is None or self.last is None or rest <= 0:
            return None
        return (self.last - self.first) / rest


def turns_path(result: Path) -> Path:
    """Where the turns of a result lie: result.turns.jsonl.zst."""
    return result.with_name(result.name.removesuffix(".json") + SUFFIX)


def turn_lines(records: Iterable[TurnRecord], start: float) -> list[TurnLine]:
    """`start` is the run's start on the records' clock."""

    def at(time: float) -> float | None:
        return round(time - start, 6) if time >= 0 else None

    return [
        TurnLine(
            r.session,
            r.stream,
            r.turn,
            r.parent,
            r.label,
            at(r.ready),
            at(r.planned),
            at(r.sent),
            at(r.first),
            at(r.last),
            at(r.ended),
            r.prompt_tokens,
            r.asked,
            r.first_count,
            r.got,
            r.cached if r.cached >= 0 else None,
            r.worker,
            r.error,
        )
        for r in records
    ]


def write_turns(result: Path, lines: Iterable[TurnLine]) -> Path | None:
    """Write them beside a result that is written already; not beside a device or pipe (None).

    Raises:
        ResourceError: the folder cannot be written to.
    """
    if not kept(result):
        return None
    path = turns_path(result)
    data = msgspec.json.Encoder().encode_lines([Header(result=_hash(result)), *lines])
    write_whole(path, zstandard.ZstdCompressor().compress(data), "turns")
    return path


def read_turns(path: Path, result: Path) -> list[TurnLine]:
    """The turns of the run that `result` came from.

    Raises:
        UserError: it is no such file, or of another run.
    """
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            reader = io.BufferedReader(stream)
            first = reader.readline()
            check_schema(first, SCHEMA, path)
            header = msgspec.json.decode(first, type=Header)
            lines = msgspec.json.Decoder(TurnLine)
            turns = [lines.decode(line) for line in reader]
    except (OSError, zstandard.ZstdError, msgspec.DecodeError) as error:
        raise UserError(f"{path} holds no turns: {error}; valid: a {SUFFIX} file that bien wrote") from None
    if header.result != _hash(result):
        raise UserError(
            f"{path} is of another run than {result}; valid: the {SUFFIX} file written with that result"
        )
    return turns


def _hash(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(f"{path} is no result: {error.strerror or error}") from None
