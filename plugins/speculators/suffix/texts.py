"""`Texts`: the texts of one scope, kept once: what a new one shares with another is not kept again."""

from __future__ import annotations

from collections import deque

from bien.plugins.speculators.suffix.chances import Chances
from bien.plugins.speculators.suffix.corpus import CONTEXT, Corpus, Tokens

KEPT = 64  # texts that a new one is compared with


class Text:
    """Where the tokens of one text lie in its corpus: pieces (position, tokens), in order."""

    __slots__ = ("length", "pieces", "session", "users")

    def __init__(self, session: str) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.length = 0
        self.session = session
        self.users = 0  # sequences that go on with it: one at most

    @property
    def end(self) -> int:
        """The position behind its last token; -1: it has none."""
        return sum(self.pieces[-1]) if self.pieces else -1

    def common(self, corpus: Corpus, tokens: Tokens) -> int:
        """How many leading tokens it shares with `tokens`, as far as the corpus has not forgotten."""
        same = 0
        for position, length in self.pieces:
            found = corpus.equal(position, tokens[4 * same : 4 * (same + length)])
            same += max(0, found)
            if found < length:
                break
        return same

    def cut(self, length: int, session: str) -> Text:
        """Its first `length` tokens, as the beginning of another text."""
        other = Text(session)
        for position, count in self.pieces:
            part = min(count, length - other.length)
            if part <= 0:
                break
            other.pieces.append((position, part))
            other.length += part
        return other

    def add(self, position: int, count: int) -> None:
        if self.end == position:
            first, before = self.pieces[-1]
            self.pieces[-1] = (first, before + count)
        else:
            self.pieces.append((position, count))
        self.length += count


class Texts:
    """Written by the drafter: prompts when sequences begin, answers when they end."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.chances = Chances()  # learned from these texts only: others' speed tells nothing of them
        self.live = 0  # sequences that use it
        self.bytes = 0  # of the corpus, when the drafter looked last
        self._texts: deque[Text] = deque(maxlen=KEPT)  # the one used last comes last

    def begin(self, tokens: Tokens, session: str) -> Text:
        """The text of a sequence whose prompt is `tokens`. Only what no other text has is appended."""
        best, common = None, 0
        newest = list(reversed(self._texts))
        own = [text for text in newest if text.session == session]
        for text in own + [text for text in newest if text.session != session]:
            same = text.common(self.corpus, tokens)
            if same > common:
                best, common = text, same
            if common == len(tokens) // 4 or (text.session == session and same > len(tokens) // 8):
                break  # half of it or more is this session's: nobody else is likely to have more
        if best is not None and common == best.length and not best.users:  # it goes on
            self._texts.remove(best)
            best.session = session
            text = best
        else:
            text = Text(session) if best is None else best.cut(common, session)
        text.users = 1
        self._texts.append(text)
        self.extend(text, tokens, tokens[4 * common :])
        return text

    def extend(self, text: Text, known: Tokens, added: Tokens) -> None:
        """`added` follows; `known` are some tokens of the text, or more, `added` at their end."""
        if not added:
            return
        corpus, count = self.corpus, len(added) // 4
        if text.end == corpus.end:
            text.add(corpus.append(added, fresh=False), count)
            return
        # What was appended last belongs to another text: repeat the end of this one, so that n-grams over the
        # seam are found.
        repeated = min(CONTEXT, len(known) // 4 - count)
        first = corpus.append(known[-4 * (count + repeated) :], fresh=True, repeated=repeated)
        text.add(first + repeated, count)
