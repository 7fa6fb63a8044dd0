"""The engine: a synchronous state machine. `submit`, `abort`, `begin() -> plan`, `finish(result)`.

No I/O, no thread, no waiting. Two drivers call it: an engine thread in a worker process, and a coroutine
on a virtual clock. It is safe to call `begin` again before `finish` (overlap): the next plan then counts
on tokens that are promised but unknown; results arrive in the order of the plans.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from bien.core.admission import Admission
from bien.core.clock import Clock
from bien.core.content import TokenContent, content_of
from bien.core.errors import BienError, ContextLengthError, PluginFault, UserError
from bien.core.flight import Flight, FlightItem
from bien.core.guarded import GuardedSpeculator, GuardedStore
from bien.core.kv.cache import KVCache
from bien.core.kv.events import KVEvent
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.kv.hashing import HASH_BYTES, continue_chain, extend_chain, root_hash
from bien.core.kv.store import KVStore
from bien.core.plan import ExecutorPlan, NewSequence, StepPlan, StepResult, TableUpdate, i32
from bien.core.request import GenerateRequest
from bien.core.scheduler import Scheduler
from bien.core.sequence import Sequence, Status
from bien.core.snapshots import Snapshots
from bien.core.speculation.speculator import HostSpeculator
from bien.core.tier import Tier
from bien.core.worker.messages import WorkerStats


@dataclass(slots=True)
class SequenceOutput:
    """What one request gained in a step."""

    id: str
    count: int
    tokens: bytes  # uint32-LE ids, empty in simulation
    finish: str | None = None
    cached: int = -1  # set on the first output
    drafted: int = 0  # totals, set on the last output
    accepted: int = 0
    rounds: int = 0
    error: str = ""
    error_code: str = ""  # of the BienError's class, with finish "error"


@dataclass(slots=True)
class StepReport:
    """What a step changed, for gateways and index."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    events: list[KVEvent] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.outputs or self.events)


@dataclass(slots=True, frozen=True)
class EngineLimits:
    """What the engine needs to know of model and pool."""

    slots: int
    max_context: int
    block_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    device_drafts: int = 0  # drafts per round of a device drafter, 0 = none
    vocab_size: int = 1 << 32


class Engine:
    """Owns sequences, their KV and the steps in flight; asks the scheduler what to compute next."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: KVCache,
        groups: tuple[KVGroup, ...],
        limits: EngineLimits,
        clock: Clock,
        speculator: HostSpeculator | None = None,
        store: KVStore | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.limits = limits
        self.groups = groups
        self.cache = cache
        self.clock = clock
        self._scheduler = scheduler
        self._speculator = speculator and GuardedSpeculator(speculator, limits.vocab_size)
        self._store = store and GuardedStore(store)
        self._rng = rng or random.Random()
        self._drafting = speculator is not None or limits.device_drafts > 0
        self._sequences: dict[str, Sequence] = {}
        self._flights: deque[Flight] = deque()
        self._report = StepReport()  # what arises outside a step, until the next report
        self._stats = WorkerStats()
        self.launched = self.settled = 0
        self._order = 0
        self._windows = any(g.kind is GroupKind.WINDOW for g in groups)
        self._snapshots = Snapshots(cache, groups, limits.block_tokens)
        self._tier = Tier(self._store, cache, groups)
        self._admission = Admission(
            self,
            cache,
            groups,
            limits.slots,
            limits.block_tokens,
            self._tier,
            self._snapshots,
            limits.device_drafts,
        )

    # -- requests

    def submit(self, request: GenerateRequest) -> None:
        """Accept a request. UserError / ContextLengthError when it can never run; duplicate ids too."""
        if request.id in self._sequences:
            raise UserError(f"request id {request.id!r} is already running", field="id")
        prompt, limit = request.prompt_tokens, request.sampling.max_tokens
        if prompt < 1 or limit < 1:
            raise UserError(
                f"prompt has {prompt} tokens and max_tokens is {limit}; both must be at least 1",
                field="prompt" if prompt < 1 else "max_tokens",
            )
        if prompt + limit > self.limits.max_context:
            raise ContextLengthError(
                f"prompt of {prompt} tokens plus max_tokens {limit} exceeds the context window of "
                f"{self.limits.max_context} tokens; valid: at most "
                f"{max(0, self.limits.max_context - prompt)} output tokens",
                field="max_tokens",
            )
        self._admission.check_size(prompt + limit)
        seed = request.sampling.seed
        sequence = Sequence(
            id=request.id,
            request=request,
            arrival=self.clock.time(),
            order=self._order,
            seed=self._rng.getrandbits(64) if seed is None else seed & ((1 << 64) - 1),
            content=content_of(request.prompt, request.forced, request.id),
            length=prompt,
            hashes=self._prompt_chain(request),
        )
        self._order += 1
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence)

    def abort(self, id: str) -> None:
        """Drop a request; unknown or finished ids are ignored. No output follows."""
        sequence = self._sequences.get(id)
        if sequence is not None:
            self._end(sequence, "abort")

    # -- steps

    def begin(self) -> ExecutorPlan | None:
        """Plan a step. None: nothing to compute now (idle, or all wait for loads or steps in flight)."""
        self._admission.poll()
        if not self._sequences:
            return None
        before = self._stats.preemptions
        try:
            plan = self._scheduler.plan(self._admission)
            if not plan.items and self._stats.preemptions > before:
                plan = self._scheduler.plan(self._admission)  # a lone victim may come back at once
            self._check(plan)
        except Exception as error:
            if not isinstance(error, PluginFault):
                error = PluginFault(f"scheduler {type(self._scheduler).__name__} failed: {error!r}")
            self._end_all(error)
            return None
        if not plan.items:
            return None
        return self._launch(plan)

    def finish(self, result: StepResult) -> StepReport:
        """Commit the oldest step in flight."""
        return self.finish_many(result, 1)

    def finish_many(self, result: StepResult, steps: int) -> StepReport:
        """Commit the oldest step in flight and `steps` - 1 repetitions of it (see `jumpable`)."""
        flight = self._flights.popleft()
        assert flight.step == result.step, f"result of step {result.step}, expected {flight.step}"
        assert steps == 1 or not self._flights, "a jump cannot overlap"
        self.settled = flight.step
        report, self._report = self._report, StepReport()
        ids = None if result.tokens is None else result.tokens.astype("<u4", copy=False)
        accepted = result.accepted.tolist()
        proposed = None if result.proposed is None else result.proposed.tolist()
        if steps > 1:  # before any of them ends and gives blocks back, as step by step
            for item in flight.items:
                if item.sequence.status is not Status.FINISHED:
                    self._admission.cover(item.sequence, item.start + item.count + steps - 1)
        at = 0
        for i, item in enumerate(flight.items):
            gained = accepted[i]
            tokens = b"" if ids is None else ids[at : at + gained].tobytes()
            at += gained
            drafts = proposed[i] if proposed else 0
            self._settle(item, gained, steps, tokens, drafts, report)
        self._stats.steps += steps
        self._stats.computed_tokens += flight.tokens * steps
        self._stats.busy_seconds += result.seconds * steps
        self._scheduler.note(result.seconds * steps, flight.tokens * steps)
        self._tier.save_committed()
        report.events += self.cache.take_events()
        self._tier_events(report)
        return report

    def jumpable(self) -> int:
        """How many steps, the one in flight included, repeat exactly unless something arrives: 1 when the
        scheduler is not stationary, a sequence loads, or blocks run short."""
        if len(self._flights) != 1 or not self._scheduler.stationary or self.loading:
            return 1
        steps = 1 << 30
        for item in self._flights[0].items:
            if item.count != 1 or not item.samples or item.sequence.finish is not None:
                return 1
            if item.sequence.content.ids_known:  # its tokens can stop it at any step
                return 1
            steps = min(steps, item.sequence.remaining + 1)
        return self._admission.steps_that_fit([i.sequence for i in self._flights[0].items], steps)

    def fail(self, step: int, error: BaseException) -> StepReport:
        """The oldest step in flight failed: end its sequences with finish "error", free everything."""
        flight = self._flights.popleft()
        assert flight.step == step, f"failure of step {step}, expected {flight.step}"
        self.settled = step
        for item in flight.items:
            self._error(item.sequence, error, "step failed: ")
        return self.flush()

    def flush(self) -> StepReport:
        """Outputs and events that arose outside a step (errors at admission, aborts, loads)."""
        report, self._report = self._report, StepReport()
        report.events += self.cache.take_events()
        self._tier_events(report)
        return report

    # -- state

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished (False: the driver may wait for its inbox)."""
        return bool(self._sequences or self._flights)

    @property
    def loading(self) -> bool:
        """Whether a transfer runs: with `begin()` None, poll again in about a millisecond."""
        return self._tier.busy

    @property
    def in_flight(self) -> int:
        """Steps begun and not finished."""
        return len(self._flights)

    def stats(self) -> WorkerStats:
        """Load and cumulative counts, as of now."""
        running = waiting = queued = 0
        for s in self._sequences.values():
            if s.status is Status.RUNNING:
                running += 1
            else:
                waiting += 1
            rest = s.prompt_tokens - s.planned
            if rest > 0:
                queued += rest
        used, cached, free = self.cache.usage(0)
        stats = self._stats
        stats.running, stats.waiting, stats.queued_tokens = running, waiting, queued
        stats.used_blocks, stats.cached_blocks, stats.total_blocks = used, cached, used + cached + free
        stats.store_bytes = self._store.usage[0] if self._store else 0
        return stats

    def snapshot(self) -> list[KVEvent]:
        """All cached blocks as "stored" events."""
        return self.cache.snapshot()

    def check_integrity(self) -> None:
        """AssertionError unless free + cached + referenced = total in every pool, with nothing held by
        sequences that are gone."""
        live = [s.kv for s in self._sequences.values() if s.kv is not None]
        self.cache.check_integrity(live + self._tier.held)
        slots = [s.slot for s in self._sequences.values() if s.slot >= 0]
        assert len(set(slots)) == len(slots), f"a slot is held twice: {sorted(slots)}"
        assert len(slots) + self._admission.free_slots == self.limits.slots, "a slot is lost"

    def close(self) -> None:
        for sequence in list(self._sequences.values()):
            self._end(sequence, "abort")
        self._tier.drain()
        self._scheduler.close()
        if self._speculator:
            self._speculator.close()
        if self._store:
            self._store.close()

    # -- begin

    def _check(self, plan: StepPlan) -> None:
        name = type(self._scheduler).__name__
        seen: set[int] = set()
        for item in plan.items:
            s = item.sequence
            if s.status is not Status.RUNNING or self._sequences.get(s.id) is not s:
                raise PluginFault(f"scheduler {name} planned {s.id!r}, which is {s.status.name}, not RUNNING")
            if id(s) in seen:
                raise PluginFault(f"scheduler {name} planned {s.id!r} twice in one step")
            seen.add(id(s))
            new = item.tokens - item.drafts
            if not 1 <= new <= s.pending or not 0 <= item.drafts <= s.drafts:
                raise PluginFault(
                    f"scheduler {name} planned {item.tokens} tokens with {item.drafts} drafts for {s.id!r}; "
                    f"valid: 1..{s.pending} tokens, 0..{s.drafts} drafts"
                )
            if item.drafts and new != s.pending:
                raise PluginFault(f"scheduler {name} planned drafts behind an unfinished chunk of {s.id!r}")
            if s.reserved < s.planned + item.tokens:
                raise PluginFault(f"scheduler {name} planned {s.id!r} without reserving {item.tokens} tokens")

    def _launch(self, plan: StepPlan) -> ExecutorPlan:
        self.launched += 1
        items: list[FlightItem] = []
        slots, starts, counts, drafts, samples, hosted = [], [], [], [], [], []
        for item in plan.items:
            s = item.sequence
            new = item.tokens - item.drafts
            sampling = new == s.pending
            slots.append(s.slot)
            starts.append(s.planned)
            counts.append(item.tokens)
            drafts.append(item.drafts)
            samples.append(int(sampling))
            if item.drafts and self._speculator is not None:
                hosted += s.draft_tokens[: item.drafts]
            items.append(FlightItem(s, s.epoch, s.planned, item.tokens, item.drafts, sampling))
            s.planned += item.tokens
            if sampling:
                s.promised += 1
                # A drafter needs the confirmed token: such a sequence waits for its step to end.
                s.syncs = item.drafts > 0 or (self._drafting and s.request.sampling.speculate)
            s.drafts = 0
        restores = self._admission.take_restores()
        snapshots = self._snapshots.plan(items)
        flight = Flight(self.launched, items, sum(counts))
        self._flights.append(flight)
        return ExecutorPlan(
            step=self.launched,
            slots=i32(slots),
            starts=i32(starts),
            counts=i32(counts),
            drafts=i32(drafts),
            samples=i32(samples),
            new=self._entering(),
            released=i32(self._admission.take_released()),
            tables=self._tables(),
            restores=restores,
            snapshots=snapshots,
            draft_tokens=i32(hosted),
            device_drafts=self.limits.device_drafts > 0,
        )

    def _entering(self) -> list[NewSequence]:
        new = self._admission.take_new()
        for n in new:
            n.max_drafts = self.limits.device_drafts if n.sampling.speculate else 0
        return new

    def _tables(self) -> list[TableUpdate]:
        dirty = [(s.slot, s.kv) for s in self._admission.take_dirty() if s.kv is not None and s.slot >= 0]
        out = []
        for g in range(len(self.groups)):
            parts = [(slot, *kv.take_update_arrays(g)) for slot, kv in dirty]
            parts = [p for p in parts if len(p[1])]
            if not parts:
                out.append(TableUpdate(i32(), i32(), i32()))
                continue
            slots = np.concatenate([np.full(len(index), slot, np.int32) for slot, index, _ in parts])
            index = np.concatenate([p[1] for p in parts]).astype(np.int32, copy=False)
            blocks = np.concatenate([p[2] for p in parts]).astype(np.int32, copy=False)
            out.append(TableUpdate(slots, index, blocks))
        return out

    # -- finish

    def _settle(
        self, item: FlightItem, gained: int, steps: int, tokens: bytes, proposed: int, report: StepReport
    ) -> None:
        s = item.sequence
        if s.status is Status.FINISHED:  # stopped or aborted while this step was in flight
            return
        if item.samples:
            s.promised -= 1
            s.syncs = False
        current = item.epoch == s.epoch
        computed = item.start + item.count - item.drafts + max(0, gained - 1) + (steps - 1)
        count = gained * steps
        finish = None
        if count:
            count, tokens, finish = self._append(s, count, tokens)
        if current:
            s.computed = min(computed, s.length)
            if item.drafts or steps > 1:
                s.planned = s.computed
            self._commit(s)
            self._snapshots.settle(item, s)
        if item.drafts:
            s.rounds += 1
            s.drafted += item.drafts
            s.accepted += gained - 1
            self._stats.rounds += 1
            self._stats.drafted += item.drafts
            self._stats.accepted += gained - 1
            if self._speculator is not None:
                self._speculator.observe(s.id, item.drafts, gained - 1)
        if count:
            self._output(s, count, tokens, finish, report)
        if finish is None and item.samples and current:
            self._draft(s, proposed)

    def _append(self, s: Sequence, count: int, tokens: bytes) -> tuple[int, bytes, str | None]:
        """Confirm tokens; cut behind a stop token. Returns what was gained, and why it ended, if it did."""
        finish = None
        sampling = s.request.sampling
        if tokens and (sampling.stop_token_ids or not sampling.ignore_eos):
            eos = () if sampling.ignore_eos else self.limits.eos_token_ids
            for i, token in enumerate(memoryview(tokens).cast("I")):
                made = s.output_tokens + i + 1
                if made >= sampling.min_tokens and (token in eos or token in sampling.stop_token_ids):
                    count, tokens, finish = i + 1, tokens[: 4 * (i + 1)], "stop"
                    break
        s.content.append(tokens, count)
        s.length += count
        if finish is None and s.output_tokens >= sampling.max_tokens:
            finish = "length"
        self._stats.output_tokens += count
        if self._speculator is not None and sampling.speculate and tokens and s.kv is not None:
            self._speculator.extend(s.id, list(memoryview(tokens).cast("I")))
        return count, tokens, finish

    def _commit(self, s: Sequence) -> None:
        blocks = s.computed // self.limits.block_tokens
        if s.kv is None or blocks <= s.committed:
            return
        self.cache.commit(s.kv, self.chain(s, blocks), s.computed)
        if self._windows:
            self.cache.slide(s.kv, s.computed)
        s.committed = blocks

    def _output(self, s: Sequence, count: int, tokens: bytes, finish: str | None, report: StepReport) -> None:
        out = SequenceOutput(s.id, count, tokens, finish)
        if s.first_token < 0:
            s.first_token = self.clock.time()
            out.cached = s.cached
            self._stats.cached_tokens += s.cached
            self._stats.prompt_tokens += s.prompt_tokens
        if finish is not None:
            out.drafted, out.accepted, out.rounds = s.drafted, s.accepted, s.rounds
            self._end(s, finish)
        report.outputs.append(out)

    def _draft(self, s: Sequence, proposed: int) -> None:
        limit = s.remaining - 1
        if limit <= 0 or not s.request.sampling.speculate or s.status is not Status.RUNNING:
            return
        if self._speculator is not None and s.content.ids_known:
            s.draft_tokens = self._speculator.propose(s.id, min(limit, self._speculator.caps.max_drafts))
            s.drafts = len(s.draft_tokens)
        elif proposed:
            s.drafts = min(proposed, limit)

    # -- ends

    def _end(self, s: Sequence, finish: str) -> None:
        if s.status is Status.FINISHED:
            return
        s.finish = finish
        self._snapshots.keep(s)
        self._admission.release(s)
        s.status = Status.FINISHED
        del self._sequences[s.id]
        self._scheduler.remove(s)
        self._stats.finished += 1

    def _error(self, s: Sequence, error: BaseException, when: str = "") -> None:
        if s.status is not Status.FINISHED:
            self._end(s, "error")
            code = error.code if isinstance(error, BienError) else BienError.code
            text = f"{when}{error}"
            self._report.outputs.append(SequenceOutput(s.id, 0, b"", "error", error=text, error_code=code))

    def _end_all(self, error: BaseException) -> None:
        for s in list(self._sequences.values()):
            self._error(s, error)

    def _tier_events(self, report: StepReport) -> None:
        if self._store is not None:
            for op, group, hashes in self._store.take_events():
                report.events.append(KVEvent(op, group, b"", hashes, "host"))

    # -- called by admission

    def started(self, s: Sequence) -> None:
        """A sequence got slot and KV: a host drafter hears its tokens."""
        if self._speculator is not None and isinstance(s.content, TokenContent):
            if s.request.sampling.speculate:
                self._speculator.start(s.id, s.content.tokens())

    def stopped(self, s: Sequence) -> None:
        """It lost slot and KV."""
        if self._speculator is not None and s.content.ids_known and s.request.sampling.speculate:
            self._speculator.end(s.id)

    def preempted(self) -> None:
        self._stats.preemptions += 1

    def chain(self, s: Sequence, blocks: int) -> bytes:
        """Hashes of the first `blocks` full blocks of its confirmed content."""
        have, size = len(s.hashes) // HASH_BYTES, self.limits.block_tokens
        if blocks > have:
            parent = s.hashes[-HASH_BYTES:] or root_hash(s.request.hash_key)
            tail = s.content.named(have * size, blocks * size)
            s.hashes += continue_chain(s.request.hash_key, parent, tail, size)
        return s.hashes[: blocks * HASH_BYTES]

    def _prompt_chain(self, request: GenerateRequest) -> bytes:
        want = request.prompt_tokens // self.limits.block_tokens
        if len(request.hashes) == want * HASH_BYTES:
            return request.hashes
        if request.hashes:
            raise UserError(
                f"hashes cover {len(request.hashes) // HASH_BYTES} blocks, the prompt has {want} full blocks "
                f"of {self.limits.block_tokens} tokens",
                field="hashes",
            )
        return extend_chain(
            request.hash_key, b"", request.prompt, self.limits.block_tokens, request.prompt_tokens
        )
