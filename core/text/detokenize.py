"""`Detokenizer`: token ids of one stream to text, piece by piece, never half a character."""

from __future__ import annotations

from collections.abc import Sequence

from bien.core.text.marks import NO_MARKS, Marks, Piece
from bien.core.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"
_CONTEXT = 4  # prompt tokens that stand before the first output (word boundaries need them)
_PATIENCE = 8  # tokens without a whole character after which they are garbage, not a character's start
_WINDOW = 64


class Detokenizer:
    """Keeps a short window of tokens whose text is known and compares it with the text after the next one.

    Works token by token, so the text does not depend on how the stream was cut; for byte-level
    vocabularies it equals `Tokenizer.decode` of the whole. `prompt_tail` holds the last ids of the prompt.
    `pieces` hands `marks` over as what they are.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int] = (), marks: Marks = NO_MARKS
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._ids: list[int] = [t for t in prompt_tail if self._visible(t)][-_CONTEXT:]
        text = self._decode()
        if text.endswith(_BROKEN):  # the prompt ends inside a character: its bytes are not ours to show
            self._ids, text = [], ""
        self._sent = len(text)  # characters of the window's text that were handed out
        self._clean = len(self._ids)  # tokens of the window behind which no character was open

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        return "".join([self._step(t) for t in ids])

    def pieces(self, token: int) -> tuple[Piece, ...]:
        """What one token completes. A character that a mark interrupts becomes U+FFFD."""
        mark = self._marks.get(token)
        if mark is None:
            text = self._step(token)
            return (text,) if text else ()
        broken = self.flush()
        if not broken:
            return (mark,)
        self._ids, self._sent, self._clean = [], 0, 0
        return broken, mark

    def flush(self) -> str:
        """The stream has ended: an unfinished character becomes U+FFFD."""
        text = self._decode()
        piece, self._sent = text[self._sent :], len(text)
        return piece

    def _step(self, token: int) -> str:
        if not self._visible(token):
            return ""
        self._ids.append(token)
        text = self._decode()
        held = 1 if text.endswith(_BROKEN) else 0
        if held and len(self._ids) - self._clean < _PATIENCE:
            return ""
        piece = text[self._sent : len(text) - held]
        # The next window: what this piece was made of, or in garbage enough to hold any character's start.
        self._slide(self._ids[-_CONTEXT:] if held else self._ids[self._clean :], text, held)
        return piece

    def _slide(self, rest: list[int], text: str, held: int) -> None:
        shorter = self._tokenizer.decode(rest)
        if not shorter and len(self._ids) < _WINDOW:  # nothing visible in it to compare with
            shorter, rest = text, self._ids
        self._ids, self._sent, self._clean = rest, max(0, len(shorter) - held), len(rest)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids)

    def _visible(self, token: int) -> bool:
        return token not in self._tokenizer.control.ids and token < self._tokenizer.vocab_size
