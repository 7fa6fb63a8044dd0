"""An executor without a model: the next token is a hash of the context *as read through the block tables*.

Any wrong block, stale block, missing restore or late snapshot changes the text, so comparing with
`oracle` tests engine, scheduler, cache and store exactly, without torch. KV pools hold token ids; a
STATE block holds (position, rolling hash).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.plan import ExecutorPlan, NewSequence, StateCopy, StepResult
from bien.core.request import TokenIds

VOCAB = 50
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


class HashExecutor:
    """`draft(context)` stands for a device drafter: it returns the drafts for the next round."""

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        draft: Callable[[list[int]], list[int]] | None = None,
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
        self._proposed: dict[int, list[int]] = {}

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
        drafts = plan.draft_tokens.tolist()
        for i in range(plan.rows):
            slot, start, count = int(plan.slots[i]), int(plan.starts[i]), int(plan.counts[i])
            n = int(plan.drafts[i])
            row = self._tokens[slot][start : start + count - n]
            assert len(row) == count - n, f"slot {slot}: {len(row)} known tokens, plan says {count - n}"
            if plan.device_drafts:
                guess = self._proposed.get(slot, [])[:n]
            else:
                guess, drafts = drafts[:n], drafts[n:]
            assert len(guess) == n, f"slot {slot} has {len(guess)} of {n} drafts"
            rows.append(self._run(slot, start, row + guess, guess, bool(plan.samples[i])))
        return plan, rows

    def sample(self, handle: Any, masks: Any = None) -> Future[StepResult]:
        plan, rows = handle
        accepted: list[int] = []
        tokens: list[int] = []
        proposed: list[int] = []
        for slot, start, row, guess, targets, states in rows:
            gained = self._verify(slot, guess, targets)
            accepted.append(len(gained))
            tokens += gained
            end = start + len(row) - len(guess) + max(0, len(gained) - 1)
            for g in self._state_groups():
                live = int(self._tables[g][slot, 0])
                self._states[g][live] = states[g][end - start]
            if gained:
                self._tokens[slot] += gained
            for copy in plan.snapshots:
                if copy.slot == slot and copy.position <= end:
                    self._states[copy.group][copy.dst] = states[copy.group][copy.position - start]
                    assert self._states[copy.group][copy.dst][0] == copy.position
            wants = self._draft is not None and gained and self._new[slot].sampling.speculate
            self._proposed[slot] = self._draft(self._tokens[slot]) if wants and self._draft else []
            proposed.append(len(self._proposed[slot]))
        future: Future[StepResult] = Future()
        counts, ids, guesses = (np.asarray(v, np.int32) for v in (accepted, tokens, proposed))
        future.set_result(StepResult(plan.step, counts, ids, guesses))
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

    def _run(self, slot: int, start: int, row: list[int], guess: list[int], samples: bool) -> Any:
        targets: list[int] = []
        states: dict[int, list[State]] = {}
        for g in self._state_groups():
            live = int(self._tables[g][slot, 0])
            assert live > 0, "no live state block"
            states[g] = [self._states[g][live]]
            assert states[g][0][0] == start, f"live state at {states[g][0][0]}, row starts at {start}"
            for token in row:
                states[g].append(_absorb(states[g][-1], token))
        for offset, token in enumerate(row):
            at = start + offset
            for g, group in enumerate(self.groups):
                if group.paged:
                    block = int(self._tables[g][slot, at // self._size])
                    assert block > 0, f"no block for position {at} in group {group.name}"
                    self._pools[g][block, at % self._size] = token
        for offset in range(len(row) - 1 - len(guess), len(row)) if samples else ():
            targets.append(self._predict(slot, start + offset, states, offset))
        return slot, start, row, guess, targets, states

    def _predict(self, slot: int, at: int, states: dict[int, list[State]], offset: int) -> int:
        none = np.zeros(0, np.int32)
        full = none if self._full is None else self._read(self._full, slot, 0, at + 1)
        window = none
        state = 0
        for g, group in enumerate(self.groups):
            if group.kind is GroupKind.WINDOW:
                window = self._read(g, slot, max(0, at + 1 - self._window), at + 1)
            elif group.kind is GroupKind.STATE:
                state = states[g][offset + 1][1]
            elif g != self._full:  # every other group must hold the same content
                assert (self._read(g, slot, 0, at + 1) == full).all(), f"group {group.name} differs"
        new = self._new[slot]
        return _next(full, window, state, new.seed if new.sampling.temperature > 0 else 0)

    def _read(self, g: int, slot: int, start: int, stop: int) -> NDArray[np.int32]:
        first = start // self._size
        blocks = self._tables[g][slot, first : (stop - 1) // self._size + 1]
        flat: NDArray[np.int32] = self._pools[g][blocks].ravel()
        return flat[start - first * self._size : stop - first * self._size]

    def _verify(self, slot: int, guess: list[int], targets: list[int]) -> list[int]:
        new = self._new[slot]
        gained: list[int] = []
        for i, target in enumerate(targets):
            at = len(self._tokens[slot]) + i - new.prompt_tokens
            if isinstance(new.forced, TokenIds) and at < len(new.forced):
                target = new.forced.slice(at, at + 1).ids()[0]
            gained.append(target)
            if i >= len(guess) or guess[i] != target:
                break
        return gained


class _States:
    def __init__(self, values: list[State]) -> None:
        self.values = values
        self.nbytes = 16 * len(values)
