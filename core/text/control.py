"""`ControlTokens`: finds a model's control tokens in text, and keeps a client's text free of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_BLANKS = re.compile(r"\s*")


class ControlToken(NamedTuple):
    text: str
    id: int
    lstrip: bool = False  # swallows the blanks before it
    rstrip: bool = False  # and behind it


class Starts:
    """Where in texts a token may begin: its first two characters, or the only one."""

    def __init__(self, heads: Iterable[str]) -> None:
        seconds: defaultdict[str, set[str]] = defaultdict(set)
        for head in heads:
            seconds[head[0]].add(head[1:])
        # One for each first character: the library looks for a single character at memory's speed.
        self._patterns = [re.compile(_ahead(first, rest)) for first, rest in seconds.items()]

    def any(self, text: str) -> bool:
        for pattern in self._patterns:  # noqa: SIM110 (thousands of short texts: a generator costs as much)
            if pattern.search(text):
                return True
        return False

    def find(self, text: str) -> list[int]:
        found = [match.start() for pattern in self._patterns for match in pattern.finditer(text)]
        if len(self._patterns) > 1:
            found.sort()
        return found


def _ahead(first: str, rest: set[str]) -> str:
    if "" in rest:  # a token of one character
        return re.escape(first)
    return f"{re.escape(first)}(?=[{re.escape(''.join(sorted(rest)))}])"


class ControlTokens:
    """Time is linear in the text, whatever it holds: candidates are found by their first two characters.

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
        self._starts = Starts(heads)
        firsts = re.escape("".join(sorted({head[0] for head in heads})))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._prefixes = {t[:n] for t in self._tokens for n in range(1, len(t))}
        self._longest = max(map(len, self._tokens), default=0)

    def guard(self, text: str, mark: str, *, ends: bool = True) -> str:
        """Put `mark` into every control token in `text`; with `ends` also behind a start of one at its end,
        which text that follows could complete."""
        if self._starts.any(text):
            text = mark.join(self.cut(text))
        return text + mark if ends and self._begins(text) else text

    def _begins(self, text: str) -> bool:
        """Whether a control token may begin at the end of `text`."""
        begin = max(0, len(text) + 1 - self._longest)
        if self._first is None or not self._first.search(text, begin):  # nearly always
            return False
        return any(text[at:] in self._prefixes for at in range(begin, len(text)))

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
        for at in self._starts.find(text):
            for head in (text[at : at + 2], text[at]):
                found = next((t for t in self._heads.get(head, ()) if text.startswith(t, at)), None)
                if found:
                    yield at, found
                    break
