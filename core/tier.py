"""The engine's side of a lower KV tier: loads at admission, saves after commit, and what they hold."""

from __future__ import annotations

from bien.core.clock import Clock
from bien.core.guarded import GuardedStore
from bien.core.kv.cache import KVCache, Match, Missing, SequenceKV
from bien.core.kv.groups import KVGroup
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.prefix import usable_blocks
from bien.core.kv.store import Transfer
from bien.core.sequence import Sequence

PATIENCE = 30.0  # seconds that a transfer may take before its store is given up


class Load:
    """A sequence whose blocks are on their way from a lower tier.

    The blocks may have belonged to a sequence whose last step is still in flight and writes to them. Steps
    follow each other, transfers do not: they start once every step launched before has ended.
    """

    def __init__(self, blocks: int, missing: list[Missing], after: int) -> None:
        self.blocks = blocks
        self.missing = missing
        self.after = after  # the step to wait for
        self.transfers: list[Transfer] | None = None  # None: not begun
        self.began = 0.0  # clock seconds
        self.lost = False  # it took too long; its transfers may write to its blocks for ever

    def done(self) -> bool:
        return self.transfers is not None and all(t.done() for t in self.transfers)

    def idle(self) -> bool:
        """Whether no transfer writes to its blocks."""
        return self.transfers is None or self.done()

    def failed(self) -> bool:
        return self.lost or any(t.failed() for t in self.transfers or ())


class Tier:
    """Works without a store too: then nothing is ever found or saved.

    A store whose transfer does not end in time is given up. What that transfer holds stays held: it may
    still write.
    """

    def __init__(
        self, store: GuardedStore | None, cache: KVCache, groups: tuple[KVGroup, ...], clock: Clock
    ) -> None:
        self._store = store
        self._clock = clock
        self._cache = cache
        self._cache.log.saved = store is not None
        self._groups = groups
        self._loads: dict[Sequence, Load] = {}
        self._orphans: list[tuple[Load, SequenceKV]] = []  # aborted while loading
        self._saves: list[tuple[Transfer, int, list[int], float]] = []  # the last: when it began

    def usable(self, hashes: bytes, match: Match, skip: bool) -> int:
        """Blocks of the chain that device and store hold together."""
        if self._store is None or skip:
            return match.blocks
        present = []
        for g in range(len(self._groups)):
            here = match.present[g].copy()
            lacking = (~here).nonzero()[0].tolist()
            if lacking:
                first = lacking[0]
                there = self._store.lookup(g, hashes[first * HASH_BYTES :])
                for i in lacking:
                    here[i] = there[i - first]
            present.append(here)
        return usable_blocks(self._groups, present)

    def load(self, s: Sequence, blocks: int, missing: list[Missing], after: int) -> None:
        """`s` waits for these blocks; transfers begin once step `after` has ended."""
        self._loads[s] = Load(blocks, missing, after)

    def advance(self, settled: int) -> list[tuple[Sequence, Load]]:
        """Begin the loads that may begin now; those that have ended are handed over."""
        ended: list[tuple[Sequence, Load]] = []
        if not self._loads:
            return ended
        for s, load in list(self._loads.items()):
            if load.transfers is None and settled >= load.after:
                assert self._store is not None
                load.transfers = [self._store.load(m.group, m.hashes, m.blocks) for m in load.missing]
                load.began = self._clock.time()
            if load.done():
                ended.append((s, load))
            elif load.transfers is not None and self._late("load", load.began):
                load.lost = True
                ended.append((s, load))
        for s, _ in ended:
            del self._loads[s]
        return ended

    def again(self, s: Sequence, load: Load) -> None:
        """Hand an ended load over once more at the next look."""
        self._loads[s] = load

    def drop(self, s: Sequence, kv: SequenceKV) -> bool:
        """Let go of `kv`, at once or when its load has ended. Whether it was loading."""
        load = self._loads.pop(s, None)
        self.let_go(load, kv)
        return load is not None

    def let_go(self, load: Load | None, kv: SequenceKV) -> None:
        """Release `kv` once nothing writes to it any more."""
        if load is not None and not load.idle():
            self._orphans.append((load, kv))
        else:
            self._cache.release(kv)

    def poll(self) -> None:
        """Let go of what ended transfers held."""
        if self._saves:
            saves, self._saves = self._saves, []
            for save in saves:
                transfer, g, blocks, began = save
                if transfer.done():
                    self._cache.unpin(g, blocks)
                else:
                    self._saves.append(save)
                    self._late("save", began)
        if self._orphans:
            orphans, self._orphans = self._orphans, []
            for load, kv in orphans:
                if load.done():  # asked once: a transfer may end between two looks
                    self._cache.release(kv)
                else:
                    self._orphans.append((load, kv))

    def save_committed(self) -> None:
        """Offer newly shared blocks to the store; they are pinned while they are copied."""
        if self._store is None:
            return
        for g, hashes, blocks in self._cache.take_committed():
            transfer = self._store.save(g, hashes, blocks)
            if transfer is not None:
                self._cache.pin(g, blocks)
                self._saves.append((transfer, g, blocks, self._clock.time()))

    def drain(self) -> None:
        """Before closing: let go of transfers that will not be waited for."""
        for _, kv in self._orphans:
            self._cache.release(kv)
        self._orphans.clear()
        for _, g, blocks, _ in self._saves:
            self._cache.unpin(g, blocks)
        self._saves.clear()

    @property
    def present(self) -> bool:
        """Whether there is a store."""
        return self._store is not None and not self._store.broken

    @property
    def busy(self) -> bool:
        """Whether something loads."""
        if not self._loads and not self._orphans:
            return False
        return bool(self._loads) or any(not load.lost for load, _ in self._orphans)

    @property
    def saving(self) -> bool:
        """Whether saves pin blocks, and will let them go."""
        return bool(self._saves) and self._store is not None and not self._store.broken

    @property
    def held(self) -> list[SequenceKV]:
        """KV of sequences that are gone while their loads run."""
        return [kv for _, kv in self._orphans]

    def _late(self, what: str, began: float) -> bool:
        assert self._store is not None
        if not self._store.broken and self._clock.time() - began <= PATIENCE:
            return False
        self._store.give_up(f"a {what} has not ended after {PATIENCE:g} s")
        return True
