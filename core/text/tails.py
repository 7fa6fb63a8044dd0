"""`Tails`: a conversation's new turn costs the tokenizer its tail only.

Rendered conversations are cut before special tokens (`Boundaries`), and the ids of each part are kept. Ids
depend on the text alone, but how long they take tells who asked before: parts are kept for each owner apart.
"""

from __future__ import annotations

from hashlib import blake2b
from secrets import token_bytes

from bien.core.request import TokenIds
from bien.core.text.boundaries import LEAST
from bien.core.text.tokenizer import Tokenizer
from bien.core.worker.threads import lock

MAX_BYTES = 64 << 20  # of ids and keys: some 80 conversations of 200k tokens
_ENTRY = 200  # bytes of a part beside its ids: key, dictionary, object heads


class Tails:
    """Blocking; any number of threads may call it. The parts that were used longest ago give way, whosever
    they are."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_bytes: int = MAX_BYTES,
        literals: str | None = None,
        least: int = LEAST,
    ) -> None:
        """`max_bytes` 0: nothing is kept. `literals`: what the template writes; None: anything. `least`:
        characters of a part."""
        self._tokenizer = tokenizer
        self._boundaries = tokenizer.boundaries(least, literals)
        self._max = max_bytes
        self._kept: dict[bytes, bytes] = {}  # ids by key; in the order of last use
        self._secret = token_bytes(32)
        self._lock = lock()
        self.held = 0  # bytes, as counted against `max_bytes`
        self.reused = 0  # tokens that were found, so far
        self.encoded = 0  # tokens that were not

    def encode_guarded(self, text: str, mark: str, owner: str) -> TokenIds:
        """As the tokenizer's. `owner`: who may notice that a text was here before: a tenant and its salt."""
        spelled = self._tokenizer.spells(text, mark)
        if not self._max:
            (ids,) = self._tokenizer.encode_parts([text], mark, spelled=spelled)
            return ids
        parts = self._boundaries.parts(text)
        # One part may hold no mark where another one does: how the whole is encoded decides for each.
        name = blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=32, key=self._secret).digest()
        head = name + (mark if spelled else "").encode()
        keys = [
            blake2b(head + p.encode("utf-8", "surrogatepass"), digest_size=16, key=self._secret).digest()
            for p in parts
        ]
        with self._lock:
            found = [self._take(key) for key in keys]
        missing = [at for at, ids in enumerate(found) if ids is None]
        encoded = self._tokenizer.encode_parts([parts[at] for at in missing], mark, spelled=spelled)
        with self._lock:
            self.reused += sum(len(ids) for ids in found if ids is not None) // 4
            for at, ids in zip(missing, encoded, strict=True):
                found[at] = ids.packed
                self.encoded += len(ids)
                self._put(keys[at], ids.packed)
        return TokenIds(b"".join(ids for ids in found if ids is not None))

    def _take(self, key: bytes) -> bytes | None:
        ids = self._kept.pop(key, None)
        if ids is not None:
            self._kept[key] = ids
        return ids

    def _put(self, key: bytes, ids: bytes) -> None:
        size = len(ids) + _ENTRY
        if size > self._max:
            return
        old = self._kept.pop(key, None)  # another thread was as fast, or the text has this part twice
        if old is not None:
            self.held -= len(old) + _ENTRY
        self._kept[key] = ids
        self.held += size
        while self.held > self._max:
            oldest = next(iter(self._kept))
            self.held -= len(self._kept.pop(oldest)) + _ENTRY
