"""`Scoring`: packed log-probabilities of one answer or prompt, read as tokens with their text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from bien.core.logprobs import TokenLogprobs
from bien.core.text.tokenizer import Tokenizer
from bien.gateway.protocols.scores import Score


class Scoring:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, ids: Sequence[int], logprobs: TokenLogprobs) -> list[Score]:
        """`ids` are the first tokens, or all, of those that `logprobs` is about."""
        out = self._scores(ids, logprobs, logprobs.top)
        for token, score in zip(ids, out, strict=True):
            score.offset = self._offset
            if token not in self._tokenizer.control.ids:  # these have no text in the answer
                self._offset += len(self._decoder.decode(score.data))
        return out

    def shift(self, characters: int) -> None:
        """So many stand before the answer's."""
        self._offset += characters

    def prompt(self, ids: Sequence[int], logprobs: TokenLogprobs, top: int, text: str = "") -> list[Score]:
        """Of a prompt's tokens with `top` alternatives, at most those that `logprobs` has; nothing says how
        likely the first one is. Offsets are those in `text`."""
        out = [self._score(ids[0], None)]
        out += self._scores(ids[1:], logprobs, min(top, logprobs.top))
        at = 0
        for token, score in zip(ids, out, strict=True):
            score.offset = min(at, len(text))
            # A control token that a tokeniser put around the text is not in it.
            if token not in self._tokenizer.control.ids or text.startswith(score.token, at):
                at += len(self._decoder.decode(score.data))
        return out

    def _scores(self, ids: Sequence[int], logprobs: TokenLogprobs, top: int) -> list[Score]:
        chosen = memoryview(logprobs.chosen).cast("f")
        others, values = memoryview(logprobs.ids).cast("I"), memoryview(logprobs.values).cast("f")
        ranks = memoryview(logprobs.ranks).cast("I")
        out = []
        for n, token in enumerate(ids):
            score = self._score(token, chosen[n], ranks[n] if ranks else 0)
            at = n * logprobs.top
            score.top = [self._score(others[at + i], values[at + i], i + 1) for i in range(top)]
            out.append(score)
        return out

    def _score(self, token: int, logprob: float | None, rank: int = 0) -> Score:
        return Score(*self._tokenizer.piece(token), logprob, id=token, rank=rank)
