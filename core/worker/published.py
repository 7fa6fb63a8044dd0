"""What workers publish for indexes, and how it is written: versioned maps, read by whoever comes later.

Under one namespace (default `bien`) and per fingerprint `fp`; the braces are a hash tag, so that all keys
of a fingerprint lie in one slot of a cluster:

- `bien:{fp}:worker:<id>`    hash, the lease: lives while the worker renews it
- `bien:{fp}:events`         stream of entries, each with some batches of one worker in field `d`; trimmed
- `bien:{fp}:snapshot:<id>`  hash, dp_rank -> all cached blocks at an event number
- `bien:{fp}:workers`        sorted set of worker ids, scored by their last renewal (ms)
- `bien:{fp}:reserving`, `bien:{fp}:reserved:<id>`  what gateways have reserved, written by them
- `bien:fps`                 sorted set of fingerprints, the same

Of a worker only the worker itself writes: it goes on while gateways come and go, and there is one writer to
fence. A lease holds no token: who may join a worker derives it from the deployment's secret, and shows that
it can (handshake.py) without sending it to whoever wrote the lease.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import HASH_BYTES
from bien.core.worker.messages import Snapshot, WorkerInfo

VERSION = 1
FIELD = b"d"  # of a stream entry
OPS = ("stored", "removed", "cleared")
MAX_RANKS = 1024  # of one worker: each costs whoever reads its lease something
MAX_INFO = 64 << 10  # bytes of what a lease says of its worker
# What a decoder raises of bytes that others wrote: nesting too deep for it is none of its own errors.
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)


class Publication(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where and how a worker publishes. Written by the index that reads it; sent in the start message."""

    url: str
    namespace: str = "bien"
    lease_seconds: float = 9.0  # without a renewal, which is due three times in it
    keep_seconds: float = 60.0  # that events and snapshots outlive the last worker
    stream_entries: int = 8192
    stream_bytes: int = 64 << 20
    snapshot_bytes: int = 64 << 20  # a larger one is not published
    flush_seconds: float = 1.0  # that batches wait for others, to be one entry; not when a gateway joins
    timeout_seconds: float = 2.0  # of one command


class Keys:
    """The names above."""

    def __init__(self, namespace: str, fp: str) -> None:
        self._base = f"{namespace}:{{{fp}}}:"
        self.events = self._base + "events"
        self.workers = self._base + "workers"
        self.gateways = self._base + "reserving"

    def lease(self, worker: str) -> str:
        return f"{self._base}worker:{worker}"

    def snapshot(self, worker: str) -> str:
        return f"{self._base}snapshot:{worker}"

    def load(self, gateway: str) -> str:
        return f"{self._base}reserved:{gateway}"


def fps_key(namespace: str) -> str:
    """Of the set of fingerprints."""
    return f"{namespace}:fps"


class Lease(msgspec.Struct, frozen=True):
    """One worker that is alive, as of its last renewal."""

    info: WorkerInfo
    host: str
    port: int
    seqs: tuple[int, ...]  # of each rank: the number of its newest batch in the stream


class StoredEvent(msgspec.Struct, gc=False, omit_defaults=True):
    """A KVEvent as a map."""

    op: str
    group: int = 0
    parent: bytes = b""
    hashes: bytes = b""
    tier: str = "device"


class StoredBatch(msgspec.Struct, gc=False):
    seq: int
    events: list[StoredEvent] = []


class Entry(msgspec.Struct, gc=False, kw_only=True):
    """Of the stream: batches `first` to `last` of one engine, decoded only by who needs them."""

    v: int = VERSION
    worker: str
    dp_rank: int = 0
    generation: str
    first: int
    last: int
    batches: msgspec.Raw


class StoredSnapshot(msgspec.Struct, kw_only=True):
    """All cached blocks of one engine as of batch `seq`. `at`: an id in the stream; what came after `seq`
    lies behind it."""

    v: int = VERSION
    generation: str
    seq: int
    at: str = "0-0"
    events: list[StoredEvent] = []


class DecodingError(Exception):
    """It is not what stands above: foreign, damaged, or of a later version."""


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(list[StoredBatch])
_entry = msgspec.msgpack.Decoder(Entry)
_snapshot = msgspec.msgpack.Decoder(StoredSnapshot)


def seq_field(dp_rank: int) -> str:
    """Of a lease: where the number of a rank's newest batch stands."""
    return f"seq:{dp_rank}" if dp_rank else "seq"


def lease_fields(info: WorkerInfo, host: str, port: int, *seqs: int) -> dict[str, str]:
    """The lease as a hash, with a number for each rank; what a script or a person may look for has a field
    of its own."""
    return {
        "v": str(VERSION),
        "generation": info.generation,
        "endpoint": f"{host}:{port}",
        "roles": info.role,
        "dp_ranks": str(info.dp_ranks),
        "groups": ",".join(info.group_kinds),
        "capacity": ",".join(map(str, info.group_blocks)),  # blocks of each group
        "tiers": ",".join(info.tiers),
        **{seq_field(rank): str(seq) for rank, seq in enumerate(seqs)},
        "info": msgspec.json.encode(msgspec.structs.asdict(info)).decode(),
    }


def seq_fields(info: WorkerInfo) -> list[str]:
    return [seq_field(rank) for rank in range(info.dp_ranks)]


def read_seqs(values: Iterable[bytes]) -> tuple[int, ...]:
    """ValueError or TypeError for others than `seq_fields` have."""
    return tuple(map(int, values))


def read_lease(fields: Mapping[bytes, bytes]) -> Lease:
    """DecodingError for anything that `lease_fields` has not written."""
    try:
        if (version := int(fields[b"v"])) != VERSION:
            raise DecodingError(f"a lease of version {version}; valid: {VERSION}")
        host, _, port = fields[b"endpoint"].decode().rpartition(":")
        if len(fields[b"info"]) > MAX_INFO:
            raise DecodingError(f"a lease with {len(fields[b'info'])} bytes of info; valid: up to {MAX_INFO}")
        info = msgspec.convert(_by_position(msgspec.json.decode(fields[b"info"])), WorkerInfo)
        if info.generation != fields[b"generation"].decode():
            raise DecodingError("a lease of two generations")
        if not 1 <= info.dp_ranks <= MAX_RANKS:
            raise DecodingError(f"a lease with {info.dp_ranks} dp_ranks; valid: 1 to {MAX_RANKS}")
        if not host or not 0 < int(port) < 65536:
            raise DecodingError(f"a lease whose endpoint is {host:.40}:{port:.10}; valid: host:port")
        return Lease(info, host, int(port), read_seqs([fields[n.encode()] for n in seq_fields(info)]))
    except (KeyError, AttributeError, *UNREADABLE) as error:
        raise DecodingError(f"a lease that cannot be read: {error!r}") from None


def write_entry(batches: list[EventBatch]) -> bytes:
    """Of one engine and generation, in order and without a gap."""
    first, last = batches[0], batches[-1]
    body = [StoredBatch(batch.seq, _stored(batch.events)) for batch in batches]
    entry = Entry(
        worker=first.worker,
        dp_rank=first.dp_rank,
        generation=first.generation,
        first=first.seq,
        last=last.seq,
        batches=msgspec.Raw(_encoder.encode(body)),
    )
    return _encoder.encode(entry)


def read_entry(data: bytes) -> Entry:
    """The head of it. DecodingError."""
    entry: Entry = _checked(_entry, data, "an entry")
    return entry


def read_batches(entry: Entry, groups: int) -> list[EventBatch]:
    """Its batches, for a worker of so many KV groups. DecodingError."""
    try:
        stored = _batches.decode(entry.batches)
    except UNREADABLE as error:
        raise DecodingError(f"batches of worker {entry.worker!r} that cannot be read: {error}") from None
    numbers = [batch.seq for batch in stored]
    if entry.last - entry.first >= len(numbers) or numbers != list(range(entry.first, entry.last + 1)):
        raise DecodingError(f"an entry of worker {entry.worker!r} holds other batches than it says")
    return [
        EventBatch(entry.worker, entry.dp_rank, entry.generation, b.seq, _events(b.events, groups))
        for b in stored
    ]


def write_snapshot(snapshot: Snapshot, at: str) -> bytes:
    """Without its rank, which its field names."""
    stored = _stored(snapshot.events)
    return _encoder.encode(
        StoredSnapshot(generation=snapshot.generation, seq=snapshot.seq, at=at, events=stored)
    )


def read_snapshot(data: bytes, groups: int) -> tuple[Snapshot, str]:
    """And the id in the stream behind which it goes on. DecodingError."""
    stored = _checked(_snapshot, data, "a snapshot")
    return Snapshot(stored.generation, stored.seq, _events(stored.events, groups)), stored.at


def join_token(secret: str, namespace: str) -> str:
    """What a gateway and a worker that it has not started prove to each other: both derive it from the secret
    of their deployment, and nothing that is published or sent gives it away."""
    text = f"bien worker token\0{namespace}".encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def _checked(decoder: Any, data: bytes, what: str) -> Any:
    try:
        found = decoder.decode(data)
    except UNREADABLE as error:
        raise DecodingError(f"{what} that cannot be read: {error}") from None
    if found.v != VERSION:
        raise DecodingError(f"{what} of version {found.v}; valid: {VERSION}")
    return found


def _stored(events: Iterable[KVEvent]) -> list[StoredEvent]:
    return [StoredEvent(e.op, e.group, e.parent, e.hashes, e.tier) for e in events]


def _events(stored: list[StoredEvent], groups: int) -> list[KVEvent]:
    for e in stored:
        known = e.op in OPS and 0 <= e.group < groups
        if not known or len(e.hashes) % HASH_BYTES or len(e.parent) not in (0, HASH_BYTES):
            raise DecodingError(f"an event {e.op!r} of group {e.group} that no worker has made")
    return [KVEvent(e.op, e.group, e.parent, e.hashes, e.tier) for e in stored]


def _by_position(fields: dict[str, Any]) -> list[Any]:
    # WorkerInfo travels as an array on the wire; fields that are missing here have their defaults.
    infos = msgspec.structs.fields(WorkerInfo)
    values: list[Any] = []
    for field in infos:
        if field.name in fields:
            values.append(fields[field.name])
        elif field.required:
            raise DecodingError(f"a lease without {field.name!r}")
        else:
            values.append(field.default)
    return values
