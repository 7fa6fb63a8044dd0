"""`Answer`: outputs from the events of one streamed completion."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

from bien.core.errors import BienError
from bien.core.request import TokenIds
from bien.core.worker.messages import Output
from bien.gateway.remote.dialect import Choice, Chunk, Usage

FINISHES = {"stop": "stop", "length": "length", "abort": "abort", "content_filter": "stop"}
DONE = b"[DONE]"


class Cut(Exception):
    """The stream ended before the answer did."""


class Answer:
    """Tokens by their ids where they come with them, else the server's text as it is. What a text counts is
    known at its end only (`usage`): its first piece is one token, its last one the rest."""

    def __init__(self, rid: int) -> None:
        self.tokens = 0  # given so far
        self.begun = False  # whether an output was given
        self.ids = b""  # all of them, where they came
        self.usage: Usage | None = None
        self._rid = rid
        self._pieces = 0  # of text
        self._last: Output | None = None  # held until the usage is known, which comes behind it

    def take(self, chunk: Chunk) -> Output | None:
        """BienError: the server reports one."""
        if chunk.error is not None:
            raise BienError(f"the engine failed: {error_text(chunk.error)}")
        if chunk.usage is not None:
            self.usage = chunk.usage
        if not chunk.choices:
            return None
        choice = chunk.choices[0]
        output = self._output(choice)
        if choice.finish_reason is not None:
            output.finish = FINISHES.get(choice.finish_reason, choice.finish_reason)
            self._last = output
            return None
        return self._given(output) if output.count or output.text else None

    def end(self) -> Output:
        """The last output. Cut: there was none."""
        last = self._last
        if last is None:
            raise Cut
        if self.usage is not None:
            last.cached = self.usage.cached
            last.prompt_tokens = self.usage.prompt_tokens or -1
        if not self.ids and not last.tokens and (self._pieces or last.text):
            said = self.usage.completion_tokens if self.usage is not None else None
            last.count = max(0, (said if said is not None else self._pieces) - self.tokens)
        return self._given(last)

    def _output(self, choice: Choice) -> Output:
        if choice.token_ids is None:
            if choice.text:
                self._pieces += 1
            count = 1 if choice.text and not self.tokens else 0
            return Output(self._rid, count, text=choice.text)
        ids = choice.token_ids
        if choice.finish_reason == "stop":
            stop = choice.stop_reason if choice.stop_reason is not None else choice.matched_stop
            # Some servers keep the stop token to themselves; to us it is the last one.
            if isinstance(stop, int) and (not ids or ids[-1] != stop):
                ids = [*ids, stop]
        return Output(self._rid, len(ids), TokenIds.of(ids).packed)

    def _given(self, output: Output) -> Output:
        self.begun = True
        self.tokens += output.count
        self.ids += output.tokens
        return output


async def events(stream: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data of a stream of server-sent events, one after the other."""
    rest = b""
    async for piece in stream:
        rest += piece
        if b"\n" not in piece:
            continue
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def error_text(error: object) -> str:
    """What a server says in its error: they put it into different places."""
    while isinstance(error, dict):
        inner = error.get("error", error.get("message"))
        if inner is None:
            break
        error = inner
    return str(error)[:2000] or "no reason given"
