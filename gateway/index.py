"""The KV-index contract: which prefix of a hash chain each worker can use."""

from __future__ import annotations

from typing import Protocol

from bien.core.kv.events import EventBatch, KVEvent
from bien.core.worker.messages import WorkerInfo


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
        still: its request was aborted before its first output."""
        ...

    def overlaps(self, hashes: bytes, targets: list[tuple[str, int]]) -> list[int]:
        """Usable prefix in *blocks* per target, over all KV groups."""
        ...

    def close(self) -> None: ...
