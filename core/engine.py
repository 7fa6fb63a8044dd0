"""The engine: a synchronous state machine. `submit`, `abort`, `begin() -> plan`, `finish(result)`.

No I/O, no thread, no waiting. Two drivers call it: an engine thread in a worker process, and a coroutine
on a virtual clock. It is safe to call `begin` again before `finish` (overlap): the next plan then counts
on tokens that are promised but unknown; results arrive in the order of the plans.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

from bien.core.admission import Admission
from bien.core.chains import extended_chain, prompt_chain
from bien.core.clock import Clock
from bien.core.content import content_of
from bien.core.drafting import Drafting, proposals
from bien.core.errors import BienError, ContextLengthError, PluginFault, UserError
from bien.core.flight import Flight
from bien.core.guarded import GuardedScheduler, GuardedSpeculator, GuardedStore
from bien.core.jump import Jump
from bien.core.kv.cache import KVCache
from bien.core.kv.events import KVEvent
from bien.core.kv.groups import KVGroup
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.store import KVStore
from bien.core.launch import Launcher, check_plan
from bien.core.plan import ExecutorPlan, StepResult
from bien.core.report import SequenceOutput, StepReport
from bien.core.request import GenerateRequest
from bien.core.scheduler import Scheduler
from bien.core.sequence import Sequence, Status
from bien.core.settlement import Settlement
from bien.core.snapshots import Snapshots
from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.speculator import HostSpeculator
from bien.core.tier import Tier
from bien.core.worker.messages import WorkerStats


@dataclass(slots=True, frozen=True)
class EngineLimits:
    """What the engine needs to know of model and pool."""

    slots: int
    max_context: int
    block_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    device_drafts: int = 0  # drafts per round of a device drafter, 0 = none
    vocab_size: int = 1 << 32
    speculation: SpeculationSpec = field(default_factory=SpeculationSpec)
    drafter: str = "drafter"  # its name
    drawn: bool = False  # its drafts are drawn, and judged by their law
    trusted: bool = True  # whether a draft is verified may depend on the confidences of its round


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
        self._scheduler = GuardedScheduler(scheduler)
        self._drafting = Drafting(
            GuardedSpeculator(speculator, limits.vocab_size) if speculator else None,
            limits.device_drafts,
            limits.speculation,
            name=limits.drafter,
            drawn=limits.drawn,
            trusted=limits.trusted,
        )
        self._store = GuardedStore(store) if store else None
        self._rng = rng or random.Random()
        self._sequences: dict[str, Sequence] = {}
        self._flights: deque[Flight] = deque()
        self._report = StepReport()  # what arises outside a step, until the next report
        self._stats = WorkerStats()
        self.launched = self.settled = 0
        self._told = 0  # rounds of drafting that statistics have by source
        self._order = 0
        self._snapshots = Snapshots(cache, groups, limits.block_tokens)
        self._tier = Tier(self._store, cache, groups, clock)
        self._admission = Admission(
            self,
            cache,
            groups,
            limits.slots,
            limits.block_tokens,
            self._tier,
            self._snapshots,
            limits.device_drafts,
            limits.eos_token_ids,
        )
        self._launcher = Launcher(self._admission, self._snapshots, groups, limits.device_drafts > 0)
        self._settlement = Settlement(
            self, cache, groups, self._snapshots, self._drafting, self._stats, limits.eos_token_ids
        )
        self._jump = Jump(self._admission, self._settlement, self._snapshots, limits.block_tokens)

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
            arrival=self.clock.time() - max(0.0, request.age),
            order=self._order,
            seed=self._rng.getrandbits(64) if seed is None else seed & ((1 << 64) - 1),
            content=content_of(request.prompt, request.forced, request.id),
            length=prompt,
            hashes=prompt_chain(request, self.limits.block_tokens),
        )
        self._drafting.enter(sequence)
        self._scheduler.add(sequence)
        self._order += 1
        self._sequences[request.id] = sequence

    def abort(self, id: str) -> None:
        """Drop a request; unknown or finished ids are ignored. No output follows."""
        sequence = self._sequences.get(id)
        if sequence is not None:
            self.end(sequence, "abort")

    # -- steps

    def begin(self) -> ExecutorPlan | None:
        """Plan a step. None: nothing to compute now (idle, or all wait for loads or steps in flight)."""
        self._admission.poll()
        if not self._sequences:
            return None
        before = self._stats.preemptions
        self._drafting.admit(self._sequences.values(), self._admission.free_slots)
        try:
            plan = self._scheduler.plan(self._admission)
            if not plan.items and self._stats.preemptions > before:
                plan = self._scheduler.plan(self._admission)  # a lone victim may come back at once
            plan.items = [item for item in plan.items if item.tokens]
            check_plan(plan, self._sequences, self._scheduler.name)
            self._drafting.even(plan)
        except PluginFault as error:
            self._end_all(error)
            return None
        if not plan.items:
            return None
        self.launched += 1
        flight, work = self._launcher.launch(self.launched, plan)
        self._drafting.planned(flight.items)
        self._flights.append(flight)
        return work

    def finish(self, result: StepResult) -> StepReport:
        """Commit the oldest step in flight."""
        return self.finish_many(result, 1)

    def finish_many(self, result: StepResult, steps: int, seconds: float | None = None) -> StepReport:
        """Commit the oldest step in flight and `steps` - 1 repetitions of it (see `jumpable`). `seconds`: of
        all of them together; None: each took as long as the first."""
        flight = self._flights.popleft()
        assert steps == 1 or not self._flights, "a jump cannot overlap"
        return self._finish(flight, result, steps, seconds)

    def advance(self, result: StepResult, steps: int, seconds: float) -> StepReport:
        """Commit the first `steps` steps of the jump in flight, which took `seconds`; it goes on with the
        next one, as if that had been begun now."""
        (flight,) = self._flights
        report = self._finish(flight, result, steps, seconds)
        self._admission.poll()
        self._jump.go_on(flight.items, steps)
        report.events += self.cache.take_events()
        return report

    def _finish(self, flight: Flight, result: StepResult, steps: int, seconds: float | None) -> StepReport:
        assert flight.step == result.step, f"result of step {result.step}, expected {flight.step}"
        self.settled = flight.step
        report, self._report = self._report, StepReport()
        ids = None if result.tokens is None else result.tokens.astype("<u4", copy=False)
        accepted = result.accepted.tolist()
        proposed = proposals(result)
        order = list(range(len(flight.items)))
        if steps > 1:
            if flight.in_order:
                self._jump.book(flight.items, steps)
            elif len(order) > 1:
                order.sort(key=lambda i: flight.items[i].last_change(steps, self.limits.block_tokens))
            for item in flight.items:  # before any of them ends and gives blocks back, as step by step
                if item.sequence.status is not Status.FINISHED:
                    self._admission.cover(item.sequence, item.start + item.count + steps - 1)
        ends = None if ids is None else [0, *accumulate(accepted)]
        for i in order:
            tokens = b"" if ids is None or ends is None else ids[ends[i] : ends[i + 1]].tobytes()
            logprobs = result.logprobs.get(i) if result.logprobs else None
            if result.prompt_logprobs and i in result.prompt_logprobs:
                flight.items[i].sequence.score(flight.items[i].start, result.prompt_logprobs[i])
            drafts, draft = proposed[i] if proposed else (0, None)
            self._settlement.settle(
                flight.items[i], accepted[i], steps, tokens, report, logprobs, drafts, draft
            )
        self._stats.steps += steps
        self._stats.computed_tokens += flight.tokens * steps
        seconds = result.seconds * steps if seconds is None else seconds
        self._stats.busy_seconds += seconds
        self._scheduler.note(seconds, flight.tokens * steps)
        if steps == 1:
            self._drafting.note(flight.tokens, seconds)
        self._tier.save_committed()
        report.events += self.cache.take_events()
        self._tier_events(report)
        return report

    def leave_out_tables(self) -> None:
        """Plans come without block tables from now on: nothing computes by them."""
        self._launcher.tables = False

    def jumpable(self) -> int:
        """How many steps, the one in flight included, repeat exactly unless something arrives: 1 when the
        scheduler is not stationary, a sequence loads, or blocks run short."""
        if len(self._flights) != 1 or not self._scheduler.stationary or self.loading:
            return 1
        steps, flight = 1 << 30, self._flights[0]
        sequences = []
        for item in flight.items:
            s = item.sequence
            if item.count != 1 or not item.samples or s.finish is not None:
                return 1
            if s.content.ids_known:  # its tokens can stop it at any step
                return 1
            if self.limits.device_drafts and s.max_drafts:  # the next step may verify drafts
                return 1
            steps = min(steps, s.remaining + 1)
            sequences.append(s)
        waiting = len(self._sequences) > len(sequences)
        steps = self._admission.steps_that_fit(sequences, steps, waiting)
        flight.in_order = steps > 1 and self._admission.in_order(sequences, steps)
        return steps

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
        """Whether a transfer runs that somebody waits for: with `begin()` None, poll again in about a
        millisecond."""
        if self._tier.busy:
            return True
        return self._tier.saving and len(self._sequences) > self.limits.slots - self._admission.free_slots

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
                rest = s.prompt_tokens - s.planned
            else:  # what it finds in the cache is known once it is admitted; its gateway has an idea
                waiting += 1
                rest = s.prompt_tokens - max(s.planned, s.request.predicted_cached_tokens)
            if rest > 0:
                queued += rest
        used, cached, free = self.cache.usage(0)
        stats = self._stats
        stats.running, stats.waiting, stats.queued_tokens = running, waiting, queued
        stats.used_blocks, stats.cached_blocks, stats.total_blocks = used, cached, used + cached + free
        stats.store_bytes = self._store.usage[0] if self._store else 0
        if self._told != stats.rounds:
            self._told = stats.rounds
            stats.drafts = self._drafting.counts.copy()  # whoever was told keeps what it was told
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
            self.end(sequence, "abort")
        self._tier.drain()
        self._scheduler.close()
        self._drafting.close()
        if self._store:
            self._store.close()

    # -- ends

    def end(self, s: Sequence, finish: str) -> None:
        """Free all that it holds. Called by settlement too."""
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
            self.end(s, "error")
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

    # -- called by admission and settlement

    def started(self, s: Sequence) -> None:
        """A sequence got slot and KV."""
        self._drafting.start(s)

    def stopped(self, s: Sequence) -> None:
        """It lost slot and KV."""
        self._drafting.stop(s)

    def preempted(self) -> None:
        self._stats.preemptions += 1

    def room(self, s: Sequence) -> int:
        """Positions that it may compute next, as far as windows allow."""
        return self._admission.room(s)

    def chain(self, s: Sequence, blocks: int) -> bytes:
        """Hashes of the first `blocks` full blocks of its confirmed content."""
        return extended_chain(s, blocks, self.limits.block_tokens)[: blocks * HASH_BYTES]
