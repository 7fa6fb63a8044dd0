"""Admission: slots, KV and transfers of sequences. The engine's side of the scheduler's view."""

from __future__ import annotations

from typing import Protocol

import msgspec

from bien.core.clock import Clock
from bien.core.errors import ContextLengthError, PluginFault
from bien.core.kv.cache import KVCache
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.plan import NewSequence, StateCopy
from bien.core.request import SamplingParams
from bien.core.sequence import Sequence, Status
from bien.core.snapshots import Snapshots
from bien.core.speculation.draft import Draft
from bien.core.tier import Load, Tier


class Owner(Protocol):
    """What admission needs of the engine."""

    clock: Clock
    launched: int  # number of the newest step begun
    settled: int  # and of the newest one ended

    def started(self, s: Sequence) -> None: ...
    def stopped(self, s: Sequence) -> None: ...
    def preempted(self) -> None: ...
    def chain(self, s: Sequence, blocks: int) -> bytes: ...


class Admission:
    """Implements `SchedulerView`."""

    def __init__(
        self,
        owner: Owner,
        cache: KVCache,
        groups: tuple[KVGroup, ...],
        slots: int,
        block_tokens: int,
        tier: Tier,
        snapshots: Snapshots,
        lookahead: int,
        eos: tuple[int, ...] = (),
    ) -> None:
        """`lookahead`: positions beyond a plan that a device drafter writes when it can."""
        self._owner = owner
        self._cache = cache
        self._groups = groups
        self._block = block_tokens
        self._tier = tier
        self._snapshots = snapshots
        self._lookahead = lookahead
        self._eos = eos
        self._states = [i for i, g in enumerate(groups) if g.kind is GroupKind.STATE]
        self._ordered = any(g.kind in (GroupKind.WINDOW, GroupKind.STATE) for g in groups)
        self._paged = [i for i, g in enumerate(groups) if g.paged]
        self._windows = [i for i, g in enumerate(groups) if g.paged and g.window]
        self._free = list(range(slots - 1, -1, -1))
        self._running = 0
        self._new: list[NewSequence] = []
        self._released: list[int] = []
        self._restores: list[StateCopy] = []
        self._dirty: dict[Sequence, None] = {}

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
        if not s.loading:
            self._ready(s, s.computed // self._block)
        return True

    def chunk(self, s: Sequence, tokens: int) -> int:
        if not self._states and not self._windows:
            return tokens
        return self._snapshots.limit(s, self._fitting(s, tokens))

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
        s.drafts = s.ready = 0
        s.draft = Draft()
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

    def room(self, s: Sequence) -> int:
        """Positions beyond `planned` for which windows have blocks even while nothing more leaves them."""
        ends = ((s.kv.first[g] + sum(self._cache.usage(g))) * self._block for g in self._windows if s.kv)
        return max(0, min(ends, default=1 << 62) - s.planned)

    def poll(self) -> None:
        """Look after transfers; a failed load falls back to recompute."""
        self._tier.poll()
        for s, load in self._tier.advance(self._owner.settled):
            self._loaded(s, load)

    def steps_that_fit(self, sequences: list[Sequence], steps: int, waiting: bool) -> int:
        """The largest number of decode steps <= `steps` that need no more blocks than there are.

        With WINDOW or STATE groups they stay inside a block where the next plan may be another one once a
        block is full: blocks that come free, and snapshots that go, may let in who waits. So they do where
        there is a store, to which blocks go as soon as they are full.
        """
        if self._ordered and (self._tier.present or (waiting and self._free)):
            steps = min(steps, max(1, min(-s.planned % self._block for s in sequences)))
        room = min(map(self._cache.available, self._paged), default=0)
        if self._need(sequences, steps) <= room:
            return steps
        low, high = 1, steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._need(sequences, middle) <= room else (low, middle)
        return low

    def in_order(self, sequences: list[Sequence], steps: int) -> bool:
        """Whether so many decode steps must be booked one after the other: in WINDOW and STATE groups blocks
        come and go, and snapshots are taken; elsewhere only the order of eviction could change, where blocks
        are evicted while commits meet cached blocks."""
        if self._ordered:
            return True
        free = min((self._cache.usage(g)[2] for g in self._paged), default=0)
        if self._need(sequences, steps) <= free:
            return False
        return any(s.kv is not None and self._cache.meets_cached(s.kv) for s in sequences)

    def _need(self, sequences: list[Sequence], steps: int) -> int:
        # Twice: a committed block whose twin is cached holds on to that twin as well.
        size, new = self._block, 0
        for s in sequences:
            more = -(-(s.planned + steps - 1) // size) - s.reserved // size
            if more > 0:
                new += more
        return 2 * new + len(sequences)

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
        loading = False
        if s.kv is not None:
            loading = self._tier.drop(s, s.kv)
            s.kv = None
        self._dirty.pop(s, None)
        if s.slot < 0:
            return
        if any(n.slot == s.slot for n in self._new):
            self._new = [n for n in self._new if n.slot != s.slot]
            self._restores = [r for r in self._restores if r.slot != s.slot]
        elif not loading:
            self._released.append(s.slot)
        self._free.append(s.slot)
        self._running -= 1
        s.slot = -1
        if not loading:
            self._owner.stopped(s)

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

    def _fitting(self, s: Sequence, tokens: int) -> int:
        """Of `tokens`, as many as windows have blocks for now. Without a single one: as many as they have
        when nobody else runs, for which others may have to go; 0 when its own steps in flight must end."""
        if s.kv is None or not self._windows or s.planned + tokens <= s.reserved:
            return tokens
        free = min(self._cache.available(g) for g in self._windows)
        now = s.kv.capacity + free * self._block - s.planned
        return min(tokens, now if now > 0 else self.room(s))

    # -- parts of admit

    def _attach(self, s: Sequence) -> bool:
        limit = (s.length - 1) // self._block  # at least one token must be computed
        if s.unscored:  # what a cache holds has no logits
            limit = s.scored // self._block
        hashes = self._owner.chain(s, limit)
        match = self._cache.match(hashes)
        wanted = self._tier.usable(hashes, match, s.skip_store)
        opened = self._cache.attach(hashes, match, wanted)
        if opened is None and self._tier.saving:
            return False  # pins end soon: to wait is cheaper than to recompute what the tier holds
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
            self._tier.load(s, wanted, missing, self._owner.launched)
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

    def _ends(self, sampling: SamplingParams) -> tuple[int, ...]:
        return sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos)

    def _ready(self, s: Sequence, blocks: int) -> None:
        assert s.kv is not None
        s.status = Status.RUNNING
        s.computed = s.planned = s.reserved = blocks * self._block
        s.committed = blocks
        if s.first_token < 0 and s.preemptions == 0:
            s.cached = s.computed
        request, sampling = s.request, s.request.sampling
        if sampling.prompt_logprobs >= 0 and not s.unscored:  # known since before a preemption
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        self._new.append(
            NewSequence(
                slot=s.slot,
                tokens=s.content.prompt(),
                prompt_tokens=s.prompt_tokens,
                sampling=sampling,
                seed=s.seed,
                forced=request.forced,
                max_drafts=s.max_drafts,
                ends=self._ends(request.sampling),
            )
        )
        for g in self._states:
            source, live = self._cache.restore(s.kv, g)
            self._restores.append(StateCopy(g, s.slot, s.computed, source, live))
        self._dirty[s] = None
        self._owner.started(s)

    def _loaded(self, s: Sequence, load: Load) -> None:
        assert s.kv is not None
        if not load.failed():
            self._cache.commit(s.kv, self._owner.chain(s, load.blocks), load.blocks * self._block)
            self._ready(s, load.blocks)
            return
        s.skip_store = True
        self._tier.let_go(load, s.kv)
        s.kv = None
        if self._attach(s):
            self._ready(s, s.computed // self._block)
            return
        # Memory is short for a moment: stay LOADING, with nothing held, and try again.
        opened = self._cache.attach(b"", self._cache.match(b""), 0)
        assert opened is not None
        s.kv = opened[0]
        self._tier.again(s, load)
