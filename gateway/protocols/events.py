"""Server-sent events of an answer: a constant head, encoded once, and what changes from chunk to chunk."""

from __future__ import annotations

import array
from collections.abc import Callable

import msgspec

from bien.gateway.protocols.ask import Ask, Speculation, Usage
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
        # With usage asked for, chunks before the last one say null, as the API does.
        self._end = b',"usage":null}\n\n' if ask.include_usage else b"}\n\n"
        self._start = start
        self._before = start + b'{"index":0,' + before
        self._after = after + b',"logprobs":'
        self._closing = b'{"index":0,' + closing + b',"logprobs":null,"finish_reason":'

    def piece(
        self, text: str, token_ids: bytes | None, usage: Usage | None, scores: list[Score] | None
    ) -> bytes:
        logprobs = b"null" if scores is None else self._written(scores)
        out = [self._before, encode(text), self._after, logprobs, b',"finish_reason":null']
        if token_ids is not None:
            out += (b',"token_ids":', encode_ids(token_ids))
        out += (b"}]", self._tail(usage))
        return b"".join(out)

    def raw(self, choice: bytes) -> bytes:
        """A chunk with a choice that is JSON already."""
        return self._start + choice + b"]" + self._end

    def closing(self, finish: str, usage: Usage, speculation: Speculation | None) -> bytes:
        end = extension(speculation) + self._tail(usage)
        out = [self._start, self._closing, encode(finish), b"}]", end]
        if self._include:
            out += (self._start, b'],"usage":', encode(usage), b"}\n\n")
        out.append(DONE)
        return b"".join(out)

    def _tail(self, usage: Usage | None) -> bytes:
        if self._continuous and usage is not None:
            return b',"usage":' + encode(usage) + b"}\n\n"
        return self._end


def extension(speculation: Speculation | None) -> bytes:
    """The field that only bien's answers have."""
    return b"" if speculation is None else b',"bien":' + encode(speculation)


def encode_ids(packed: bytes) -> bytes:
    """Packed uint32-LE ids as a JSON list."""
    ids = array.array("I")
    ids.frombytes(packed)
    return encode(ids.tolist())
