"""`Progress`: what one generation has given its client so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from bien.core.errors import BienError, UserError
from bien.core.speculation.counts import DraftCounts, SourceCounts
from bien.core.speculation.prediction import PREDICTION
from bien.core.text.output import OutputText
from bien.core.worker.messages import Output
from bien.gateway.http.scoring import Scoring
from bien.gateway.parsing.events import Event, merged
from bien.gateway.parsing.reply import Reply
from bien.gateway.protocols.scores import Score


@dataclass(slots=True)
class Piece:
    text: str
    ids: bytes  # uint32-LE, those that count
    scores: list[Score] | None = None  # where asked for, of those that begin in the text
    events: list[Event] = field(default_factory=list)  # where the text is parsed: instead of it


class Progress:
    def __init__(
        self,
        text: OutputText,
        scoring: Scoring | None = None,
        *,
        silent: bool = False,
        wants_ids: bool = False,
        reply: Reply | None = None,
        keeps_ids: bool = False,
    ) -> None:
        """`scoring`: reads log-probabilities, where asked for. `silent`: no token is asked for, so that the
        first output ends it. `wants_ids`: its client asks for token ids. `reply`: parses the text, which then
        comes as events. `keeps_ids`: for `answer`."""
        self._kept: list[bytes] | None = [] if keeps_ids else None
        self._reply = reply
        self._wants_ids = wants_ids
        self._scoring = scoring
        self._scores: list[Score] = []  # held back like the text, which a stop string may cut
        self._given = 0  # those that were not
        self._text = text
        self._silent = silent
        self._events: list[Event] = []  # not given yet
        self.cached = -1  # tokens of the prompt; -1: not known
        self.finish: str | None = None  # "stop", "length", "tool_calls": nothing more is needed
        self.drafts: DraftCounts | None = None  # what became of them, once the engine's last output came
        self.predicted = SourceCounts()  # of these those of the client's prediction, so far

    def take(self, output: Output) -> Piece:
        """Text and ids that an output adds. With a stop string found, `finish` is set although the engine
        goes on: leave the stream."""
        if output.cached >= 0:
            self.cached = output.cached
        if output.text and self._wants_ids:
            raise UserError(
                "return_token_ids is true; valid: false, because this model is served by an engine that does "
                "not say which tokens it makes",
                field="return_token_ids",
            )
        if output.drafts is not None:
            self.predicted = output.drafts.sources.get(PREDICTION, self.predicted)
        if self._silent and output.count:
            self.finish = "length"
            return Piece("", b"")
        if output.finish is not None:
            self.drafts = output.drafts or DraftCounts()
        ids = memoryview(output.tokens).cast("I")
        # An engine stops at stop tokens only, so the last one is one: it counts, but it is no text.
        silent = output.finish == "stop"
        if self._reply is not None:
            text, used = "", self._parse(self._reply, ids, output, silent)
        else:
            text, used = self._text.push(ids, silent_last=silent)
            if not ids:  # of an engine that gives text only
                text += self._text.pass_on(output.text, output.count)
            text += self._end(output)
        scores = None
        if self._scoring is not None and output.logprobs is not None:
            self._scores += self._scoring.take(ids[:used], output.logprobs)
            more = self._text.visible - self._given
            scores, self._scores = self._scores[:more], self._scores[more:]
            self._given += len(scores)
        if self._kept is not None:
            self._kept.append(output.tokens[: 4 * (min(used, len(ids) - 1) if silent else used)])
        events, self._events = merged(self._events), []
        return Piece(text, output.tokens[: 4 * used], scores, events)

    def _parse(self, reply: Reply, ids: memoryview, output: Output, silent_last: bool) -> int:
        """How many of `ids` were used. Token by token: which of them are reasoning is counted."""
        used, last = len(ids), len(ids) - 1 if silent_last else -1
        for i, token in enumerate(ids):
            self._events += reply.take(self._text.take(token, silent=i == last))
            if self._text.stopped or reply.full:
                used = i + 1
                break
        if not ids and output.text:
            text = self._text.pass_on(output.text, output.count)
            self._events += reply.take([text] if text else [], output.count, ids=False)
        if reply.full:
            self.finish = "tool_calls"
            return used
        if text := self._end(output):
            self._events += reply.take([text], 0, ids=bool(ids))
        if self.finish is not None:
            self._events += reply.finish(self.finish == "stop" and not self._text.stopped)
            if self.finish == "stop" and reply.calling:
                self.finish = "tool_calls"
        return used

    def _end(self, output: Output) -> str:
        """Sets `finish` if this output is the last one that is needed. What was held back."""
        if self._text.stopped:
            self.finish = "stop"
        elif output.finish is not None:
            if output.finish not in ("stop", "length"):
                raise BienError(f"the server ended this generation ({output.finish})")
            text = self._text.flush()
            self.finish = "stop" if self._text.stopped else output.finish
            return text
        return ""

    @property
    def parsed(self) -> bool:
        """Whether it gives events instead of text."""
        return self._reply is not None

    @property
    def reasoning(self) -> int:
        """Tokens of it so far."""
        return self._reply.reasoning_tokens if self._reply is not None else 0

    @property
    def reason(self) -> str:
        """Why it ended. BienError if it has not, although no more outputs come."""
        if self.finish is None:
            raise BienError("the outputs ended before the generation did")
        return self.finish

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._text.matched

    @property
    def answer(self) -> bytes:
        """Ids of its text, uint32-LE. None where a stop string cut one of them, or they were not kept."""
        return b"" if self._kept is None or self._text.stopped else b"".join(self._kept)

    @property
    def tokens(self) -> int:
        """Those that were needed so far."""
        return self._text.tokens

    def shift(self, characters: int) -> None:
        """The answer begins with so many that are not its own."""
        if self._scoring is not None:
            self._scoring.shift(characters)
