"""`Prediction`: drafts out of the output that a client expects (OpenAI's "predicted outputs").

Most of a predicted file comes back as it was, with edits between. As long as the output lines up with the
prediction, what follows there is drafted. Where they part, they may meet again: behind one exchanged token,
or wherever the last tokens of the output occur in the prediction, if possible not far behind the place where
they parted.
"""

from __future__ import annotations

from bisect import bisect_right

PREDICTION = "prediction"  # the source of such drafts
MOST = 16  # drafts of a step, of all sequences together: what their logits take is counted before the start
FIRST = 8  # of these before anything has lined up; then as many more as have
GUESSED = 4  # behind an exchanged token
SURE, NEAR = 4, 2  # tokens in a row that must occur: anywhere; within REACH behind the place of parting
REACH = 128


class Prediction:
    """One request's."""

    def __init__(self, tokens: list[int]) -> None:
        self._text = tokens
        self._at = 0  # the place whose token is expected next
        self._lined = 0  # tokens that lined up before it
        self._lost = 0  # tokens since they have parted, at `_at`
        self._tail: list[int] = []  # the output's last tokens
        self._places: dict[tuple[int, ...], list[int]] | None = None

    def extend(self, tokens: list[int]) -> None:
        """The output went on so."""
        for token in tokens:
            self._tail.append(token)
            if self._lost:
                self._lost += 1
                self._meet()
            elif self._at < len(self._text) and self._text[self._at] == token:
                self._at += 1
                self._lined += 1
            else:
                self._lost = 1
        del self._tail[:-SURE]

    def propose(self, limit: int) -> list[int]:
        """What is expected next; nothing where the output does not line up."""
        if self._lost > 1:
            return []
        start, most = (self._at + 1, GUESSED) if self._lost else (self._at, FIRST + self._lined)
        return self._text[start : start + max(0, min(limit, most, MOST))]

    def _meet(self) -> None:
        if self._lost == 2 and self._text[self._at + 1 : self._at + 2] == self._tail[-1:]:
            self._found(self._at + 2, 1)  # one token was exchanged
            return
        if self._places is None:
            self._places = _places(self._text)
        ahead = self._nearest(SURE, self._at, len(self._text))
        for length, found in (
            (SURE, ahead),
            (NEAR, self._nearest(NEAR, self._at, self._at + REACH)),
            (SURE, self._nearest(SURE, 0, self._at)),
        ):
            if found >= 0:
                return self._found(found, length)

    def _nearest(self, length: int, start: int, stop: int) -> int:
        """The first place in start..stop behind the output's last `length` tokens; -1: none."""
        if len(self._tail) < length:
            return -1
        assert self._places is not None
        places = self._places.get(tuple(self._tail[-length:]), [])
        first = bisect_right(places, start)
        return places[first] if first < len(places) and places[first] <= stop else -1

    def _found(self, place: int, lined: int) -> None:
        self._at, self._lined, self._lost = place, lined, 0


def _places(text: list[int]) -> dict[tuple[int, ...], list[int]]:
    # By the tokens before it: every place, in order.
    out: dict[tuple[int, ...], list[int]] = {}
    for length in (NEAR, SURE):
        for end in range(length, len(text) + 1):
            out.setdefault(tuple(text[end - length : end]), []).append(end)
    return out
