"""Counts the tokens of an event stream without reading each event as JSON."""

from __future__ import annotations

import msgspec

from bien.core.speculation.counts import DraftCounts, SourceCounts

_IDS = b'"token_ids":['
_COUNT = b'"completion_tokens":'
_USAGE = b'"usage":{'
_BIEN = b'"bien":{'
_ERROR = b'data: {"error"'
_CHOICES = b'"choices":[]'
_DONE = b"data: [DONE]"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached(self) -> int:
        """-1 when the server does not say."""
        details = self.prompt_tokens_details
        return -1 if details is None or details.cached_tokens is None else details.cached_tokens


class Speculation(msgspec.Struct):
    """What bien's own gateway says; -1 where nobody does."""

    drafted: int = -1
    accepted: int = -1
    rounds: int = -1
    drafted_at: list[int] = []
    accepted_at: list[int] = []
    sources: dict[str, Speculation] = {}

    @property
    def counts(self) -> DraftCounts | None:
        """By source and position; None where nobody says it."""
        if not self.sources:
            return None
        found = {
            source: SourceCounts(one.rounds, one.drafted, one.accepted, one.drafted_at, one.accepted_at)
            for source, one in self.sources.items()
        }
        return DraftCounts(found)


class _Message(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    usage: Usage | None = None
    bien: Speculation | None = None
    error: _Message | str | None = None


class TokenCounter:
    """Feed it what the socket gives. Inside JSON strings every quote is escaped, so the patterns that it
    looks for cannot be part of a text."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.speculation = Speculation()
        self.error = ""
        self.done = False  # the stream was ended by the server, not by the network
        self.estimated = False  # chunks were counted as one token: neither ids nor running usage came
        self._rest = b""
        self._counted = 0
        self._last_usage = b""

    def feed(self, data: bytes) -> int:
        """Tokens in the events that `data` completes."""
        data = self._rest + data
        whole = data.rfind(b"\n\n") + 2
        if whole < 2:
            self._rest = data
            return 0
        self._rest = data[whole:]
        before = self._counted
        for event in data[: whole - 2].split(b"\n\n"):
            self._event(event)
        return self._counted - before

    def finish(self) -> int:
        """Read the last usage, if one came; tokens that it has beyond those counted so far."""
        if not self._last_usage:
            return 0
        self.usage = self._decode(self._last_usage).usage or Usage()
        missing = self.usage.completion_tokens - self._counted
        self._counted += missing
        return missing

    def _event(self, event: bytes) -> None:
        if event.startswith(_ERROR):
            error = self._decode(event).error
            self.error = (error if isinstance(error, str) else error.message if error else "") or "no reason"
            return
        if event.startswith(_DONE):
            self.done = True
            return
        if _BIEN in event:
            self.speculation = self._decode(event).bien or Speculation()
        if _USAGE in event:
            self._last_usage = event
            at = event.rfind(_COUNT)
            if _CHOICES not in event and at >= 0:
                end = at + len(_COUNT)
                digits = event[end : end + 12].split(b",")[0].split(b"}")[0]
                self._counted = max(self._counted, int(digits))
        elif (at := event.find(_IDS)) >= 0:
            at += len(_IDS)
            end = event.index(b"]", at)
            self._counted += event.count(b",", at, end) + (end > at)
        elif b'"choices":[{' in event and b'"text":""' not in event:
            self._counted += 1
            self.estimated = True

    def _decode(self, event: bytes) -> _Chunk:
        try:
            return msgspec.json.decode(event.removeprefix(b"data:").strip(), type=_Chunk)
        except msgspec.DecodeError:
            return _Chunk(error=event.decode(errors="replace")[:200])
