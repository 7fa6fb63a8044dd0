"""The memory index: a mirror of every worker's cached blocks, fed by their events.

Per engine (worker, dp_rank) and KV group it keeps the block hashes that some tier holds. Groups of
every position (full attention and its like) are prefix-closed, so their depth in a chain is found by
bisection; closure is verified, not assumed: blocks whose parent is absent are counted, and while there
are any, the chain is walked instead. For groups of a window or a state it asks for the longest position
at which each of them holds, as the engine's own pools do.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator

from bien.core.api import (
    HASH_BYTES,
    Clock,
    Context,
    EventBatch,
    GroupKind,
    KVEvent,
    NoParameters,
    Provider,
    hookimpl,
)
from bien.gateway.api import WorkerInfo

_BLOCK = struct.Struct(f"{HASH_BYTES}s")
DEVICE = "device"
UNKNOWN = b"?"  # parent of a block of which only a lower tier told
MAX_PREDICTIONS = 1024  # per engine; the oldest go first


class _Chain:
    """A prompt's hashes, and where each stands (built only for groups that need it)."""

    def __init__(self, hashes: bytes) -> None:
        self.hashes = hashes
        self.blocks = len(hashes) // HASH_BYTES
        self._positions: dict[bytes, int] | None = None

    def at(self, block: int) -> bytes:
        return self.hashes[HASH_BYTES * block : HASH_BYTES * block + HASH_BYTES]

    @property
    def positions(self) -> dict[bytes, int]:
        """Hash -> number of blocks up to and with it."""
        if self._positions is None:
            self._positions = dict(zip(_split(self.hashes), itertools.count(1), strict=False))
        return self._positions


class _Everywhere:
    """A group with blocks for every position: full, latent, indexer, compressed, draft."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes] = {}  # present block -> its parent, b"" at a root
        self.orphans = 0  # present blocks whose parent is absent; 0 = prefix-closed
        self._children: dict[bytes, int] = {}  # block, present or not -> its present children
        self._tiers: dict[str, set[bytes]] = {}

    def __contains__(self, block: bytes) -> bool:
        return block in self.parents

    def store(self, event: KVEvent) -> None:
        held = self._tiers.setdefault(event.tier, set())
        # Stores of lower tiers name blocks, not chains: without a parent they say nothing of order.
        chained = event.tier == DEVICE or bool(event.parent)
        parent = event.parent if chained else UNKNOWN
        for block in _split(event.hashes):
            known = self.parents.get(block)
            if known is None:
                self._link(block, parent)
            elif known is UNKNOWN and chained:
                self._unlink(block)
                self._link(block, parent)
            held.add(block)
            if chained:
                parent = block

    def remove(self, hashes: bytes, tier: str) -> None:
        held = self._tiers.get(tier)
        if held is None:
            return
        others = [blocks for name, blocks in self._tiers.items() if name != tier and blocks]
        for block in _split(hashes):
            if block not in held:
                continue
            held.remove(block)
            if not any(block in blocks for blocks in others):
                self._unlink(block)

    def clear(self, tier: str) -> None:
        self.remove(b"".join(self._tiers.get(tier, ())), tier)

    def last(self, chain: _Chain, limit: int) -> int:
        """Blocks of the chain, from its start and at most `limit`, that are present."""
        present, at = self.parents, chain.at
        if not limit or at(0) not in present:
            return 0
        if self.orphans:
            return next((i for i in range(limit) if at(i) not in present), limit)
        if at(limit - 1) in present:
            return limit
        low, high = 0, limit - 1  # present, absent
        while high - low > 1:
            middle = (low + high) // 2
            if at(middle) in present:
                low = middle
            else:
                high = middle
        return high

    def _link(self, block: bytes, parent: bytes) -> None:
        self.parents[block] = parent
        self._children[parent] = self._children.get(parent, 0) + 1
        self.orphans += bool(parent) and parent not in self.parents
        self.orphans -= self._children.get(block, 0)

    def _unlink(self, block: bytes) -> None:
        parent = self.parents.pop(block)
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]
        self.orphans -= bool(parent) and parent not in self.parents
        self.orphans += self._children.get(block, 0)


class _Somewhere:
    """A group that needs only some blocks: a window before the position, or a state at it."""

    def __init__(self, window: int) -> None:
        self.window = window  # blocks before a position that must be present; 0: a state, at it
        self._tiers: dict[str, set[bytes]] = {DEVICE: set()}

    def __contains__(self, block: bytes) -> bool:
        for held in self._tiers.values():  # noqa: SIM110 (a generator would double the cost)
            if block in held:
                return True
        return False

    def store(self, event: KVEvent) -> None:
        self._tiers.setdefault(event.tier, set()).update(_split(event.hashes))

    def remove(self, hashes: bytes, tier: str) -> None:
        if tier in self._tiers:
            self._tiers[tier].difference_update(_split(hashes))

    def clear(self, tier: str) -> None:
        self._tiers[tier] = set()

    def last(self, chain: _Chain, limit: int) -> int:
        """The longest position, in blocks and at most `limit`, at which the group holds."""
        if not self.window:
            positions = chain.positions
            found = (positions[b] for held in self._tiers.values() for b in positions.keys() & held)
            return max((p for p in found if p <= limit), default=0)
        position = block = limit
        while block > max(0, position - self.window):
            block -= 1
            if chain.at(block) not in self:
                position = block
        return position


class _Prediction:
    __slots__ = ("blocks", "expires", "hashes", "last")

    def __init__(self, hashes: bytes, expires: float) -> None:
        self.hashes = hashes
        self.blocks = len(hashes) // HASH_BYTES
        self.last = hashes[-HASH_BYTES:]
        self.expires = expires

    def common(self, chain: _Chain) -> int:
        """Blocks shared with a chain. Equal hashes at one block mean equal blocks before it."""
        low, high = 0, min(self.blocks, chain.blocks)
        while low < high:
            middle = (low + high + 1) // 2
            at = HASH_BYTES * (middle - 1)
            if self.hashes[at : at + HASH_BYTES] == chain.hashes[at : at + HASH_BYTES]:
                low = middle
            else:
                high = middle - 1
        return low


class _Engine:
    """What one (worker, dp_rank) holds, as of event `seq` of its `generation`."""

    def __init__(self, info: WorkerInfo) -> None:
        self.generation = info.generation
        self.seq = 0
        self.lost = False  # a batch is missing: the mirror is stale until a snapshot comes
        self.predictions: list[_Prediction] = []
        self._info = info
        self.clear()

    def clear(self) -> None:
        info = self._info
        self.groups: list[_Everywhere | _Somewhere] = []
        self._every: list[int] = []  # of the state groups: blocks between snapshots, 0 = at the end only
        for kind, window, every in zip(
            info.group_kinds, info.group_windows, info.snapshot_tokens, strict=True
        ):
            if kind == GroupKind.STATE.value:
                self.groups.append(_Somewhere(0))
                self._every.append(every // info.block_tokens)
            elif kind == GroupKind.WINDOW.value and window:
                self.groups.append(_Somewhere(-(-window // info.block_tokens)))
            else:
                self.groups.append(_Everywhere())
        self._whole = [g for g in self.groups if isinstance(g, _Everywhere)]
        self._partial = [g for g in self.groups if isinstance(g, _Somewhere)]

    def feed(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            if event.op == "cleared":
                for group in self.groups:
                    group.clear(event.tier)
            elif event.op == "stored":
                self.groups[event.group].store(event)
            elif event.op == "removed":
                self.groups[event.group].remove(event.hashes, event.tier)
        if self.predictions:
            witness = (self._whole or self.groups)[0]
            self.predictions = [p for p in self.predictions if p.last not in witness]

    def usable(self, chain: _Chain) -> int:
        """Blocks of the chain that every group can use."""
        position = chain.blocks
        for whole in self._whole:
            position = whole.last(chain, position)
        settled = not self._partial
        while position and not settled:
            before = position
            for partial in self._partial:
                position = partial.last(chain, position)
            settled = position == before
        return position

    def predicted(self, chain: _Chain, position: int, now: float) -> int:
        """At least `position`: blocks usable once the prompts on their way there have run."""
        if not self.predictions or position == chain.blocks:
            return position
        self.predictions = [p for p in self.predictions if p.expires > now]
        at = HASH_BYTES * position
        beyond = chain.at(position)  # what shares no more than `position` blocks cannot help
        for prediction in self.predictions:
            if prediction.hashes[at : at + HASH_BYTES] == beyond:
                position = max(position, self._after(prediction, chain))
        return position

    def _after(self, prediction: _Prediction, chain: _Chain) -> int:
        # A state is kept at the prompt's last block boundary and at its regular snapshots, nowhere else.
        if chain.at(prediction.blocks - 1) == prediction.last:
            return prediction.blocks
        if 0 in self._every:
            return 0
        shared = prediction.common(chain)
        while any(shared % every for every in self._every):
            shared = min(shared - shared % every for every in self._every)
        return shared


class MemoryIndex:
    """A `KVIndex` in this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._engines: dict[tuple[str, int], _Engine] = {}

    def join(self, info: WorkerInfo) -> None:
        self.leave(info.id)
        for rank in range(info.dp_ranks):
            self._engines[info.id, rank] = _Engine(info)

    def leave(self, worker: str) -> None:
        for key in [key for key in self._engines if key[0] == worker]:
            del self._engines[key]

    def apply(self, batch: EventBatch) -> bool:
        engine = self._engines.get((batch.worker, batch.dp_rank))
        if engine is None:
            return False
        if batch.generation != engine.generation:
            engine.clear()  # another life of the worker: what it held is gone
            engine.predictions = []
            engine.generation = batch.generation
            engine.lost = True
        if engine.lost:
            return False
        if batch.seq <= engine.seq:
            return True  # a snapshot held it already
        if batch.seq != engine.seq + 1:
            engine.lost = True
            return False
        engine.feed(batch.events)
        engine.seq = batch.seq
        return True

    def reset(self, worker: str, dp_rank: int, generation: str, seq: int, events: list[KVEvent]) -> None:
        engine = self._engines.get((worker, dp_rank))
        if engine is None:
            return  # it left while its snapshot was on the way
        if generation != engine.generation:
            engine.predictions = []
        engine.clear()
        engine.generation, engine.seq, engine.lost = generation, seq, False
        engine.feed(events)

    def predict(self, worker: str, dp_rank: int, hashes: bytes, ttl: float) -> None:
        engine = self._engines.get((worker, dp_rank))
        if engine is None or not hashes:
            return
        engine.predictions.append(_Prediction(hashes, self._clock.time() + ttl))
        del engine.predictions[:-MAX_PREDICTIONS]

    def overlaps(self, hashes: bytes, targets: list[tuple[str, int]]) -> list[int]:
        chain, now = _Chain(hashes), self._clock.time()
        out = []
        for target in targets:
            engine = self._engines.get(target)
            out.append(engine.predicted(chain, engine.usable(chain), now) if engine else 0)
        return out

    def close(self) -> None:
        self._engines.clear()


def _split(hashes: bytes) -> Iterator[bytes]:
    return itertools.chain.from_iterable(_BLOCK.iter_unpack(hashes))


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "kv_index",
            "memory",
            _build,
            summary="mirror of every worker's blocks in this process, fed by KV events",
        )
    ]


def _build(config: NoParameters, ctx: Context) -> MemoryIndex:
    return MemoryIndex(ctx.clock)
