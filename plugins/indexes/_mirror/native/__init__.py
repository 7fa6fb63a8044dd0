"""`NativeTable`: the table in C++ (table.cpp), reached by ctypes.

Every distinct block is there once: a hash and the number of a set of holders, about 34 bytes with its entry
in the table of hashes. Sets are shared by all blocks with the same holders, so a further holder costs a run
one set, not each of its blocks a few bytes. Blocks stored in one go lie in a row, so a lookup compares memory
until the chain forks, and sees all engines at once: it needs no order of removals and no parents.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable

from bien.core.api import HASH_BYTES, GroupKind, KVEvent, UserError
from bien.gateway.api import WorkerInfo
from bien.plugins.indexes._mirror.native.library import library
from bien.plugins.indexes._mirror.table import Size

EVERYWHERE, STATE = -1, 0  # in the place of a window
MOST_GROUPS = 64


class NativeTable:
    kind = "native"

    def __init__(self) -> None:
        self._c = library()
        self._handle = self._c.new()
        if not self._handle:
            raise MemoryError("no memory for an index")
        weakref.finalize(self, self._c.free, self._handle).atexit = False
        self._places: dict[int, _Places] = {}  # by engine
        self._hopeful: set[int] = set()  # engines with predictions
        self._asked: list[int] | None = None  # the engines of the last lookup, and arrays for them:
        self._engines: ctypes.Array[ctypes.c_int32] = (ctypes.c_int32 * 0)()
        self._near: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * 0)()
        self._far: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * 0)()

    def join(self, info: WorkerInfo) -> int:
        count = len(info.group_kinds)
        if count > MOST_GROUPS:
            raise UserError(
                f"worker {info.id!r} has {count} KV groups; the compiled index takes {MOST_GROUPS}"
            )
        windows, every = [], []
        for kind, window, each in zip(
            info.group_kinds, info.group_windows, info.snapshot_tokens, strict=True
        ):
            every.append(each // info.block_tokens)
            if kind == GroupKind.STATE.value:
                windows.append(STATE)
            elif kind == GroupKind.WINDOW.value and window:
                windows.append(-(-window // info.block_tokens))
            else:
                windows.append(EVERYWHERE)
        numbers = ctypes.c_int64 * count
        engine = self._checked(self._c.join(self._handle, numbers(*windows), numbers(*every), count))
        self._places[engine] = _Places(self, engine, count, info.tiers[0] if info.tiers else "device")
        return engine

    def leave(self, engine: int) -> None:
        self._checked(self._c.leave(self._handle, engine))
        del self._places[engine]
        self._hopeful.discard(engine)

    def clear(self, engine: int) -> None:
        self._checked(self._c.clear(self._handle, engine))

    def feed(self, engine: int, events: Iterable[KVEvent]) -> None:
        c, handle, places = self._c, self._handle, self._places[engine]
        for event in events:
            hashes = event.hashes
            if len(hashes) % HASH_BYTES:
                raise ValueError(f"an event has {len(hashes)} bytes of hashes of {HASH_BYTES} each")
            if event.op == "stored":
                done = c.stored(handle, places[event.group, event.tier], hashes, len(hashes) // HASH_BYTES)
            elif event.op == "removed":
                done = c.removed(handle, places[event.group, event.tier], hashes, len(hashes) // HASH_BYTES)
            else:
                done = 0
                if event.op == "cleared":
                    for (_, tier), place in places.items():
                        if tier == event.tier:
                            done |= c.clear_place(handle, place)
            if done:
                self._checked(done)
        if engine in self._hopeful and not self._checked(c.confirm(handle, engine)):
            self._hopeful.discard(engine)

    def predict(self, engine: int, hashes: bytes, expires: float) -> None:
        self._checked(self._c.predict(self._handle, engine, hashes, len(hashes) // HASH_BYTES, expires))
        self._hopeful.add(engine)

    def take_back(self, engine: int, hashes: bytes) -> None:
        self._checked(self._c.take_back(self._handle, engine, hashes, len(hashes) // HASH_BYTES))

    def forget(self, engine: int) -> None:
        self._checked(self._c.forget(self._handle, engine))
        self._hopeful.discard(engine)

    def usable(self, hashes: bytes, engines: list[int], now: float) -> list[int]:
        self._reach(hashes, engines, now, None)
        return self._near[:]

    def loadable(self, hashes: bytes, engines: list[int], now: float) -> list[int]:
        self._reach(hashes, engines, now, self._far)
        return [far - near for near, far in zip(self._near, self._far, strict=True)]

    def size(self) -> Size:
        out = (ctypes.c_int64 * 3)()
        self._c.size(self._handle, out)
        return Size(*out)

    def _reach(
        self, hashes: bytes, engines: list[int], now: float, far: ctypes.Array[ctypes.c_int64] | None
    ) -> None:
        if engines is not self._asked:
            count = len(engines)
            self._engines = (ctypes.c_int32 * count)(*engines)
            self._near, more = (ctypes.c_int64 * count)(), (ctypes.c_int64 * count)()
            far, self._far = (None if far is None else more), more
            self._asked = engines
        blocks, near = len(hashes) // HASH_BYTES, self._near
        self._checked(
            self._c.reach(self._handle, hashes, blocks, self._engines, len(engines), now, near, far)
        )

    def place(self, engine: int, group: int, first: bool) -> int:
        return self._checked(self._c.place(self._handle, engine, group, first))

    def _checked(self, answer: int) -> int:
        if answer < 0:
            raise MemoryError("no memory left for the index")
        return answer


class _Places(dict[tuple[int, str], int]):
    """The table's numbers of an engine's groups and tiers."""

    def __init__(self, table: NativeTable, engine: int, groups: int, first: str) -> None:
        self._table = weakref.ref(table)
        self._engine = engine
        self._groups = groups
        self._first = first  # tier

    def __missing__(self, key: tuple[int, str]) -> int:
        group, tier = key
        if not 0 <= group < self._groups:
            raise IndexError(f"an event names group {group} of an engine with {self._groups}")
        table = self._table()
        assert table is not None
        self[key] = table.place(self._engine, group, tier == self._first)
        return self[key]
