"""`StopMatcher`: finds stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back only a suffix that is a proper prefix of some stop string.

    The match that *ends* first wins, of those the longest: the one rule that gives the same text
    however the stream is cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    def push(self, text: str) -> str:
        """The text that may be shown now. Once `matched` is set, nothing more comes."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if ends:
            _, at, self.matched = min(ends)
            self._held = ""
            return text[:at]
        keep = self._hold(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The stream has ended: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _hold(self, text: str) -> int:
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-n:]
            if any(s.startswith(tail) for s in self._stops if len(s) > n):
                return n
        return 0
