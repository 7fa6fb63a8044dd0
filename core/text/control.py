"""`ControlTokens`: finds a model's control tokens in text, and keeps a client's text free of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_BLANKS = re.compile(r"\s*")


class ControlToken(NamedTuple):
    text: str
    id: int
    lstrip: bool = False  # swallows the blanks before it
    rstrip: bool = False  # and behind it


class ControlTokens:
    """Time is linear in the text, whatever it holds: candidates are found by their first character.

    A *guarded* text has a mark inside each control token, so that it no longer is one; the caller chooses
    a mark that the text does not hold.
    """

    def __init__(self, tokens: list[ControlToken]) -> None:
        self.tokens = tuple(tokens)
        self.ids: frozenset[int] = frozenset(t.id for t in tokens)
        self._tokens = {t.text: t for t in tokens}
        heads: defaultdict[str, list[str]] = defaultdict(list)
        for text in sorted(self._tokens, key=len, reverse=True):  # longest first
            heads[text[:2]].append(text)
        self._heads = dict(heads)
        first = re.escape("".join(sorted({t[0] for t in self._tokens})))
        self._first = re.compile(f"[{first}]") if first else None
        self._prefixes = {t[:n] for t in self._tokens for n in range(1, len(t))}
        self._longest = max(map(len, self._tokens), default=0)

    def guard(self, text: str, mark: str, *, ends: bool = True) -> str:
        """Put `mark` into every control token in `text`; with `ends` also behind a start of one at its end,
        which text that follows could complete."""
        text = mark.join(self.cut(text))
        if ends and any(text[-n:] in self._prefixes for n in range(1, min(self._longest, len(text) + 1))):
            text += mark
        return text

    def cut(self, text: str) -> list[str]:
        """Parts of `text` of which none holds a control token of two characters or more."""
        cuts = [i + 1 for i, _ in self._find(text)]
        return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def split(self, text: str, mark: str) -> Iterator[tuple[str, int | None]]:
        """Pieces (text before, id of the control token behind it) of a guarded text, marks removed; the
        last piece has no token."""
        done = 0
        for at, found in self._find(text):
            token = self._tokens[found]
            end = at + len(found)
            if at < done or (len(found) == 1 and text.startswith(mark, end)):
                continue
            before = text[done:at]
            done = end
            if token.rstrip:
                done = _BLANKS.match(text, end).end()  # type: ignore[union-attr]  # matches "" too
            yield (before.rstrip() if token.lstrip else before).replace(mark, ""), token.id
        yield text[done:].replace(mark, ""), None

    def _find(self, text: str) -> Iterator[tuple[int, str]]:
        """Each position where a control token starts, with the longest one there; they may overlap."""
        if self._first is None:
            return
        for match in self._first.finditer(text):
            at = match.start()
            for head in (text[at : at + 2], text[at]):
                found = next((t for t in self._heads.get(head, ()) if text.startswith(t, at)), None)
                if found:
                    yield at, found
                    break
