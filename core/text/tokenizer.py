"""`Tokenizer`: text to token ids and back, over the `tokenizers` library (a folder's tokenizer.json).

Blocking; encoding goes through the library's batch call, which releases the interpreter lock, so that
a thread can encode 200k tokens while the event loop runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Library

from bien.core.errors import ModelError, UserError
from bien.core.request import TokenIds
from bien.core.text.control import ControlToken, ControlTokens
from bien.core.text.pieces import Pieces


class Tokenizer:
    """Control tokens are the added tokens that tokenizer.json marks `special`."""

    def __init__(self, library: Library) -> None:
        self._source = library.to_str()
        library.no_truncation()
        library.no_padding()
        self._library = library
        added = library.get_added_tokens_decoder()
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        self.control = ControlTokens(
            [ControlToken(t.content, i, t.lstrip, t.rstrip) for i, t in added.items() if t.special]
        )

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read `folder`/tokenizer.json. ModelError if it is missing or damaged."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} is missing; a model folder needs a tokenizer.json (fast tokenizer)")
        try:
            return cls(Library.from_file(str(path)))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error

    def id_of(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenIds:
        """Ids of `text`, in which control tokens are recognised: for text whose author may write them.

        `add_special_tokens` adds what the model puts around a bare text (usually a BOS token).
        """
        return TokenIds.of(self._encode(self._library, [text], add_special_tokens)[0])

    def encode_plain(self, text: str) -> TokenIds:
        """Ids of `text` with every control token in it spelled out as ordinary text."""
        return TokenIds.of(self._encode(self._plain, [text], False)[0])

    def encode_guarded(self, text: str, mark: str) -> TokenIds:
        """As `encode`, but what `control.guard` marked is spelled out as ordinary text; marks vanish."""
        if mark not in text:
            return self.encode(text)
        pieces = list(self.control.split(text, mark))
        plain = self._encode(self._plain, [p for p, _ in pieces], False)
        ids: list[int] = []
        for (_, token), piece in zip(pieces, plain, strict=True):
            ids += piece
            if token is not None:
                ids.append(token)
        return TokenIds.of(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without control tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._library.decode(ids, skip_special_tokens=True)

    def piece(self, id: int) -> tuple[str, bytes]:
        """One token as text and as bytes, control tokens by their names."""
        return self._pieces.piece(id)

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._library)

    @cached_property
    def _plain(self) -> Library:
        library = Library.from_str(self._source)
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True
        return library

    @staticmethod
    def _encode(library: Library, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        try:
            encodings = library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate
            raise UserError(f"text is not valid Unicode: {error}", field="prompt") from error
        return [e.ids for e in encodings]
