"""A toy device and the hands of the KV-store suite: it saves and loads, waits and compares."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from bien.core.clock import WallClock
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.kv.hashing import HASH_BYTES, block_hash
from bien.core.kv.store import KVStore, Transfer

BLOCKS = 64  # of each group, on the toy device
GROUPS = (
    KVGroup("full", GroupKind.FULL, (0,), 4, bytes_per_token=8),
    KVGroup("window", GroupKind.WINDOW, (1,), 4, bytes_per_token=8, window=6),
    KVGroup("state", GroupKind.STATE, (2,), 4, constant_bytes=32),
)


class Contents:
    """What `ToyIO.read` returns. Opaque to stores."""

    def __init__(self, group: int, parts: list[bytes]) -> None:
        self.group = group
        self.parts = parts
        self.nbytes = sum(map(len, parts))


class ToyIO:
    """A `BlockIO` over a dict. `held` makes copies wait (a while), `broken` makes them fail."""

    def __init__(self) -> None:
        self.memory: dict[tuple[int, int], bytes] = {}
        self.held = False
        self.broken = False
        self.waited = False  # a copy has been held up
        self._clock = WallClock()

    def read(self, group: int, blocks: list[int]) -> Contents:
        self._pass("read")
        return Contents(group, [self.memory[group, block] for block in blocks])

    def write(self, group: int, blocks: list[int], data: Any) -> None:
        self._pass("write")
        if not isinstance(data, Contents) or data.group != group or len(data.parts) != len(blocks):
            raise ValueError(
                f"write of {len(blocks)} blocks of group {group} needs what read returned for them"
            )
        for block, part in zip(blocks, data.parts, strict=True):
            self.memory[group, block] = part

    def _pass(self, verb: str) -> None:
        for _ in range(300):
            if not self.held:
                break
            self.waited = True
            self._clock.block(0.001)
        if self.broken:
            raise OSError(f"planted failure of {verb}")


def chain(name: str, length: int) -> bytes:
    """A chain of `length` hashes; chains of different names share nothing."""
    out, parent = [], b""
    for i in range(length):
        parent = block_hash(b"suite", parent, f"{name}.{i}".encode())
        out.append(parent)
    return b"".join(out)


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


class Bench:
    """A store under test, the toy device beside it, and what its events have said."""

    def __init__(self, store: KVStore, io: ToyIO, least: int, most: int) -> None:
        self.io = io
        self.store = store
        self.told: set[tuple[int, bytes]] = set()
        self._next = 0
        self._least, self._most = least, most
        self._clock = WallClock()

    def __enter__(self) -> Bench:
        least, most, room = self._least, self._most, self.room
        assert least <= room <= most, f"build() gave room for {room} blocks; valid: {least} to {most}"
        return self

    def __exit__(self, *error: object) -> None:
        self.io.held = False
        self.store.close()

    @property
    def room(self) -> int:
        """Blocks of the largest group that it can hold."""
        return self.store.usage[1] // max(group.block_bytes for group in GROUPS)

    def take(self, n: int) -> list[int]:
        """Device blocks, in a ring: the oldest are reused, as in a pool."""
        blocks = [1 + (self._next + i) % BLOCKS for i in range(n)]
        self._next += n
        for group in range(len(GROUPS)):
            for block in blocks:
                self.io.memory[group, block] = b"?" * GROUPS[group].block_bytes
        return blocks

    def fill(self, group: int, hashes: bytes) -> list[int]:
        """Device blocks that hold what `hashes` name."""
        blocks = self.take(len(split(hashes)))
        for block, name in zip(blocks, split(hashes), strict=True):
            self.io.memory[group, block] = _content(group, name)
        return blocks

    def wait(self, transfer: Transfer | None) -> bool:
        """Until it has ended; whether it failed."""
        if transfer is None:
            return False
        for _ in range(20_000):
            if transfer.done():
                assert transfer.done(), "done() takes its word back"
                return transfer.failed()
            self._clock.block(0.0005)
        raise AssertionError("a transfer never ends")

    def save(self, group: int, hashes: bytes) -> None:
        failed = self.wait(self.store.save(group, hashes, self.fill(group, hashes)))
        assert not failed, "a save failed for no reason"

    def load(self, group: int, hashes: bytes) -> None:
        blocks = self.take(len(split(hashes)))
        assert not self.wait(self.store.load(group, hashes, blocks)), "a load failed of what lookup has"
        self.check(group, hashes, blocks)

    def refuse(self, group: int, hashes: bytes) -> None:
        transfer = self.store.load(group, hashes, self.take(len(split(hashes))))
        assert self.wait(transfer), "a load of blocks that are not there reports success"

    def check(self, group: int, hashes: bytes, blocks: list[int]) -> None:
        for name, block in zip(split(hashes), blocks, strict=True):
            assert self.io.memory[group, block] == _content(group, name), "a load brought other data"

    def events(self) -> None:
        """Follow the events; each must say what lookup says."""
        for op, group, hashes in self.store.take_events():
            keys = {(group, name) for name in split(hashes)}
            assert len(keys) == len(split(hashes)), "an event names a block twice"
            if op == "stored":
                assert not keys & self.told, "an event stores what is stored"
                self.told |= keys
            else:
                assert op == "removed", f"event {op!r}; valid: stored, removed"
                assert keys <= self.told, "an event removes what is not stored"
                self.told -= keys
        for group, name in self.told:
            assert self.store.lookup(group, name) == [True], "events tell of a block that cannot be loaded"

    def live(self, rng: random.Random, steps: int) -> None:
        """A random life, compared after every step."""
        chains = [chain(f"r{i}", 6) for i in range(6)]
        for _ in range(steps):
            group = rng.randrange(len(GROUPS))
            hashes = rng.choice(chains)
            lo = rng.randrange(6)
            part = hashes[lo * HASH_BYTES : (lo + rng.randint(1, 6)) * HASH_BYTES]
            there = self.store.lookup(group, part)
            act: Callable[[int, bytes], None] = rng.choice([self.save, self.save, self.load, self.evict])
            if act == self.load and not all(there):
                act = self.refuse
            act(group, part)
            self.events()
            found = {
                (g, name)
                for g in range(len(GROUPS))
                for c in chains
                for name, there_now in zip(split(c), self.store.lookup(g, c), strict=True)
                if there_now
            }
            assert found == self.told, "events and lookup disagree"

    def evict(self, group: int, hashes: bytes) -> None:
        self.store.evict(group, hashes)
        assert not any(self.store.lookup(group, hashes)), "what was evicted is still there"


def _content(group: int, name: bytes) -> bytes:
    size = GROUPS[group].block_bytes
    return (bytes([group]) + name * (size // HASH_BYTES + 1))[:size]
