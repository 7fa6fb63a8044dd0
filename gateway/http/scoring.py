"""`Scoring`: the packed log-probabilities of one answer, read as tokens with their text."""

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
        chosen = memoryview(logprobs.chosen).cast("f")
        others, values = memoryview(logprobs.ids).cast("I"), memoryview(logprobs.values).cast("f")
        top, out = logprobs.top, []
        for n, token in enumerate(ids):
            score = self._score(token, chosen[n])
            score.offset = self._offset
            score.top = [self._score(others[i], values[i]) for i in range(n * top, (n + 1) * top)]
            if token not in self._tokenizer.control.ids:  # these have no text in the answer
                self._offset += len(self._decoder.decode(score.data))
            out.append(score)
        return out

    def _score(self, token: int, logprob: float) -> Score:
        return Score(*self._tokenizer.piece(token), logprob)
