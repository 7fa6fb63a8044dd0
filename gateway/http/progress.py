"""`Progress`: what one generation has given its client so far."""

from __future__ import annotations

from dataclasses import dataclass

from bien.core.errors import BienError
from bien.core.text.output import OutputText
from bien.core.worker.messages import Output
from bien.gateway.http.scoring import Scoring
from bien.gateway.protocols.ask import Speculation, Usage
from bien.gateway.protocols.scores import Score


@dataclass(slots=True)
class Piece:
    text: str
    ids: bytes  # uint32-LE, those that count
    scores: list[Score] | None = None  # of these, where asked for


class Progress:
    def __init__(self, prompt_tokens: int, text: OutputText, scoring: Scoring | None = None) -> None:
        """`scoring`: reads log-probabilities, where asked for."""
        self._scoring = scoring
        self._prompt_tokens = prompt_tokens
        self._text = text
        self._cached = 0
        self.finish: str | None = None  # "stop" or "length", once nothing more is needed
        self.speculation: Speculation | None = None  # once the engine's last output came

    def take(self, output: Output) -> Piece:
        """Text and ids that an output adds. With a stop string found, `finish` is set although the engine
        goes on: leave the stream."""
        if output.cached >= 0:
            self._cached = output.cached
        if output.finish is not None:
            self.speculation = Speculation(output.drafted, output.accepted, output.rounds)
        ids = memoryview(output.tokens).cast("I")
        # An engine stops at stop tokens only, so the last one is one: it counts, but it is no text.
        text, used = self._text.push(ids, silent_last=output.finish == "stop")
        if self._text.stopped:
            self.finish = "stop"
        elif output.finish is not None:
            if output.finish not in ("stop", "length"):
                raise BienError(f"the server ended this generation ({output.finish})")
            text += self._text.flush()
            self.finish = "stop" if self._text.stopped else output.finish
        scores = None
        if self._scoring is not None and output.logprobs is not None:
            scores = self._scoring.take(ids[:used], output.logprobs)
        return Piece(text, output.tokens[: 4 * used], scores)

    @property
    def reason(self) -> str:
        """Why it ended. BienError if it has not, although no more outputs come."""
        if self.finish is None:
            raise BienError("the outputs ended before the generation did")
        return self.finish

    @property
    def usage(self) -> Usage:
        return Usage.of(self._prompt_tokens, self._text.tokens, self._cached)
