"""An executor without a model: the next token is a hash of the context *as read through the block tables*.

Any wrong block, stale block, missing restore or late snapshot changes the text, so comparing with
`oracle` tests engine, scheduler, cache and store exactly, without torch. KV pools hold token ids; a
STATE block holds (position, rolling hash).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.plan import ExecutorPlan, NewSequence, StateCopy, StepResult, i32
from bien.core.request import TokenIds
from bien.core.speculation.draft import Draft

VOCAB = 50
SECONDS, AT_LEAST = 1e-6, 16e-6  # that a position, and a step beside its positions, is said to take
State = tuple[int, int]


def _absorb(state: State, token: int) -> State:
    return state[0] + 1, (state[1] * 31 + token + 1) % (1 << 61)


def _next(full: NDArray[np.int32], window: NDArray[np.int32], state: int, seed: int) -> int:
    mixed = zlib.crc32(full.tobytes()) * 3 + zlib.crc32(window.tobytes()) * 5 + state * 7 + seed
    return mixed % VOCAB


def oracle(prompt: list[int], count: int, groups: tuple[KVGroup, ...], seed: int = 0) -> list[int]:
    """The first `count` tokens after `prompt`, computed without blocks."""
    window = next((g.window for g in groups if g.kind is GroupKind.WINDOW), 0)
    has_state = any(g.kind is GroupKind.STATE for g in groups)
    has_full = _first_full(groups) is not None
    tokens = list(prompt)
    state: State = (0, 0)
    for t in tokens:
        state = _absorb(state, t)
    for _ in range(count):
        flat = np.asarray(tokens, dtype=np.int32)
        tail = flat[-window:] if window else flat[:0]
        tokens.append(_next(flat if has_full else flat[:0], tail, state[1] if has_state else 0, seed))
        state = _absorb(state, tokens[-1])
    return tokens[len(prompt) :]


def _first_full(groups: tuple[KVGroup, ...]) -> int | None:
    # A group that keeps every position.
    return next((i for i, g in enumerate(groups) if g.paged and g.kind is not GroupKind.WINDOW), None)


@dataclass(slots=True)
class _Row:
    """A row of a plan. Offsets count its positions: first known tokens, then drafts."""

    slot: int
    start: int
    tokens: list[int]
    known: int  # those that are no drafts
    parents: list[int]  # by offset, -1 before the first
    states: dict[int, list[State]] = field(default_factory=dict)  # by STATE group: before, behind each offset
    targets: dict[int, int] = field(default_factory=dict)  # by offset: what the model says behind it

    def path(self, offset: int) -> list[int]:
        """The offsets that lead to one, itself included."""
        out: list[int] = []
        while offset >= 0:
            out.append(offset)
            offset = self.parents[offset]
        return out[::-1]


class HashExecutor:
    """`draft(context)` stands for a device drafter: it returns the drafts for the next round, a list for a
    chain without confidences."""

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        draft: Callable[[list[int]], list[int] | Draft] | None = None,
    ) -> None:
        self.groups = groups
        self.io = self
        self._draft = draft
        self._size = groups[0].block_tokens
        self._window = next((g.window for g in groups if g.kind is GroupKind.WINDOW), 0)
        self._full = _first_full(groups)

    def allocate(self, blocks: tuple[int, ...], slots: int, max_context: int) -> None:
        columns = -(-max_context // self._size) + 2
        self._pools: list[NDArray[np.int32]] = [
            np.full((n + 1, self._size), -1, dtype=np.int32) for n in blocks
        ]
        self._states: list[dict[int, State]] = [{} for _ in blocks]
        self._tables = [np.zeros((slots, columns), dtype=np.int32) for _ in blocks]
        self._tokens: dict[int, list[int]] = {}
        self._new: dict[int, NewSequence] = {}
        self._proposed: dict[int, Draft] = {}

    # -- BlockIO

    def read(self, group: int, blocks: list[int]) -> Any:
        if not self.groups[group].paged:
            return _States([self._states[group][b] for b in blocks])
        return self._pools[group][blocks].copy()

    def write(self, group: int, blocks: list[int], data: Any) -> None:
        if isinstance(data, _States):
            self._states[group].update(zip(blocks, data.values, strict=True))
        else:
            self._pools[group][blocks] = data

    # -- Executor

    def forward(self, plan: ExecutorPlan) -> Any:
        self._apply(plan)
        rows = []
        given, parents = plan.draft_tokens.tolist(), plan.parents.tolist()
        for i in range(plan.rows):
            slot, start, count = int(plan.slots[i]), int(plan.starts[i]), int(plan.counts[i])
            n = int(plan.drafts[i])
            known = self._tokens[slot][start : start + count - n]
            assert len(known) == count - n, f"slot {slot}: {len(known)} known tokens, plan says {count - n}"
            if not plan.device_drafts or (len(plan.hosted) and plan.hosted[i]):
                guess, given = given[:n], given[n:]
            else:
                guess = self._proposed.get(slot, Draft()).tokens[:n]
            assert len(guess) == n, f"slot {slot} has {len(guess)} of {n} drafts"
            tree = list(range(-1, n - 1))
            if len(plan.parents):
                tree, parents = parents[:n], parents[n:]
            assert all(-1 <= p < j for j, p in enumerate(tree)), f"slot {slot}: parents {tree} of {n} drafts"
            above = [*range(-1, len(known) - 1), *(len(known) + p for p in tree)]
            rows.append(self._run(_Row(slot, start, known + guess, len(known), above), bool(plan.samples[i])))
        assert not given and not (len(plan.parents) and parents), "a plan has more drafts than its rows"
        return plan, rows

    def sample(self, handle: Any, masks: Any = None) -> Future[StepResult]:
        plan, rows = handle
        accepted: list[int] = []
        tokens: list[int] = []
        proposed: list[Draft] = []
        for row in rows:
            slot, (gained, last) = row.slot, self._verify(row)
            accepted.append(len(gained))
            tokens += gained
            path = row.path(last)
            self._move(row, path)
            for g in self._state_groups():
                live = int(self._tables[g][slot, 0])
                self._states[g][live] = row.states[g][last + 1]
            if gained:
                self._tokens[slot] += gained
            for copy in plan.snapshots:
                if copy.slot == slot and copy.position <= row.start + len(path):
                    at = path[copy.position - row.start - 1] + 1 if copy.position > row.start else 0
                    self._states[copy.group][copy.dst] = row.states[copy.group][at]
                    assert self._states[copy.group][copy.dst][0] == copy.position
            most = self._new[slot].max_drafts
            draft = self._draft(self._tokens[slot]) if self._draft and gained and most else Draft()
            self._proposed[slot] = (Draft(draft) if isinstance(draft, list) else draft).cut(most)
            proposed.append(self._proposed[slot])
        future: Future[StepResult] = Future()
        counts, ids, ready = (np.asarray(v, np.int32) for v in (accepted, tokens, list(map(len, proposed))))
        result = StepResult(plan.step, counts, ids, ready, seconds=AT_LEAST + SECONDS * plan.tokens)
        told = [draft for draft in proposed if draft.confidence is not None]
        if told:
            result.confidence = np.array([c for d in told for c in d.confidence or ()], np.float32)
        if any(draft.parents is not None for draft in proposed):
            chains = [d.parents if d.parents is not None else range(-1, len(d) - 1) for d in proposed]
            result.parents = i32([parent for parents in chains for parent in parents])
        future.set_result(result)
        return future

    def close(self) -> None:
        pass

    # -- parts

    def _apply(self, plan: ExecutorPlan) -> None:
        for slot in plan.released.tolist():
            del self._tokens[slot], self._new[slot]
        for new in plan.new:
            assert isinstance(new.tokens, TokenIds)
            assert new.slot not in self._tokens, f"slot {new.slot} is taken"
            self._tokens[new.slot] = list(new.tokens.ids())
            self._new[new.slot] = new
        for g, update in enumerate(plan.tables):
            for slot, index, block in zip(
                update.slots.tolist(), update.index.tolist(), update.blocks.tolist(), strict=True
            ):
                self._tables[g][slot, index] = block
        for copy in plan.restores:
            self._restore(copy)

    def _restore(self, copy: StateCopy) -> None:
        state = self._states[copy.group][copy.src] if copy.src else (0, 0)
        assert state[0] == copy.position, f"restored state of position {state[0]}, expected {copy.position}"
        self._states[copy.group][copy.dst] = state

    def _state_groups(self) -> list[int]:
        return [g for g, group in enumerate(self.groups) if not group.paged]

    def _run(self, row: _Row, samples: bool) -> _Row:
        slot, start = row.slot, row.start
        for g in self._state_groups():
            live = int(self._tables[g][slot, 0])
            assert live > 0, "no live state block"
            states = row.states[g] = [self._states[g][live]]
            assert states[0][0] == start, f"live state at {states[0][0]}, row starts at {start}"
            for token, parent in zip(row.tokens, row.parents, strict=True):
                states.append(_absorb(states[parent + 1], token))
        for offset, token in enumerate(row.tokens):
            at = start + offset
            for g, group in enumerate(self.groups):
                if group.paged:
                    block = int(self._tables[g][slot, at // self._size])
                    assert block > 0, f"no block for position {at} in group {group.name}"
                    self._pools[g][block, at % self._size] = token
        for offset in range(row.known - 1, len(row.tokens)) if samples else ():
            row.targets[offset] = self._predict(row, offset)
        return row

    def _predict(self, row: _Row, offset: int) -> int:
        path = [o for o in row.path(offset) if o >= row.known]
        full = self._seen(self._full, row, path) if self._full is not None else np.zeros(0, np.int32)
        window = np.zeros(0, np.int32)
        state = 0
        for g, group in enumerate(self.groups):
            if group.kind is GroupKind.WINDOW:
                window = self._seen(g, row, path)
            elif group.kind is GroupKind.STATE:
                state = row.states[g][offset + 1][1]
            elif g != self._full:  # every other group must hold the same content
                assert (self._seen(g, row, path) == full).all(), f"group {group.name} differs"
        new = self._new[row.slot]
        return _next(full, window, state, new.seed if new.sampling.temperature > 0 else 0)

    def _seen(self, g: int, row: _Row, path: list[int]) -> NDArray[np.int32]:
        """What a draft, or with no path the last known token, attends to: known positions, then the drafts
        that lead to it, wherever they were put."""
        end = row.start + row.known
        first = max(0, end + len(path) - self._window) if self.groups[g].kind is GroupKind.WINDOW else 0
        known = self._read(g, row.slot, min(first, end), end)
        drafts = [self._read(g, row.slot, row.start + o, row.start + o + 1) for o in path]
        return np.concatenate([known, *drafts[max(0, first - end) :]])

    def _move(self, row: _Row, path: list[int]) -> None:
        """Accepted drafts go where a chain would have them."""
        for offset, source in enumerate(path):
            to, at = row.start + offset, row.start + source
            for g, group in enumerate(self.groups):
                if group.paged and to != at:
                    here, there = (self._tables[g][row.slot, p // self._size] for p in (to, at))
                    self._pools[g][here, to % self._size] = self._pools[g][there, at % self._size]

    def _read(self, g: int, slot: int, start: int, stop: int) -> NDArray[np.int32]:
        first = start // self._size
        blocks = self._tables[g][slot, first : (stop - 1) // self._size + 1]
        flat: NDArray[np.int32] = self._pools[g][blocks].ravel()
        return flat[start - first * self._size : stop - first * self._size]

    def _verify(self, row: _Row) -> tuple[list[int], int]:
        """Tokens gained, and the last offset that counts."""
        new, last = self._new[row.slot], row.known - 1
        gained: list[int] = []
        while last in row.targets:
            target = row.targets[last]
            at = len(self._tokens[row.slot]) + len(gained) - new.prompt_tokens
            if isinstance(new.forced, TokenIds) and at < len(new.forced):
                target = new.forced.slice(at, at + 1).ids()[0]
            gained.append(target)
            children = (o for o in range(row.known, len(row.tokens)) if row.parents[o] == last)
            following = next((o for o in children if row.tokens[o] == target), None)
            if following is None:
                break
            last = following
        return gained, last


class _States:
    def __init__(self, values: list[State]) -> None:
        self.values = values
        self.nbytes = 16 * len(values)
