"""`Boundaries`: where a rendered text may be cut so that its parts, encoded alone, give the ids of the whole.

A text is cut before a special token. The library looks for added tokens first, leftmost and longest, and
encodes what lies between them each for itself; so a cut changes nothing if the same tokens are found on both
sides of it. That is a property of the tokens alone, settled once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from bien.core.text.control import ControlToken

LEAST = 1024  # characters of a part: shorter turns are one part with their neighbours


class Boundaries:
    """`tokens`: those that are guarded, and looked for in text before anything is normalized; `added`: all
    that are looked for. Without a safe token a text has one part."""

    def __init__(
        self,
        tokens: Iterable[ControlToken],
        added: Iterable[ControlToken],
        single_words: Iterable[str] = (),
        least: int = LEAST,
    ) -> None:
        looked = _Looked(added)
        self.tokens: tuple[str, ...] = ()
        if not set(single_words):  # one at the end of a part would ask what follows
            self.tokens = tuple(sorted(t.text for t in tokens if looked.safe(t.text)))
        self._least = least
        heads: defaultdict[str, list[str]] = defaultdict(list)
        for text in self.tokens:
            heads[text[:2]].append(re.escape(text))
        self._heads = {head: re.compile("|".join(texts)) for head, texts in heads.items()}

    def parts(self, text: str) -> list[str]:
        """Texts that give `text` again, each but the first beginning with a safe token. They depend on what
        comes before their ends only: a text that goes on has the same parts, up to its last one."""
        found: list[int] = []
        for head, pattern in self._heads.items():
            at = text.find(head)
            while at >= 0:
                if pattern.match(text, at):
                    found.append(at)
                at = text.find(head, at + 1)
        if len(self._heads) > 1:
            found.sort()
        out, begin = [], 0
        for at in found:
            if at - begin >= self._least:
                out.append(text[begin:at])
                begin = at
        out.append(text[begin:])
        return out


class _Looked:
    """Whether a match begins wherever a token stands, takes nothing of what is before it, and no match before
    it depends on it."""

    def __init__(self, added: Iterable[ControlToken]) -> None:
        tokens = list(added)
        # What a token that began earlier could reach across the cut with, or hold.
        self._ends = {t.text[at:] for t in tokens for at in range(1, len(t.text))}
        self._rests = "\0".join(t.text[1:] for t in tokens)
        self._swallow = [t.text for t in tokens if t.lstrip]

    def safe(self, text: str) -> bool:
        first = text[0]
        if len(text) < 2 or first.isalnum() or first.isspace() or not first.isprintable():
            return False
        if text in self._rests or any(name.startswith(text) for name in self._swallow):
            return False
        return self._ends.isdisjoint(text[:n] for n in range(1, len(text) + 1))
