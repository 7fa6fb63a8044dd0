"""`Tokenizer`: text to token ids and back, over the `tokenizers` library (a folder's tokenizer.json).

Blocking; encoding goes through the library's batch call, which releases the interpreter lock, so that
a thread can encode 200k tokens while the event loop runs on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Library

from bien.core.errors import ModelError, UserError
from bien.core.request import TokenIds
from bien.core.text.boundaries import LEAST, Boundaries
from bien.core.text.control import ControlToken, ControlTokens
from bien.core.text.pieces import Pieces
from bien.core.text.tiktoken import NAMES, find_ranks, load_tiktoken


class Tokenizer:
    """Control tokens are the added tokens that the model's files mark `special`: they have no text.

    `guards` are those that a client's text never becomes: the control tokens, and what `guard_also` adds.
    """

    def __init__(self, library: Library) -> None:
        self._source = library.to_str()
        library.no_truncation()
        library.no_padding()
        self._library = library
        added = library.get_added_tokens_decoder()
        self.vocab_size: int = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        self._added = {t.content: ControlToken(t.content, i, t.lstrip, t.rstrip) for i, t in added.items()}
        # A token that is looked for in normalized text can come out of a text that does not hold it.
        self._normalized = library.normalizer is not None and any(t.normalized for t in added.values())
        self._raw = {t.content for t in added.values() if not t.normalized}
        self._single = {t.content for t in added.values() if t.single_word}
        self.control = ControlTokens([self._added[t.content] for t in added.values() if t.special])
        self.guards = self.control

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """From `folder`/tokenizer.json, or a tiktoken file. ModelError if both are missing, or for a damaged
        one."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if path.is_file():
            try:
                return cls(Library.from_file(str(path)))
            except Exception as error:  # the library raises bare Exceptions
                raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error
        ranks = find_ranks(folder)
        if ranks is None:
            raise ModelError(
                f"{path} is missing; a model folder needs a tokenizer.json (fast tokenizer), or a tiktoken "
                f"file ({', '.join(NAMES)}, *.tiktoken)"
            )
        return cls(load_tiktoken(ranks))

    @property
    def words(self) -> dict[str, int]:
        """Every token as the vocabulary spells it, and its id."""
        return dict(self._library.get_vocab(with_added_tokens=True))

    def id_of(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenIds:
        """Ids of `text`, in which control tokens are recognised: for text whose author may write them.

        `add_special_tokens` adds what the model puts around a bare text (usually a BOS token).
        """
        return TokenIds.of(self._encode(self._library, [text], add_special_tokens)[0])

    @property
    def added(self) -> Mapping[str, ControlToken]:
        """Every added token by its text, special or not."""
        return self._added

    def guard_also(self, text: str) -> None:
        """`text` is a template's own: the added tokens in it steer the model as control tokens do, whatever
        the model's files call them."""
        more = [
            t
            for name, t in self._added.items()
            if t.id not in self.control.ids and name.strip() and name in text and name not in self._single
        ]
        if more:
            self.guards = ControlTokens([*self.control.tokens, *more])
            self.__dict__.pop("_plain", None)

    def encode_plain(self, text: str) -> TokenIds:
        """Ids of `text` with every guarded token in it spelled out as ordinary text."""
        return TokenIds.of(self._spell([text])[0])

    def encode_guarded(self, text: str, mark: str) -> TokenIds:
        """As `encode`, but what `guards.guard` marked is spelled out as ordinary text; marks vanish."""
        return self.encode_parts([text], mark, spelled=self.spells(text, mark))[0]

    def spells(self, text: str, mark: str) -> bool:
        """Whether a guarded text has anything to spell out."""
        return mark in text or self._normalized

    def encode_parts(self, texts: list[str], mark: str, *, spelled: bool) -> list[TokenIds]:
        """As `encode_guarded` for each of them, in one call of the library; `spelled` is what `spells` says
        of the text that they are parts of."""
        if not spelled:
            return [TokenIds.of(ids) for ids in self._encode(self._library, texts, False)]
        split = [list(self.guards.split(text, mark)) for text in texts]
        pieces = iter(self._spell([piece for one in split for piece, _ in one]))
        out = []
        for one in split:
            ids: list[int] = []
            for _, token in one:
                ids += next(pieces)
                if token is not None:
                    ids.append(token)
            out.append(TokenIds.of(ids))
        return out

    def boundaries(self, least: int = LEAST, literals: str | None = None) -> Boundaries:
        """Where rendered texts may be cut into parts of `least` characters or more, as long as nothing more
        is guarded. `literals`: what their template writes; None: anything."""
        raw = [t for t in self.guards.tokens if t.text in self._raw]
        return Boundaries(raw, self._added.values(), self._single, literals, least)

    def _spell(self, texts: list[str]) -> list[list[int]]:
        out = self._encode(self._plain, texts, False)
        for at in range(len(out)):
            # A vocabulary may hold a guarded token as a word, too: such a text is encoded in parts.
            for parts in (self.guards.cut, list):
                if self.guards.ids.isdisjoint(out[at]):
                    break
                spelled = self._encode(self._plain, list(parts(texts[at])), False)
                out[at] = [id for ids in spelled for id in ids]
        return out

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
        text = self._source
        if self.guards is not self.control:  # the library spells out only what it calls special
            source = json.loads(text)
            for token in source["added_tokens"]:
                token["special"] = token["id"] in self.guards.ids
            text = json.dumps(source)
        library = Library.from_str(text)
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
