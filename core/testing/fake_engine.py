"""`FakeEngine`: the bookkeeping that a scheduler is planned against, without model, cache or clock.

It keeps counts only: slots, blocks, chunk boundaries, steps in flight, loads, drafts. It checks each plan
against the scheduler contract and raises AssertionError with what was wrong.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import msgspec

from bien.core.content import content_of
from bien.core.plan import StepPlan
from bien.core.request import BlockRuns, GenerateRequest, SamplingParams
from bien.core.scheduler import Scheduler
from bien.core.sequence import Sequence, Status


class Room(msgspec.Struct, frozen=True):
    """What the machine of a scenario has. `boundary`: chunks may not run over multiples of it (0: may).
    `narrow`: a sequence's steps in flight must end before it gets more, as where windows fill a pool."""

    slots: int = 4
    blocks: int = 64
    block_tokens: int = 4
    depth: int = 1  # steps in flight
    boundary: int = 0
    load_polls: int = 0  # > 0: some admitted sequences are LOADING for so many steps
    drafts: int = 0  # most drafts that a sequence has ready after a step
    narrow: bool = False


@dataclass(slots=True)
class _Row:
    sequence: Sequence
    epoch: int
    tokens: int
    drafts: int
    samples: bool


class FakeEngine:
    """Implements `SchedulerView`; `step` plans, checks and settles."""

    def __init__(self, scheduler: Scheduler, room: Room, seed: int = 0) -> None:
        self.room = room
        self.now = 0.0
        self.log: list[list[tuple[str, int, int]]] = []  # per step: (id, tokens, drafts)
        self.finished: list[str] = []  # in order
        self._scheduler = scheduler
        self._rng = random.Random(seed)
        self._live: dict[str, Sequence] = {}
        self._stop: dict[str, int] = {}  # output tokens after which a stop token comes
        self._blocks: dict[Sequence, int] = {}
        self._loads: dict[Sequence, int] = {}
        self._flights: deque[list[_Row]] = deque()
        self._truth: dict[Sequence, tuple[object, ...]] = {}
        self._repeat: list[tuple[str, int, int]] | None = None  # what `stationary` promised
        self._order = 0
        self._short = False  # memory was, while the last plan was made

    # -- the scheduler's view

    def admit(self, sequence: Sequence) -> bool:
        self._known(sequence, "admitted")
        assert sequence.status is Status.WAITING, self._says(sequence, "admitted", "not WAITING")
        if sequence.promised or len(self._blocks) >= self.room.slots:
            return False
        size = self.room.block_tokens
        cached = self._rng.randrange((sequence.length - 1) // size + 1) if self._rng.random() < 0.5 else 0
        need = -(-sequence.length // size)
        if self._blocks and need > self._free:
            return False
        self._blocks[sequence] = cached
        sequence.slot = 0
        sequence.computed = sequence.planned = sequence.reserved = cached * size
        if self.room.load_polls and cached and self._rng.random() < 0.5:
            sequence.status = Status.LOADING
            self._loads[sequence] = self.room.load_polls
        else:
            sequence.status = Status.RUNNING
        self._write(sequence)
        return True

    def chunk(self, sequence: Sequence, tokens: int) -> int:
        self._known(sequence, "asked a chunk for")
        if self.room.narrow and sequence.planned > sequence.computed:
            return 0
        end, step = sequence.planned + tokens, self.room.boundary
        if step:
            end = min(end, (sequence.planned // step + 1) * step)
        return end - sequence.planned

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        self._known(sequence, "reserved KV for")
        assert sequence.status is Status.RUNNING, self._says(sequence, "reserved KV for", "not RUNNING")
        assert tokens >= 0, f"the scheduler reserved {tokens} tokens for {sequence.id!r}; valid: 0 or more"
        want = -(-(sequence.planned + tokens) // self.room.block_tokens)
        more = want - self._blocks[sequence]
        if more > self._free:
            self._repeat = None  # a shortage: the promise of `stationary` does not hold
            self._short = True
            return False
        if more > 0:
            self._blocks[sequence] = want
            sequence.reserved = want * self.room.block_tokens
            self._write(sequence)
        return True

    def preempt(self, sequence: Sequence) -> None:
        self._known(sequence, "preempted")
        assert sequence.status is Status.RUNNING, self._says(sequence, "preempted", "not RUNNING")
        self._repeat = None
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.epoch += 1
        sequence.computed = sequence.planned = sequence.reserved = sequence.drafts = 0
        sequence.preemptions += 1
        self._write(sequence)

    # -- the driver's side

    @property
    def busy(self) -> bool:
        return bool(self._live or self._flights)

    @property
    def live(self) -> list[str]:
        return list(self._live)

    def submit(self, prompt: int, output: int, stop: int = 0, priority: int = 0) -> str:
        """A request of `prompt` tokens that makes `output` tokens, or ends at its `stop`-th before."""
        id = f"r{self._order}"
        most = self.room.blocks * self.room.block_tokens
        assert prompt + output <= most, f"scenario: {prompt}+{output} tokens never fit into {most}"
        content = BlockRuns.of([(self._order << 32, prompt)])
        request = GenerateRequest(id, content, SamplingParams(max_tokens=output), priority=priority)
        self._live[id] = sequence = Sequence(
            id, request, self.now, self._order, self._order, content_of(content, None, id), prompt
        )
        self._order += 1
        self._stop[id] = stop or output
        self._repeat = None
        self._write(sequence)
        self._scheduler.add(sequence)
        return id

    def abort(self, id: str) -> None:
        """The client left; unknown ids are ignored."""
        if id in self._live:
            self._end(self._live[id])

    def step(self) -> None:
        """Plan one step, check it, and settle the oldest in flight when as many as allowed are."""
        for sequence, polls in list(self._loads.items()):
            self._loads[sequence] = polls - 1
            if polls <= 1:
                del self._loads[sequence]
                sequence.status = Status.RUNNING
                self._repeat = None
                self._write(sequence)
        decoding = [s for s in self._live.values() if s.status is Status.RUNNING and s.pending == 1]
        self._short = False
        plan = self._scheduler.plan(self)
        plan.items = [item for item in plan.items if item.tokens]  # of a chunk of 0
        rows = self._check(plan)
        self._check_starved(decoding, rows)
        self._check_repeat(rows)
        if rows:
            self.log.append(rows)
            self._launch(plan)
            # Repetition is promised for a driver that has one step in flight.
            alone = len(self._flights) == 1 and self.room.depth == 1
            self._repeat = rows if alone and self._scheduler.stationary else None
        elif not self._flights and not self._loads:
            assert not self._live, (
                f"the scheduler stalls: it plans nothing while {', '.join(self._live)} wait, nothing is in "
                f"flight and {self._free} of {self.room.blocks} blocks are free"
            )
        if self._flights and (not rows or len(self._flights) >= self.room.depth):
            self._settle(self._flights.popleft())

    # -- checks

    def _known(self, s: Sequence, verb: str) -> None:
        assert self._live.get(s.id) is s, self._says(s, verb, "it was removed, or never added")

    def _says(self, s: Sequence, verb: str, why: str) -> str:
        return f"the scheduler {verb} {s.id!r}, which is {s.status.name}: {why}"

    def _check(self, plan: StepPlan) -> list[tuple[str, int, int]]:
        rows: list[tuple[str, int, int]] = []
        for item in plan.items:
            s, new = item.sequence, item.tokens - item.drafts
            self._known(s, "planned")
            assert s.status is Status.RUNNING, self._says(s, "planned", "not RUNNING")
            assert s.id not in [row[0] for row in rows], f"the scheduler planned {s.id!r} twice in one step"
            assert 1 <= new <= s.pending, (
                f"the scheduler planned {new} new tokens for {s.id!r}; valid: 1..{s.pending} (its pending)"
            )
            assert 0 <= item.drafts <= s.drafts, (
                f"the scheduler planned {item.drafts} drafts for {s.id!r}; valid: 0..{s.drafts}"
            )
            assert not item.drafts or new == s.pending, (
                f"the scheduler planned drafts for {s.id!r} behind {new} of {s.pending} pending tokens; "
                f"drafts need the whole of pending"
            )
            assert self.chunk(s, new) == new, (
                f"the scheduler planned a chunk of {new} tokens for {s.id!r}; view.chunk allows "
                f"{self.chunk(s, new)}"
            )
            assert s.reserved >= s.planned + item.tokens, (
                f"the scheduler planned {item.tokens} tokens for {s.id!r} without reserving their KV"
            )
            rows.append((s.id, item.tokens, item.drafts))
        for s in self._live.values():
            assert self._truth[s] == _fields(s), f"the scheduler wrote to {s.id!r}; only the engine may"
        return rows

    def _check_starved(self, decoding: list[Sequence], rows: list[tuple[str, int, int]]) -> None:
        """Drafts are guesses: who decodes goes before them."""
        if self._short or not any(drafts for _, _, drafts in rows):
            return
        planned = {id for id, _, _ in rows}
        for s in decoding:
            left_out = s.status is Status.RUNNING and s.id not in planned and self.chunk(s, 1) == 1
            assert not left_out, (
                f"the scheduler planned {sum(row[2] for row in rows)} drafts, but no token for {s.id!r}, "
                f"which decodes"
            )

    def _check_repeat(self, rows: list[tuple[str, int, int]]) -> None:
        if self._repeat is not None:
            assert rows == self._repeat, (
                f"the scheduler said `stationary` after {self._repeat}, but with nothing changed it "
                f"planned {rows}"
            )

    # -- bookkeeping

    @property
    def _free(self) -> int:
        return self.room.blocks - sum(self._blocks.values())

    def _write(self, s: Sequence) -> None:
        self._truth[s] = _fields(s)

    def _release(self, s: Sequence) -> None:
        self._blocks.pop(s, None)
        self._loads.pop(s, None)
        s.slot = -1

    def _launch(self, plan: StepPlan) -> None:
        flight = []
        for item in plan.items:
            s = item.sequence
            samples = item.tokens - item.drafts == s.pending
            flight.append(_Row(s, s.epoch, item.tokens, item.drafts, samples))
            s.planned += item.tokens
            s.promised += samples
            s.syncs = samples and self.room.drafts > 0
            s.drafts = 0
            self._write(s)
        self._flights.append(flight)

    def _settle(self, flight: list[_Row]) -> None:
        tokens = sum(row.tokens for row in flight)
        seconds = 0.01 + 0.0001 * tokens
        self.now += seconds
        for row in flight:
            s = row.sequence
            if s.status is Status.FINISHED:
                continue
            current = row.epoch == s.epoch
            accepted = self._rng.randint(0, row.drafts)
            if current:
                s.computed += row.tokens - row.drafts + accepted
                if row.drafts:
                    s.planned = s.computed
            if row.samples:
                s.promised -= 1
                s.syncs = False
                s.length += 1 + accepted
                if s.output_tokens >= self._stop[s.id]:
                    self.finished.append(s.id)
                    self._end(s)
                    continue
                if current and s.remaining > 1:
                    s.drafts = min(self._rng.randint(0, self.room.drafts), s.remaining - 1)
                    if s.drafts:
                        self._repeat = None
            self._write(s)
        self._scheduler.note(seconds, tokens)

    def _end(self, s: Sequence) -> None:
        self._repeat = None
        self._release(s)
        s.status = Status.FINISHED
        del self._live[s.id], self._truth[s]
        self._scheduler.remove(s)


def _fields(s: Sequence) -> tuple[object, ...]:
    """What a scheduler could spoil."""
    counts = (s.length, s.computed, s.planned, s.promised, s.drafts, s.reserved, s.epoch, s.slot)
    return (s.status, s.syncs, s.finish, s.order, s.arrival, s.preemptions, *counts)
