"""Admission: slots, KV and transfers of sequences. The engine's side of the scheduler's view."""

from __future__ import annotations

from typing import Protocol

from bien.core.clock import Clock
from bien.core.errors import ContextLengthError, PluginFault
from bien.core.kv.cache import KVCache, Match, Missing, SequenceKV
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.prefix import usable_blocks
from bien.core.kv.store import KVStore, Transfer
from bien.core.plan import NewSequence, StateCopy
from bien.core.sequence import Sequence, Status
from bien.core.snapshots import Snapshots


class Owner(Protocol):
    """What admission needs of the engine."""

    clock: Clock
    launched: int  # number of the newest step begun
    settled: int  # and of the newest one ended

    def started(self, s: Sequence) -> None: ...
    def stopped(self, s: Sequence) -> None: ...
    def preempted(self) -> None: ...
    def chain(self, s: Sequence, blocks: int) -> bytes: ...


class _Load:
    """A sequence whose blocks are on their way from a lower tier.

    The blocks may have belonged to a sequence whose last step is still in flight and writes to them. Steps
    follow each other, transfers do not: they start once every step launched before has ended.
    """

    def __init__(self, blocks: int, missing: list[Missing], after: int) -> None:
        self.blocks = blocks
        self.missing = missing
        self.after = after  # the step to wait for
        self.transfers: list[Transfer] | None = None  # None: not begun

    def begin(self, store: KVStore) -> None:
        self.transfers = [store.load(m.group, m.hashes, m.blocks) for m in self.missing]

    def done(self) -> bool:
        return self.transfers is not None and all([t.done() for t in self.transfers])

    def idle(self) -> bool:
        """Whether no transfer writes to its blocks."""
        return self.transfers is None or self.done()

    def failed(self) -> bool:
        return any(t.failed() for t in self.transfers or ())


class Admission:
    """Implements `SchedulerView`."""

    def __init__(
        self,
        owner: Owner,
        cache: KVCache,
        groups: tuple[KVGroup, ...],
        slots: int,
        block_tokens: int,
        store: KVStore | None,
        snapshots: Snapshots,
        lookahead: int,
    ) -> None:
        """`lookahead`: positions beyond a plan that a device drafter writes when it can."""
        self._owner = owner
        self._cache = cache
        self._groups = groups
        self._block = block_tokens
        self._store = store
        self._snapshots = snapshots
        self._lookahead = lookahead
        self._states = [i for i, g in enumerate(groups) if g.kind is GroupKind.STATE]
        self._ordered = any(g.kind in (GroupKind.WINDOW, GroupKind.STATE) for g in groups)
        self._free = list(range(slots - 1, -1, -1))
        self._running = 0
        self._new: list[NewSequence] = []
        self._released: list[int] = []
        self._restores: list[StateCopy] = []
        self._dirty: dict[Sequence, None] = {}
        self._loads: dict[Sequence, _Load] = {}
        self._orphans: list[tuple[_Load, SequenceKV]] = []  # aborted while loading
        self._saves: list[tuple[Transfer, int, list[int]]] = []

    # -- the scheduler's view

    @property
    def now(self) -> float:
        return self._owner.clock.time()

    def admit(self, s: Sequence) -> bool:
        if s.status is not Status.WAITING:
            raise PluginFault(f"the scheduler admitted {s.id!r}, which is {s.status.name}, not WAITING")
        if not self._free or s.promised:  # promised: its last token is still in flight
            return False
        if not self._attach(s):
            return False
        s.slot = self._free.pop()
        self._running += 1
        if s not in self._loads:
            self._ready(s, s.computed // self._block)
        return True

    def chunk(self, s: Sequence, tokens: int) -> int:
        return self._snapshots.limit(s, tokens)

    def reserve(self, s: Sequence, tokens: int) -> bool:
        need = s.planned + tokens
        if need + self._lookahead <= s.reserved:
            return True
        if s.kv is None or s.status is not Status.RUNNING:
            raise PluginFault(f"the scheduler reserved KV for {s.id!r}, which is {s.status.name}")
        for more in (self._lookahead, 0):
            want = -(-(need + more) // self._block) * self._block
            if self._cache.reserve(s.kv, want):
                s.reserved = max(s.reserved, want)
                self._dirty[s] = None
                return True
        return False

    def preempt(self, s: Sequence) -> None:
        if s.status is not Status.RUNNING:
            raise PluginFault(f"the scheduler preempted {s.id!r}, which is {s.status.name}, not RUNNING")
        self._snapshots.keep(s)
        self.release(s)
        s.status = Status.WAITING
        s.epoch += 1
        s.computed = s.planned = s.reserved = s.committed = 0
        s.drafts = 0
        s.draft_tokens = []
        s.preemptions += 1
        self._owner.preempted()

    # -- the engine's side

    def check_size(self, tokens: int) -> None:
        """Refuse what can never fit, even alone."""
        for g, group in enumerate(self._groups):
            if not group.paged:
                continue
            total = sum(self._cache.usage(g))
            if self._blocks(group, tokens) > total:
                raise ContextLengthError(
                    f"the request needs KV for {tokens} tokens; pool {group.name!r} holds "
                    f"{total * self._block} (raise kv_tokens in the deployment, or shorten the request)",
                    field="max_tokens",
                )

    def poll(self) -> None:
        """Look after transfers; a failed load falls back to recompute."""
        if self._saves:
            self._poll_saves()
        if self._orphans:
            orphans, self._orphans = self._orphans, []
            for load, kv in orphans:
                if load.done():  # asked once: a transfer may end between two looks
                    self._cache.release(kv)
                else:
                    self._orphans.append((load, kv))
        for s, load in list(self._loads.items()):
            self._advance(load)
            if load.done():
                self._loaded(s, load)

    def save_committed(self) -> None:
        """Offer newly shared blocks to the store; they are pinned while they are copied."""
        for g, hashes, blocks in self._cache.take_committed():
            if self._store is None:
                continue
            transfer = self._store.save(g, hashes, blocks)
            if transfer is not None:
                self._cache.pin(g, blocks)
                self._saves.append((transfer, g, blocks))

    def steps_that_fit(self, sequences: list[Sequence], steps: int) -> int:
        """The largest number of decode steps <= `steps` that need no more blocks than there are.

        With WINDOW or STATE groups a jump also stays inside a block: there, blocks come and go, and
        snapshots are taken, in the order of single steps.
        """
        if self._ordered:
            inside = min(-s.planned % self._block for s in sequences)
            steps = min(steps, max(1, inside))
        rooms = [self._cache.available(g) for g, group in enumerate(self._groups) if group.paged]
        room = min(rooms, default=0)

        def need(n: int) -> int:
            # Twice: a committed block whose twin is cached holds on to that twin as well.
            size = self._block
            new = sum(max(0, -(-(s.planned + n - 1) // size) - s.reserved // size) for s in sequences)
            return 2 * new + len(sequences)

        if need(steps) <= room:
            return steps
        low, high = 1, steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if need(middle) <= room else (low, middle)
        return low

    def cover(self, s: Sequence, tokens: int) -> None:
        """A jump has computed positions < tokens: book their blocks."""
        if tokens > s.reserved:
            assert s.kv is not None
            want = -(-tokens // self._block) * self._block
            fits = self._cache.reserve(s.kv, want)
            assert fits, "a jump ran over its blocks"
            s.reserved = want
            self._dirty[s] = None

    def release(self, s: Sequence) -> None:
        """Take slot and KV back, in whatever state they are."""
        load = self._loads.pop(s, None)
        if s.kv is not None:
            if load is not None and not load.idle():
                self._orphans.append((load, s.kv))
            else:
                self._cache.release(s.kv)
            s.kv = None
        self._dirty.pop(s, None)
        if s.slot < 0:
            return
        if any(n.slot == s.slot for n in self._new):
            self._new = [n for n in self._new if n.slot != s.slot]
            self._restores = [r for r in self._restores if r.slot != s.slot]
        elif load is None:
            self._released.append(s.slot)
        self._free.append(s.slot)
        self._running -= 1
        s.slot = -1
        if load is None:
            self._owner.stopped(s)

    def drain(self) -> None:
        """Before closing: let go of transfers that will not be waited for."""
        for load, kv in self._orphans:
            self._cache.release(kv)
        self._orphans.clear()
        for _, g, blocks in self._saves:
            self._cache.unpin(g, blocks)
        self._saves.clear()

    @property
    def loading(self) -> bool:
        return bool(self._loads or self._orphans)

    @property
    def zombies(self) -> list[SequenceKV]:
        return [kv for _, kv in self._orphans]

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take_new(self) -> list[NewSequence]:
        out, self._new = self._new, []
        return out

    def take_released(self) -> list[int]:
        out, self._released = self._released, []
        return out

    def take_restores(self) -> list[StateCopy]:
        out, self._restores = self._restores, []
        return out

    def take_dirty(self) -> list[Sequence]:
        out, self._dirty = list(self._dirty), {}
        return out

    # -- parts of admit

    def _attach(self, s: Sequence) -> bool:
        limit = (s.length - 1) // self._block  # at least one token must be computed
        hashes = self._owner.chain(s, limit)
        match = self._cache.match(hashes)
        wanted = self._stored(hashes, match) if self._store and not s.skip_store else match.blocks
        opened = self._cache.attach(hashes, match, wanted)
        if opened is None and wanted > match.blocks:
            wanted = match.blocks
            opened = self._cache.attach(hashes, match, wanted)
        if opened is None:
            return False
        kv, missing = opened
        if self._running and not self._room(s.length, wanted):
            # Let it wait rather than preempt those that run: they would take turns evicting each other.
            self._cache.release(kv)
            return False
        s.kv = kv
        s.computed = wanted * self._block
        if missing:
            s.status = Status.LOADING
            self._loads[s] = load = _Load(wanted, missing, self._owner.launched)
            self._advance(load)
        return True

    def _room(self, tokens: int, attached: int) -> bool:
        """Whether the rest of a content of `tokens` fits beside what others hold now."""
        for g, group in enumerate(self._groups):
            if group.paged:
                need = self._blocks(group, tokens) - self._blocks(group, attached * self._block)
                if need > self._cache.available(g):
                    return False
        return True

    def _blocks(self, group: KVGroup, tokens: int) -> int:
        span = min(tokens, group.window + 2 * self._block) if group.window else tokens
        return -(-span // self._block)

    def _stored(self, hashes: bytes, match: Match) -> int:
        assert self._store is not None
        present = []
        for g in range(len(self._groups)):
            here = match.present[g].copy()
            lacking = [i for i in range(len(here)) if not here[i]]
            if lacking:
                first = lacking[0]
                there = self._store.lookup(g, hashes[first * HASH_BYTES :])
                for i in lacking:
                    here[i] = there[i - first]
            present.append(here)
        return usable_blocks(self._groups, present)

    def _ready(self, s: Sequence, blocks: int) -> None:
        assert s.kv is not None
        s.status = Status.RUNNING
        s.computed = s.planned = s.reserved = blocks * self._block
        s.committed = blocks
        if s.first_token < 0 and s.preemptions == 0:
            s.cached = s.computed
        request = s.request
        self._new.append(
            NewSequence(
                slot=s.slot,
                tokens=s.content.prompt(),
                prompt_tokens=s.prompt_tokens,
                sampling=request.sampling,
                seed=s.seed,
                forced=request.forced,
            )
        )
        for g in self._states:
            source, live = self._cache.restore(s.kv, g)
            self._restores.append(StateCopy(g, s.slot, s.computed, source, live))
        self._dirty[s] = None
        self._owner.started(s)

    def _loaded(self, s: Sequence, load: _Load) -> None:
        assert s.kv is not None
        if load.failed():
            self._cache.release(s.kv)
            s.kv = None
            s.skip_store = True
            del self._loads[s]
            if self._attach(s):
                self._ready(s, s.computed // self._block)
            else:  # memory is short for a moment: stay LOADING and try again at the next poll
                self._loads[s] = load
                s.kv, _ = self._empty()
            return
        del self._loads[s]
        hashes = self._owner.chain(s, load.blocks)
        self._cache.commit(s.kv, hashes, load.blocks * self._block)
        self._ready(s, load.blocks)

    def _advance(self, load: _Load) -> None:
        if load.transfers is None and self._owner.settled >= load.after:
            assert self._store is not None
            load.begin(self._store)

    def _empty(self) -> tuple[SequenceKV, list[Missing]]:
        opened = self._cache.attach(b"", self._cache.match(b""), 0)
        assert opened is not None
        return opened

    def _poll_saves(self) -> None:
        rest = []
        for transfer, g, blocks in self._saves:
            if transfer.done():
                self._cache.unpin(g, blocks)
            else:
                rest.append((transfer, g, blocks))
        self._saves = rest
