"""`Boundaries`: where a rendered text may be cut so that its parts, encoded alone, give the ids of the whole.

A text is cut before a special token. The library looks for added tokens first, leftmost and longest, and
encodes what lies between them each for itself; so a cut changes nothing if the same tokens are found on both
sides of it. That is a property of the tokens alone, settled once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bien.core.text.control import ControlToken, Starts

LEAST = 1024  # characters of a part: shorter turns are one part with their neighbours


class Boundaries:
    """`tokens`: those that are guarded, and looked for in text before anything is normalized; `added`: all
    that are looked for; `literals`: what the template of these texts writes, None: anything. Without a safe
    token a text has one part."""

    def __init__(
        self,
        tokens: Iterable[ControlToken],
        added: Iterable[ControlToken],
        single_words: Iterable[str] = (),
        literals: str | None = None,
        least: int = LEAST,
    ) -> None:
        looked = _Looked(added)
        self.tokens: tuple[str, ...] = ()
        if not set(single_words):  # one at the end of a part would ask what follows
            self.tokens = tuple(sorted(t.text for t in tokens if looked.safe(t.text)))
        self._least = least
        # A template may put a token together ("<|" ~ role ~ "|>"), hardly its first two characters.
        looked_for = [text for text in self.tokens if literals is None or text[:2] in literals]
        self._starts = Starts({text[:2] for text in looked_for})
        self._token = re.compile("|".join(map(re.escape, looked_for)))

    def parts(self, text: str) -> list[str]:
        """Texts that give `text` again, each but the first beginning with a safe token. They depend on what
        comes before their ends only: a text that goes on has the same parts, up to its last one."""
        out, begin = [], 0
        for at in self._starts.find(text):
            if at - begin >= self._least and self._token.match(text, at):
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
