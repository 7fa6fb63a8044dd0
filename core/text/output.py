"""`OutputText`: what a client sees of a token stream: detokenised text, cut at stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bien.core.text.detokenize import Detokenizer
from bien.core.text.marks import Mark, Piece
from bien.core.text.stop import StopMatcher


class OutputText:
    """Counts the tokens that were needed: those behind a stop string are neither billed nor returned.

    Stop strings are not looked for in the first `min_tokens` tokens.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stop = StopMatcher(stops)
        self._stops = bool(stops)
        self._min_tokens = min_tokens
        self.tokens = 0  # used so far
        self.visible = 0  # of these, whose text has begun to be shown; all of them, unless a stop string cuts
        self._starts: deque[int] = deque()  # where the text of the others begins, in characters
        self._made = self._shown = 0  # characters

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.matched is not None

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._stop.matched

    def push(self, ids: Sequence[int], *, silent_last: bool = False) -> tuple[str, int]:
        """Text that may be shown now, and how many of `ids` were used (all, unless a stop string came).

        `silent_last`: the last id is a stop token, which counts but has no text.
        """
        shown = len(ids) - 1 if silent_last and len(ids) else len(ids)
        if not self._stops:
            self.tokens += len(ids)
            self.visible = self.tokens
            return self._detokenizer.push(ids[:shown]), len(ids)
        out = []
        for i in range(shown):
            self.tokens += 1
            self._starts.append(self._made)
            text = self._detokenizer.push(ids[i : i + 1])
            self._made += len(text)
            out.append(self._show(self._stop.push(text) if self.tokens > self._min_tokens else text))
            if self.stopped:
                return "".join(out), i + 1
        self._starts.extend([self._made] * (len(ids) - shown))
        self.tokens += len(ids) - shown
        return "".join(out), len(ids)

    def take(self, token: int, *, silent: bool = False) -> list[Piece]:
        """As `push` of one token, with marks: stop strings are not looked for across one. `silent`: a stop
        token, which counts but has no text."""
        self.tokens += 1
        made = () if silent else self._detokenizer.pieces(token)
        if not self._stops:
            self.visible = self.tokens
            return list(made)
        self._starts.append(self._made)
        out: list[Piece] = []
        for piece in made:
            if isinstance(piece, Mark):
                out += [text for text in (self._show(self._stop.flush()),) if text]
                out.append(piece)
                continue
            self._made += len(piece)
            text = self._show(self._stop.push(piece) if self.tokens > self._min_tokens else piece)
            if text:
                out.append(text)
            if self.stopped:
                break
        return out

    def pass_on(self, text: str, tokens: int) -> str:
        """Text that somebody else has detokenised, of so many tokens; what may be shown of it now."""
        self.tokens += tokens
        if self._stops and self.tokens > self._min_tokens:
            text = self._stop.push(text)
        self.visible = self.tokens
        return text

    def flush(self) -> str:
        """The stream has ended: text that was held back. May still complete a stop string."""
        text = self._detokenizer.flush()
        if not self._stops:
            return text
        if self.tokens > self._min_tokens:
            text = self._stop.push(text)
        text = self._show(text + self._stop.flush())
        if not self.stopped:
            self.visible = self.tokens
        return text

    def _show(self, text: str) -> str:
        self._shown += len(text)
        while self._starts and self._starts[0] < self._shown:
            self._starts.popleft()
            self.visible += 1
        return text
