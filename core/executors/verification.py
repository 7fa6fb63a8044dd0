"""Verification: from a step's logits to the tokens that it yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bien.core.executors.rows import Rows
from bien.core.executors.slots import Slots
from bien.core.executors.trees import Tree
from bien.core.plan import I32, ExecutorPlan
from bien.core.sampling.acceptance import forced_lengths
from bien.core.sampling.rejection import Law, judge_chain
from bien.core.sampling.rng import Purpose, uniforms
from bien.core.sampling.sampler import filtered_weights, sample_rows
from bien.core.sampling.verify import Verdict, verify_rows
from bien.core.speculation.draft import ROOT
from bien.core.speculation.options import SpeculationSpec

I64 = NDArray[np.int64]


@dataclass(slots=True)
class Judged:
    """What a step yields, as in `StepResult`."""

    accepted: I32
    tokens: I32
    places: I32 | None = None  # of each token: which of its row's logits it stands for; None: in order


class Verification:
    """Of one step. Rows of logits are those that yield: a row's last known token, then its drafts."""

    def __init__(
        self,
        plan: ExecutorPlan,
        rows: Rows,
        logits: Tensor,
        wanted: I64,
        state: Slots,
        spec: SpeculationSpec,
        laws: dict[int, list[Law]],
    ) -> None:
        """`wanted`: as `yielding` says. `laws`: of the slots whose drafts were sampled and are tested against
        their law."""
        self.plan, self.rows, self.logits, self.state, self.spec = plan, rows, logits, state, spec
        self.positions = rows.host_positions[wanted] + 1  # of the tokens that are drawn
        self.laws = laws
        if plan.drafts.any():
            each = (1 + plan.drafts) * plan.samples
            self.first: I64 = np.cumsum(each) - each  # [S] a row's first
            self.slot = np.repeat(plan.slots, each)
            self.drafts = draft_tokens(plan, rows, state)
        else:
            self.slot = plan.slots if len(wanted) == plan.rows else plan.slots[plan.samples > 0]
            self.drafts = np.zeros(0, np.int64)

    def judge(self, masks: Tensor | None) -> Judged:
        """`masks`: [R, V] bool, True where a token is allowed."""
        plan, state, slot = self.plan, self.state, self.slot
        logits = self.logits if masks is None else self.logits.masked_fill(~masks, float("-inf"))
        logits = self._adjusted(logits)
        drawn = sample_rows(
            logits,
            state.seeds[slot],
            self.positions - state.prompts[slot],
            state.temperature[slot],
            state.top_p[slot],
            state.top_k[slot],
            state.min_p[slot],
            state.choices[slot],
            self.spec.noise,
        )
        host = drawn.cpu().numpy().astype(np.int32)
        forced = state.forced_tokens(slot, self.positions)
        if not len(self.drafts):
            verdict = verify_rows(host, plan.samples, plan.drafts, host[:0], forced)
            return Judged(verdict.accepted, verdict.tokens)
        if forced is not None:
            host = np.where(forced >= 0, forced, host)
        verdict = verify_rows(host, plan.samples, plan.drafts, self.drafts.astype(np.int32))
        special = self._special(logits, host, forced)
        return _merged(verdict, special) if special else Judged(verdict.accepted, verdict.tokens)

    def _special(self, logits: Tensor, drawn: I32, forced: I32 | None) -> dict[int, list[tuple[int, int]]]:
        # By row, (place, token) of what it yields, where that is no chain that goes along the draws.
        out: dict[int, list[tuple[int, int]]] = {}
        if not (self.spec.acceptance or self.laws or self.rows.trees):
            return out
        begins = np.cumsum(self.plan.drafts) - self.plan.drafts
        lengths = self._lengths() if self.spec.acceptance else None
        for i, (slot, count) in enumerate(
            zip(self.plan.slots.tolist(), self.plan.drafts.tolist(), strict=True)
        ):
            if not count:
                continue
            own = self.drafts[begins[i] : begins[i] + count].tolist()
            at = drawn[self.first[i] : self.first[i] + 1 + count].tolist()
            tree = self.rows.trees.get(i)
            if lengths is not None:
                path = list(range(count)) if tree is None else tree.first_path()
                out[i] = _along(path[: int(lengths[i])], own, at)
            elif tree is not None:
                out[i] = _walked(tree, own, at)
            elif slot in self.laws:
                out[i] = self._tested(i, slot, own, at, logits, forced)
        return out

    def _tested(
        self, i: int, slot: int, own: list[int], drawn: list[int], logits: Tensor, forced: I32 | None
    ) -> list[tuple[int, int]]:
        state, count, first = self.state, len(own), int(self.first[i])
        weights = filtered_weights(
            logits[first : first + count],
            *(np.repeat(a[slot], count) for a in (state.temperature, state.top_p, state.top_k, state.min_p)),
        ).to(torch.float64)
        p = weights / weights.sum(-1, keepdim=True)
        if forced is not None:  # a recorded token is the target's law
            for j, token in enumerate(forced[first : first + count].tolist()):
                if token >= 0:
                    p[j] = 0
                    p[j, token] = 1
        round_at = int(self.positions[first] - state.prompts[slot])
        seed, choice = state.seeds[slot], state.choices[slot]

        def number(purpose: Purpose, index: int = 0) -> float:
            return float(uniforms(seed, round_at, choice=choice, purpose=purpose, index=index))

        rule: Literal["standard", "block"] = "block" if self.spec.verification == "block" else "standard"
        coins = [number(Purpose.ACCEPT, j) for j in range(count)]
        laws = self.laws[slot][:count]
        taken, token = judge_chain(rule, p, laws, own, coins, number(Purpose.RESIDUAL))
        return [*enumerate(own[:taken]), (taken, drawn[count] if token is None else token)]

    def _lengths(self) -> I64:
        plan, state = self.plan, self.state
        limits = np.array(
            [
                len(self.rows.trees[i].first_path()) if i in self.rows.trees else count
                for i, count in enumerate(plan.drafts.tolist())
            ]
        )
        at = plan.starts + plan.counts - plan.drafts - state.prompts[plan.slots]
        slots = plan.slots
        return forced_lengths(self.spec.acceptance, state.seeds[slots], at, state.choices[slots], limits)

    def _adjusted(self, logits: Tensor) -> Tensor:
        # Behind a known token lie the drafts, so a row's history is right whenever its token is used.
        state, asking = self.state, self.state.adjustments
        rows = [i for i, slot in enumerate(self.slot.tolist()) if slot in asking] if asking else []
        if not rows:
            return logits
        wide = logits.dtype in (torch.float32, torch.float64)
        logits = logits.clone() if wide else logits.float()
        histories = self._histories()
        for i in rows:
            slot = int(self.slot[i])
            history = histories.get(i)
            if history is None:
                history = state.tokens[slot, : int(self.positions[i])]
            asking[slot].apply(logits[i], history, int(state.prompts[slot]))
        return logits

    def _histories(self) -> dict[int, I64]:
        # Of the nodes of trees: the known tokens and the node's own path.
        out: dict[int, I64] = {}
        for i, tree in self.rows.trees.items():
            slot, first = int(self.plan.slots[i]), int(self.first[i])
            known = int(self.positions[first])
            for node in range(len(tree.parents)):
                path = known + np.array(tree.path(node))
                text = self.state.tokens[slot]
                out[first + 1 + node] = np.concatenate((text[:known], text[path]))
        return out


def yielding(plan: ExecutorPlan, rows: Rows) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Flat indices of the tokens whose logits are drawn from: the last 1 + drafts of sampling rows."""
    ends = rows.offsets[1:]
    if not plan.drafts.any():
        return ends[plan.samples > 0] - 1
    each = (1 + plan.drafts) * plan.samples
    first = np.cumsum(each) - each
    return np.repeat(ends - each - first, each) + np.arange(int(each.sum()))


def draft_tokens(plan: ExecutorPlan, rows: Rows, state: Slots) -> I64:
    """All drafts, in row order, as they were computed, whoever proposed them."""
    ends, before = rows.offsets[1:], np.cumsum(plan.drafts) - plan.drafts
    flat = np.repeat(ends - plan.drafts - before, plan.drafts) + np.arange(int(plan.drafts.sum()))
    return state.tokens[np.repeat(plan.slots, plan.drafts), rows.host_places[flat]]


def _along(path: list[int], own: list[int], drawn: list[int]) -> list[tuple[int, int]]:
    # The drafts of a path, then what was drawn behind it.
    places = [0, *(node + 1 for node in path)]
    return list(zip(places, [*(own[node] for node in path), drawn[places[-1]]], strict=True))


def _walked(tree: Tree, own: list[int], drawn: list[int]) -> list[tuple[int, int]]:
    node, out = ROOT, []
    while True:
        token = drawn[node + 1]
        out.append((node + 1, token))
        node = tree.child(own, node, token)
        if node == ROOT:
            return out


def _merged(verdict: Verdict, special: dict[int, list[tuple[int, int]]]) -> Judged:
    accepted = verdict.accepted.copy()
    tokens: list[int] = []
    places: list[int] = []
    ends = np.cumsum(verdict.accepted)
    for i, gained in enumerate(verdict.accepted.tolist()):
        own = special.get(i)
        if own is None:
            places += range(gained)
            tokens += verdict.tokens[ends[i] - gained : ends[i]].tolist()
            continue
        accepted[i] = len(own)
        places += [place for place, _ in own]
        tokens += [token for _, token in own]
    return Judged(accepted, np.array(tokens, np.int32), np.array(places, np.int32))
