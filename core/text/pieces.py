"""`Pieces`: single tokens as clients are shown them (log-probabilities), and the bytes they stand for."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from tokenizers import Tokenizer as Library

from bien.core.text.byte_pairs import byte_alphabet

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Pieces:
    """Works for byte-level vocabularies and for those of words with "▁" and byte fallback."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._added = {i: t.content for i, t in library.get_added_tokens_decoder().items()}
        parts = json.loads(library.to_str()).get("decoder") or {}
        kinds = {p.get("type") for p in [parts, *parts.get("decoders", [])]}
        self._bytes = byte_alphabet() if "ByteLevel" in kinds else {}
        self._fallback = "ByteFallback" in kinds
        self.piece = lru_cache(maxsize=1 << 14)(self._piece)

    def _piece(self, id: int) -> tuple[str, bytes]:
        """Text and bytes. Bytes that are no whole character read `bytes:\\xNN`, as in OpenAI's API; an id
        that the vocabulary lacks has none."""
        data = self._data(id)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data), data

    def _data(self, id: int) -> bytes:
        token = self._added.get(id)
        if token is not None:
            return token.encode()
        token = self._library.id_to_token(id)
        if token is None:
            return b""
        if self._bytes:
            known = [self._bytes.get(c) for c in token]
            return token.encode() if None in known else bytes(b for b in known if b is not None)
        if self._fallback and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()
