"""`Texts`: the texts of one scope, kept once: what a new one shares with another is not kept again."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from zlib import crc32

from bien.plugins.speculators.suffix.chances import Chances
from bien.plugins.speculators.suffix.corpus import CONTEXT, Corpus, Tokens

KEPT = 1024  # texts that are remembered
OTHERS = 64  # of other sessions, that a new one is compared with
PIECES = 64  # of a text; more of them become one, of which only the sum is known
GONE = -1  # the position of such a piece


class Text:
    """Where the tokens of one text lie in its corpus: pieces (position, tokens, checksum), in order. What
    the corpus has forgotten is told by its checksum: a text that goes on is not kept twice because others
    came between."""

    __slots__ = ("length", "number", "pieces", "session", "users")

    def __init__(self, session: str, number: int) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        self.length = 0
        self.session, self.number = session, number
        self.users = 0  # sequences that go on with it: one at most

    @property
    def end(self) -> int:
        """The position behind its last token; -1: it has none that is known."""
        if not self.pieces or self.pieces[-1][0] == GONE:
            return -1
        return self.pieces[-1][0] + self.pieces[-1][1]

    def common(self, corpus: Corpus, tokens: Tokens) -> int:
        """How many leading tokens it shares with `tokens`; less, by a piece, where those are forgotten."""
        same, given = 0, len(tokens) // 4
        for position, length, checksum in self.pieces:
            found = -1
            if position != GONE:
                found = corpus.equal(position, tokens, same, min(length, given - same))
            if found < 0:
                whole = given - same >= length and crc32(_part(tokens, same, length)) == checksum
                found = length if whole else 0
            same += found
            if found < length:
                break
        return same

    def cut(self, tokens: Tokens, length: int, session: str, number: int) -> Text:
        """Its first `length` tokens, which begin `tokens`, as the beginning of another text."""
        other = Text(session, number)
        for position, here, _ in self.pieces:
            part = min(here, length - other.length)
            if part <= 0:
                break
            other.pieces.append((position, part, crc32(_part(tokens, other.length, part))))
            other.length += part
        return other

    def add(self, position: int, tokens: Tokens) -> None:
        if self.pieces and self.end == position:
            first, before, checksum = self.pieces[-1]
            self.pieces[-1] = (first, before + len(tokens) // 4, crc32(tokens, checksum))
        else:
            self.pieces.append((position, len(tokens) // 4, crc32(tokens)))
        self.length += len(tokens) // 4

    def shorten(self, tokens: Tokens) -> None:
        """Fewer pieces; it is the beginning of `tokens`."""
        if len(self.pieces) > PIECES:
            half = len(self.pieces) // 2
            length = sum(piece[1] for piece in self.pieces[:half])
            self.pieces[:half] = [(GONE, length, crc32(_part(tokens, 0, length)))]


class Texts:
    """Written by the drafter: prompts when sequences begin, answers when they end."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.chances = Chances()  # learned from these texts only: others' speed tells nothing of them
        self.live = 0  # sequences that use it
        self.bytes = 0  # of the corpus, when the drafter looked last
        self._texts: OrderedDict[int, Text] = OrderedDict()  # the one used last comes last
        self._sessions: dict[str, set[int]] = {}
        self._numbers = count()

    def begin(self, tokens: Tokens, session: str) -> Text:
        """The text of a sequence whose prompt is `tokens`. Only what no other text has is appended."""
        best, common = None, 0
        for text in self._alike(session):
            same = text.common(self.corpus, tokens)
            if same > common:
                best, common = text, same
            if common == len(tokens) // 4 or (text.session == session and same > len(tokens) // 8):
                break  # half of it or more is this session's: nobody else is likely to have more
        if best is not None and common == best.length and not best.users:  # it goes on
            self._forget(best)
            best.session = session
            text = best
        elif best is not None:
            text = best.cut(tokens, common, session, next(self._numbers))
        else:
            text = Text(session, next(self._numbers))
        text.users = 1
        text.shorten(tokens)
        self._texts[text.number] = text
        self._sessions.setdefault(session, set()).add(text.number)
        if len(self._texts) > KEPT:
            self._forget(next(iter(self._texts.values())))
        self.extend(text, tokens, tokens[4 * common :])
        return text

    def extend(self, text: Text, known: Tokens, added: Tokens) -> None:
        """`added` follows; `known` are some tokens of the text, or more, `added` at their end."""
        if not added:
            return
        corpus, size = self.corpus, len(added) // 4
        if text.end == corpus.end:
            text.add(corpus.append(added, fresh=False), added)
            return
        # What was appended last belongs to another text: repeat the end of this one, so that n-grams over the
        # seam are found.
        repeated = min(CONTEXT, len(known) // 4 - size)
        first = corpus.append(known[-4 * (size + repeated) :], fresh=True, repeated=repeated)
        text.add(first + repeated, added)

    def _alike(self, session: str) -> list[Text]:
        own = sorted(self._sessions.get(session, ()), reverse=True)
        others: list[Text] = []
        for text in reversed(self._texts.values()):
            if len(others) == OTHERS:
                break
            if text.session != session:
                others.append(text)
        return [self._texts[number] for number in own[:OTHERS]] + others

    def _forget(self, text: Text) -> None:
        del self._texts[text.number]
        numbers = self._sessions[text.session]
        numbers.discard(text.number)
        if not numbers:
            del self._sessions[text.session]


def _part(tokens: Tokens, start: int, length: int) -> memoryview:
    return memoryview(tokens)[4 * start : 4 * (start + length)]
