"""The KV-store contract: tiers below the device pools.

Transfers are asynchronous handles that the engine polls. While a load runs its sequence is LOADING, its
blocks are pinned, and it is not planned; a failed load falls back to recompute.
"""

from __future__ import annotations

from typing import Protocol

from bien.core.kv.groups import KVGroup


class Transfer(Protocol):
    """One running copy between tiers."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        ...

    def failed(self) -> bool:
        """Whether the data did not arrive (after `done()`)."""
        ...


class KVStore(Protocol):
    """Keys are (group, block hash) under one fingerprint. All calls from the engine's thread."""

    def lookup(self, group: int, hashes: bytes) -> list[bool]:
        """Which of the chained 16-byte `hashes` it can load now."""
        ...

    def save(self, group: int, hashes: bytes, blocks: list[int]) -> Transfer | None:
        """Start copying committed device blocks (pinned by the engine until done) into this tier.
        None: nothing to do (all present, or no room)."""
        ...

    def load(self, group: int, hashes: bytes, blocks: list[int]) -> Transfer:
        """Start copying into freshly reserved device blocks."""
        ...

    def pin(self, group: int, hashes: bytes, ttl: float) -> None:
        """Keep these entries for `ttl` seconds if it can."""
        ...

    def evict(self, group: int, hashes: bytes) -> None:
        """Drop these entries."""
        ...

    def take_events(self) -> list[tuple[str, int, bytes]]:
        """("stored" | "removed", group, hashes) since the last call, for the index (tier "host")."""
        ...

    @property
    def usage(self) -> tuple[int, int]:
        """(bytes used, bytes of capacity)."""
        ...

    def close(self) -> None:
        """End transfers and free the tier."""
        ...


class HostCapacity(Protocol):
    """What a store's *parameters* (its `config_type`) should say if it takes this machine's memory, so that
    it is counted before anything is made."""

    def host_bytes(self, groups: tuple[KVGroup, ...]) -> int:
        """The most that the store of one worker with these groups holds in host memory."""
        ...
