"""Server-sent events of an answer: a constant head, encoded once, and what changes from chunk to chunk."""

from __future__ import annotations

import array
from collections.abc import Callable

import msgspec

from bien.core.speculation.counts import DraftCounts
from bien.gateway.protocols.acceptance import Speculation, metrics_field
from bien.gateway.protocols.ask import Ask, Usage
from bien.gateway.protocols.scores import Score

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode


class Events:
    """Chunks of one stream. `before` and `after` enclose the JSON string of a text in a choice."""

    def __init__(
        self,
        ask: Ask,
        head: dict[str, object],
        before: bytes,
        after: bytes,
        closing: bytes,
        written: Callable[[list[Score]], bytes],
    ) -> None:
        """`written`: log-probabilities as the dialect's JSON."""
        self._written = written
        start = b"data: " + encode(head)[:-1] + b',"choices":['
        self._continuous = ask.continuous_usage
        self._include = ask.include_usage
        self._metrics = ask.speculation_metrics
        # With usage asked for, chunks before the last one say null, as the API does.
        self._end = b',"usage":null}\n\n' if ask.include_usage else b"}\n\n"
        self._start = start
        self._choice = [start + b'{"index":%d,' % i for i in range(ask.n)]
        self._before = [choice + before for choice in self._choice]
        self._after = after
        self._closing = closing + b',"logprobs":null,"finish_reason":'

    def piece(
        self,
        index: int,
        text: str,
        token_ids: bytes | None,
        usage: Usage | None,
        scores: list[Score] | None,
    ) -> bytes:
        rest = self._rest(token_ids, usage, scores)
        return b"".join((self._before[index], encode(text), self._after, *rest))

    def chunk(
        self,
        index: int,
        delta: bytes,
        token_ids: bytes | None,
        usage: Usage | None,
        scores: list[Score] | None,
    ) -> bytes:
        """As `piece`, with a field of the choice that is JSON already."""
        return b"".join((self._choice[index], delta, *self._rest(token_ids, usage, scores)))

    def _rest(
        self, token_ids: bytes | None, usage: Usage | None, scores: list[Score] | None
    ) -> tuple[bytes, ...]:
        logprobs = b"null" if scores is None else self._written(scores)
        ids = ids_field(token_ids)
        return b',"logprobs":', logprobs, b',"finish_reason":null', ids, b"}]", self._tail(usage)

    def raw(self, choice: bytes) -> bytes:
        """A chunk with a choice that is JSON already."""
        return self._start + choice + b"]" + self._end

    def closing(self, index: int, finish: str, usage: Usage, speculation: Speculation | None) -> bytes:
        end = extension(speculation) + self._tail(usage)
        return b"".join((self._start, b'{"index":%d,' % index, self._closing, encode(finish), b"}]", end))

    def end(self, usage: Usage, drafts: DraftCounts | None) -> bytes:
        """Usage and what drafting did where asked for, and the end mark."""
        said = (b',"usage":' + encode(usage) if self._include else b"") + self.metrics(drafts)
        return b"".join((self._start, b"]", said, b"}\n\n", DONE)) if said else DONE

    def metrics(self, drafts: DraftCounts | None) -> bytes:
        """The field for it, where asked for."""
        return metrics_field(drafts) if self._metrics else b""

    def _tail(self, usage: Usage | None) -> bytes:
        if self._continuous and usage is not None:
            return b',"usage":' + encode(usage) + b"}\n\n"
        return self._end


def whole(head: dict[str, object], choices: list[bytes], usage: Usage, more: bytes) -> bytes:
    """The body of an answer that is not streamed. `more`: further fields."""
    start = encode(head)[:-1] + b',"choices":['
    return b"".join((start, b",".join(choices), b'],"usage":', encode(usage), more, b"}"))


def extension(speculation: Speculation | None) -> bytes:
    """The field that only bien's answers have."""
    return b"" if speculation is None else b',"bien":' + encode(speculation)


def ids_field(packed: bytes | None) -> bytes:
    """The ids of a choice, where asked for."""
    return b"" if packed is None else b',"token_ids":' + encode_ids(packed)


def encode_ids(packed: bytes) -> bytes:
    """Packed uint32-LE ids as a JSON list."""
    ids = array.array("I")
    ids.frombytes(packed)
    return encode(ids.tolist())
