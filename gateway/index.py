"""The KV-index contract: which prefix of a hash chain each worker can use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import msgspec

from bien.core.kv.events import EventBatch, KVEvent
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.published import Lease, Publication


class KVIndex(Protocol):
    """In-process read path. Called on the event loop."""

    def join(self, info: WorkerInfo) -> None:
        """A worker (or a new generation of it) appeared with an empty cache."""
        ...

    def leave(self, worker: str) -> None: ...

    def apply(self, batch: EventBatch) -> bool:
        """Apply one batch. False: a gap or a foreign generation: the caller must ask for a snapshot."""
        ...

    def reset(self, worker: str, dp_rank: int, generation: str, seq: int, events: list[KVEvent]) -> None:
        """Replace all that is known of a worker by its snapshot."""
        ...

    def predict(self, worker: str, dp_rank: int, hashes: bytes, ttl: float) -> None:
        """These prompt blocks were routed there and will be stored; forget after `ttl` seconds unless an
        event confirms. `ttl` 0 takes one earlier prediction of just these blocks back, if there is one
        still, that which would last longest: its request was aborted before its first output."""
        ...

    def overlaps(self, hashes: bytes, targets: list[tuple[str, int]]) -> list[int]:
        """Usable prefix in *blocks* per target, over all KV groups: held by some tier, or, of a
        `TieredIndex`, by the worker's first tier. A target that has not joined has none."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class TieredIndex(KVIndex, Protocol):
    """An index that tells the blocks of a worker's first tier, the device's, from those of slower ones."""

    def loadable(self, hashes: bytes, targets: list[tuple[str, int]]) -> list[int]:
        """Per target, blocks beyond `overlaps` that are usable if what any tier there holds counts, over all
        KV groups: what a load spares computing."""
        ...


@runtime_checkable
class LeasedIndex(KVIndex, Protocol):
    """An index that sees leases end. The one that waits for it sets `lease_lost`."""

    lease_lost: Callable[[str], None]
    """Told of a worker that has joined and holds its lease no longer, while the store answers. It may be
    hung, or the store has forgotten it: whoever is connected asks it."""


class IndexHealth(msgspec.Struct, frozen=True):
    """Of what stands behind an index. "away": it cannot be reached, serving goes on from the mirror."""

    state: Literal["ok", "degraded", "away"]
    reason: str = ""  # without credentials
    seconds: float = 0.0  # in this state


@runtime_checkable
class DurableIndex(KVIndex, Protocol):
    """An index whose workers publish their caches to a store that outlives a gateway.

    The mirror is the read path all the same, and frames of connected workers feed it as ever; the store is
    where a gateway finds workers and their caches when it starts, or has lost its place. None of the
    methods raises because the store is away or holds what nobody can read: `health` says so.
    """

    @property
    def publication(self) -> Publication:
        """What workers need to publish; handed to them at their start."""
        ...

    @property
    def health(self) -> IndexHealth: ...

    async def start(self) -> None:
        """Reach the store. ResourceError, naming it without credentials, when that is required and fails."""
        ...

    async def restore(self, worker: str, dp_rank: int) -> bool:
        """Set what is known of a worker that has joined to what is stored of its generation. False: nothing
        is stored, or not without a gap; then nothing has changed."""
        ...

    async def leases(self) -> list[Lease]:
        """The workers that are alive, of any fingerprint."""
        ...

    async def stop(self) -> None:
        """Before `close`: end what runs beside, and the connections."""
        ...
