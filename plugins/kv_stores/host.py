"""KV store "host": blocks that left the device, in the host's memory, least recently used out first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec

from bien.core.api import (
    HASH_BYTES,
    BlockIO,
    Clock,
    Context,
    DeploymentError,
    HostLink,
    Job,
    KVGroup,
    Provider,
    Transfers,
    hookimpl,
    make_transfers,
)

Key = tuple[int, bytes]
Settle = Callable[[Any, Exception | None], None]


class HostConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`capacity_bytes`, or `capacity_blocks`: room for so many blocks of every paged group at once (state
    snapshots share it); 1 GiB when neither is given. `workers`: copying threads. `bandwidth_bytes_per_s`
    of each worker counts in simulation only; left out: that of the machine's link to its host, 16 GB/s where
    the executor has no machine."""

    capacity_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    capacity_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    workers: Annotated[int, msgspec.Meta(ge=1)] = 1
    bandwidth_bytes_per_s: Annotated[float, msgspec.Meta(gt=0)] | msgspec.UnsetType = msgspec.UNSET

    def host_bytes(self, groups: tuple[KVGroup, ...]) -> int:
        if self.capacity_blocks:
            sizes = [group.block_bytes for group in groups if group.paged]
            return self.capacity_blocks * sum(sizes or [group.block_bytes for group in groups])
        return self.capacity_bytes or 1 << 30


@dataclass(slots=True)
class Entry:
    """One block. It can be loaded once its data is there, which is when it moves to `HostStore._ready`."""

    data: Any = None  # what BlockIO.read returned; None in simulation
    until: float = 0.0  # clock seconds up to which it is pinned
    wanted: bool = True  # False: evicted while it was being saved


class Copy:
    """A `Transfer` that tells the store about its end the first time anyone looks."""

    def __init__(self, job: Job, settle: Settle) -> None:
        self._job = job
        self._settle: Settle | None = settle
        self._failed = False

    def done(self) -> bool:
        if self._settle is None:
            return True
        if not self._job.done():
            return False
        settle, self._settle = self._settle, None
        data, error = None, None
        try:
            data = self._job.result()
        except Exception as caught:  # CancelledError, after close, is one
            error = caught
        self._failed = error is not None
        settle(data, error)
        return True

    def failed(self) -> bool:
        return self.done() and self._failed


class Failed:
    """A load of what is not there."""

    def done(self) -> bool:
        return True

    def failed(self) -> bool:
        return True


class HostStore:
    """A block at a time, so that any run can be loaded; a run of one transfer is saved as a prefix."""

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        io: BlockIO | None,
        clock: Clock,
        transfers: Transfers,
        capacity_bytes: int,
        shares: Sequence[float] = (),
    ) -> None:
        """`shares`: what one link carries of each group's blocks; others carry the rest at the same time."""
        self._bytes = [group.block_bytes for group in groups]
        self._carried = [
            n * share for n, share in zip(self._bytes, shares or [1.0] * len(groups), strict=True)
        ]
        self._io = io
        self._clock = clock
        self._transfers = transfers
        self._capacity = capacity_bytes
        self._used = 0  # bytes of `_ready` and `_saving`
        self._ready: dict[Key, Entry] = {}  # least recently used first
        self._saving: dict[Key, Entry] = {}
        self._copies: list[Copy] = []
        self._events: list[tuple[str, int, list[bytes]]] = []

    def lookup(self, group: int, hashes: bytes) -> list[bool]:
        self._poll()
        ready = self._ready
        return [key in ready for key in _keys(group, hashes)]

    def save(self, group: int, hashes: bytes, blocks: list[int]) -> Copy | None:
        self._poll()
        keys: list[Key] = []
        sources: list[int] = []
        self._renew([key for key in _keys(group, hashes) if key in self._ready])
        for key, block in zip(_keys(group, hashes), blocks, strict=True):
            if key in self._ready or (key in self._saving and self._saving[key].wanted):
                continue
            if key in self._saving or not self._make_room(self._bytes[group]):
                break  # what follows would be of no use without this one
            self._used += self._bytes[group]
            self._saving[key] = Entry()
            keys.append(key)
            sources.append(block)
        if not keys:
            return None
        work = partial(_read, self._io, group, sources)
        return self._start(work, len(keys) * self._carried[group], partial(self._saved, keys))

    def load(self, group: int, hashes: bytes, blocks: list[int]) -> Copy | Failed:
        self._poll()
        keys = _keys(group, hashes)
        if not all(key in self._ready for key in keys):
            return Failed()
        data = [self._ready[key].data for key in keys]
        self._renew(keys)
        # The data is the job's from here on: evicting the entries meanwhile does it no harm.
        work = partial(_write, self._io, group, blocks, data)
        return self._start(work, len(keys) * self._carried[group], _ignore)

    def pin(self, group: int, hashes: bytes, ttl: float) -> None:
        self._poll()
        until = self._clock.time() + ttl
        for key in _keys(group, hashes):
            entry = self._ready.get(key) or self._saving.get(key)
            if entry is not None:
                entry.until = max(entry.until, until)

    def evict(self, group: int, hashes: bytes) -> None:
        self._poll()
        for key in _keys(group, hashes):
            if key in self._saving:
                self._saving[key].wanted = False
            if key in self._ready:
                self._drop(key)

    def take_events(self) -> list[tuple[str, int, bytes]]:
        self._poll()
        events, self._events = self._events, []
        return [(op, group, b"".join(names)) for op, group, names in events]

    @property
    def usage(self) -> tuple[int, int]:
        self._poll()
        return self._used, self._capacity

    def close(self) -> None:
        self._transfers.close()
        self._poll()
        self._ready.clear()
        self._used = 0

    def _start(self, work: Callable[[], Any], nbytes: float, settle: Settle) -> Copy:
        copy = Copy(self._transfers.start(work, round(nbytes)), settle)
        self._copies.append(copy)
        return copy

    def _poll(self) -> None:
        # Every call sees the world as of now, whether or not the engine has asked the transfers.
        if self._copies:
            self._copies = [copy for copy in self._copies if not copy.done()]

    def _saved(self, keys: list[Key], data: list[Any] | None, error: Exception | None) -> None:
        kept = []
        for i, key in enumerate(keys):
            entry = self._saving.pop(key)
            if error is not None or not entry.wanted:
                self._used -= self._bytes[key[0]]
                continue
            entry.data = data[i] if data is not None else None
            self._ready[key] = entry
            kept.append(key)
        self._renew(kept)
        for key in kept:
            self._note("stored", key)

    def _renew(self, keys: list[Key]) -> None:
        # Deepest first: the end of a chain goes before its beginning, which more prompts share.
        for key in reversed(keys):
            self._ready[key] = self._ready.pop(key)

    def _make_room(self, size: int) -> bool:
        if size > self._capacity:
            return False
        now = self._clock.time()
        while self._used + size > self._capacity:
            victim = next((key for key, entry in self._ready.items() if entry.until <= now), None)
            if victim is None:
                return False
            self._drop(victim)
        return True

    def _drop(self, key: Key) -> None:
        del self._ready[key]
        self._used -= self._bytes[key[0]]
        self._note("removed", key)

    def _note(self, op: str, key: Key) -> None:
        group, name = key
        if self._events and self._events[-1][:2] == (op, group):
            self._events[-1][2].append(name)
        else:
            self._events.append((op, group, [name]))


def _keys(group: int, hashes: bytes) -> list[Key]:
    return [(group, hashes[i : i + HASH_BYTES]) for i in range(0, len(hashes), HASH_BYTES)]


def _read(io: BlockIO | None, group: int, blocks: list[int]) -> list[Any] | None:
    return None if io is None else [io.read(group, [block]) for block in blocks]


def _write(io: BlockIO | None, group: int, blocks: list[int], data: Iterable[Any]) -> None:
    if io is not None:
        for block, part in zip(blocks, data, strict=True):
            io.write(group, [block], part)


def _ignore(data: Any, error: Exception | None) -> None:
    pass


def make(config: HostConfig, ctx: Context) -> HostStore:
    if config.capacity_bytes and config.capacity_blocks:
        raise DeploymentError(
            f"kv_store 'host' has capacity_bytes = {config.capacity_bytes} and capacity_blocks = "
            f"{config.capacity_blocks}; valid: one of them",
            field="kv_store.capacity_bytes",
        )
    if ctx.io is None and not ctx.clock.virtual:
        raise DeploymentError("kv_store 'host' needs an executor whose blocks can be read and written")
    capacity = config.host_bytes(ctx.groups)
    bandwidth, lanes, shares = config.bandwidth_bytes_per_s, config.workers, ()
    if bandwidth is msgspec.UNSET:
        bandwidth = 16e9
        if ctx.clock.virtual and isinstance(ctx.io, HostLink):
            bandwidth, lanes, shares = ctx.io.bytes_per_s, max(lanes, ctx.io.lanes), ctx.io.shares
    transfers = make_transfers(ctx.clock, lanes, bandwidth)
    io = None if ctx.clock.virtual else ctx.io
    return HostStore(ctx.groups, io, ctx.clock, transfers, capacity, shares)


@hookimpl
def bien_providers() -> list[Provider]:
    return [Provider("kv_store", "host", make, HostConfig, summary="KV blocks in host memory, LRU")]
