"""What a worker may have cached by what was sent there, for when its index is not believed.

Approximate: whatever prompt went there within the last minutes. Sticky: only what the session's own last
prompt left at the one worker that had it.
"""

from __future__ import annotations

from collections import OrderedDict

from bien.core.kv.hashing import HASH_BYTES

HOMES_BYTES = 64 << 20  # of prompts' chains


class Routed:
    """Names of blocks sent to one worker: two generations of them, each for half of `ttl` seconds or more."""

    def __init__(self, ttl: float) -> None:
        self._half = ttl / 2
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._turn = float("-inf")

    def sent(self, hashes: bytes, now: float) -> None:
        self._age(now)
        self._young.update(hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES))

    def depth(self, hashes: bytes, now: float) -> int:
        """Blocks of the chain."""
        self._age(now)
        # Chains come whole: of a block that is known, those before it are.
        low, high = 0, len(hashes) // HASH_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            name = hashes[(middle - 1) * HASH_BYTES : middle * HASH_BYTES]
            if name in self._young or name in self._old:
                low = middle
            else:
                high = middle - 1
        return low

    def _age(self, now: float) -> None:
        if now < self._turn:
            return
        # Nobody came for long: what is young is old, and what is old is gone.
        self._old = self._young if now < self._turn + self._half else set()
        self._young = set()
        self._turn = now + self._half


class Homes:
    """The last prompt of each session, and where it went."""

    def __init__(self, limit: int = HOMES_BYTES) -> None:
        self._homes: OrderedDict[tuple[str, str], tuple[str, bytes]] = OrderedDict()
        self._bytes = 0
        self._limit = limit

    def sent(self, session: tuple[str, str], worker: str, hashes: bytes) -> None:
        if (old := self._homes.pop(session, None)) is not None:
            self._bytes -= len(old[1]) + 256
        self._homes[session] = worker, hashes
        self._bytes += len(hashes) + 256
        while self._bytes > self._limit:
            _, (_, gone) = self._homes.popitem(last=False)
            self._bytes -= len(gone) + 256

    def depth(self, session: tuple[str, str], worker: str, hashes: bytes) -> int:
        """Blocks of the chain that the session's last prompt has in common, where it went there."""
        home, last = self._homes.get(session, ("", b""))
        return common_blocks(last, hashes) if home == worker else 0

    def clear(self) -> None:
        self._homes.clear()
        self._bytes = 0


def common_blocks(a: bytes, b: bytes) -> int:
    """Blocks that two chains share. Equal names at one block mean equal blocks before it."""
    low, high = 0, min(len(a), len(b)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * HASH_BYTES, middle * HASH_BYTES)
        if a[at] == b[at]:
            low = middle
        else:
            high = middle - 1
    return low
