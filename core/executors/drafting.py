"""`Drafting`: the device drafter of an executor: what it absorbs, when it proposes, and what was proposed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bien.core.errors import PluginFault
from bien.core.executors.rows import Rows
from bien.core.executors.slots import Slots
from bien.core.guarded import Guard, StrictGuard
from bien.core.plan import F32, I32, ExecutorPlan
from bien.core.sampling.rejection import Law
from bien.core.speculation.drawer import RoundDrawer
from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.speculator import DeviceDraft, DeviceSpeculator


@dataclass(slots=True)
class Proposal:
    """As the fields of `StepResult`."""

    counts: I32
    confidence: F32 | None = None
    parents: I32 | None = None


class Drafting:
    """Writes drafts behind the known tokens of `Slots`."""

    def __init__(
        self, drafter: DeviceSpeculator, groups: tuple[int, ...], spec: SpeculationSpec, *, strict: bool
    ) -> None:
        """`groups`: plan indices of the drafter's own. `strict`: its failures are let through."""
        self.drafter, self.groups, self.spec = drafter, groups, spec
        self.laws: dict[int, list[Law]] = {}  # slot -> of its drafts, where they are sampled and tested
        self._guard = (StrictGuard if strict else Guard)("speculator", drafter)

    def absorb(self, rows: Rows, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        self._guard.call(partial(self.drafter.absorb, rows, taps, confirmed), None)

    def limits(self, state: Slots, slots: I32, samples: I32) -> I32:
        """How many tokens may be drafted for each row now."""
        limits = np.minimum(state.max_drafts[slots], self.drafter.caps.max_drafts) * samples
        if self._guard.broken:
            return np.zeros_like(limits)
        for i in np.flatnonzero(limits).tolist():
            slot = int(slots[i])
            # The drafter writes its KV at the last known position and behind it: only where blocks are.
            limits[i] = max(0, min([int(limits[i]), *(state.room(g, slot) + 1 for g in self.groups)]))
        return limits.astype(np.int32)

    def forget(self, slots: I32) -> None:
        """Their sequences have left."""
        for slot in slots.tolist():
            self.laws.pop(slot, None)

    def tested(self, plan: ExecutorPlan) -> dict[int, list[Law]]:
        """Laws of the plan's drafts, where they are sampled and tested against them."""
        if not self.laws or not plan.device_drafts:
            return {}
        given = np.zeros_like(plan.drafts) if not len(plan.hosted) else plan.hosted
        own = plan.slots[(plan.drafts > 0) & (given == 0)].tolist()
        return {slot: self.laws[slot] for slot in own if slot in self.laws}

    def propose(self, state: Slots, rows: Rows, limits: I32, vocab: int) -> Proposal | None:
        """Of the sequences of `rows`, each at its last token, at most limits[i] >= 1 drafts."""
        for slot in rows.slots.tolist():
            self.laws.pop(slot, None)
        drawer = RoundDrawer(
            self.spec,
            self.drafter.caps.deterministic,
            state.seeds[rows.slots],
            state.choices[rows.slots],
            state.temperature[rows.slots],
            rows.host_positions + 1 - state.prompts[rows.slots],
        )
        limit = int(limits.max())
        draft = self._guard.call(partial(self._checked, rows, limit, drawer, vocab), None)
        if draft is None:
            return None
        tokens, confidence, parents = draft
        counts = np.minimum(limits, tokens.shape[1]).astype(np.int32)
        for i, (slot, count) in enumerate(zip(rows.slots.tolist(), counts.tolist(), strict=True)):
            state.draft(slot, tokens[i, :count])
            laws = drawer.laws(i)
            if laws is not None:
                self.laws[slot] = laws
        taken = np.arange(tokens.shape[1]) < counts[:, None]
        return Proposal(
            counts,
            None if confidence is None else confidence[taken].astype(np.float32),
            None if parents is None else parents[taken].astype(np.int32),
        )

    def _checked(
        self, rows: Rows, limit: int, drawer: RoundDrawer, vocab: int
    ) -> tuple[I32, F32 | None, NDArray[np.integer[Any]] | None]:
        draft = self.drafter.propose(rows, rows.ids, limit, drawer)
        if not isinstance(draft, DeviceDraft):
            raise PluginFault(f"a drafter proposed {type(draft).__name__}; valid: a DeviceDraft")
        tokens = _ids("drafts", draft.tokens)
        if tokens.ndim != 2 or len(tokens) != len(rows.slots) or tokens.shape[1] > limit:
            valid = f"({len(rows.slots)}, 0 to {limit})"
            raise PluginFault(f"drafts have shape {tokens.shape}; valid: {valid}")
        if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab):
            found = f"{tokens.min()} to {tokens.max()}"
            raise PluginFault(f"drafts hold ids from {found}; valid: 0 to {vocab - 1}")
        confidence = None if draft.confidence is None else draft.confidence.float().cpu().numpy()
        if confidence is not None:
            if confidence.shape != tokens.shape:
                raise PluginFault(f"confidences have shape {confidence.shape}; valid: {tokens.shape}")
            if not bool(((confidence >= 0) & (confidence <= 1)).all()):
                raise PluginFault("confidences lie outside 0 to 1")
        parents = None if draft.parents is None else _ids("parents", draft.parents)
        if parents is not None:
            self._check_tree(tokens.shape, parents)
        elif len(drawer.warm) and drawer.tested:
            self._check_law(tokens, drawer)
        return tokens.astype(np.int32), confidence, parents

    def _check_tree(self, shape: tuple[int, ...], parents: NDArray[np.integer[Any]]) -> None:
        if self.drafter.caps.topology != "tree":
            raise PluginFault("drafts have parents, but the drafter's caps say topology 'chain'")
        if parents.shape != shape:
            raise PluginFault(f"parents have shape {parents.shape}; valid: {shape}")
        if not bool(((parents >= -1) & (parents < np.arange(shape[1]))).all()):
            raise PluginFault("a node's parent comes behind it; valid: -1, or the index of an earlier node")

    @staticmethod
    def _check_law(tokens: NDArray[np.integer[Any]], drawer: RoundDrawer) -> None:
        # Verification tests drafts against the law that they were drawn from: it must be theirs.
        if tokens.shape[1] > len(drawer.draws):
            raise PluginFault(
                f"{tokens.shape[1]} drafts, but {len(drawer.draws)} were drawn through `Drawer.draw`"
            )
        for j in range(tokens.shape[1]):
            drawn = drawer.draws[j].tokens.cpu().numpy()
            if not bool((drawn[drawer.warm] == tokens[drawer.warm, j]).all()):
                raise PluginFault(f"draft {j} is not what `Drawer.draw` gave")


def _ids(what: str, values: Tensor) -> NDArray[np.integer[Any]]:
    if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype is torch.bool:
        raise PluginFault(f"{what} have dtype {values.dtype}; valid: int64")
    return values.cpu().numpy()


def confirmed_rows(counts: I32, drafts: I32, accepted: I32) -> Tensor:
    """[S] int64 how many of a sequence's rows hold confirmed tokens, once a step yielded `accepted`."""
    known = counts - drafts + np.maximum(accepted - 1, 0)
    return torch.from_numpy(known.astype(np.int64))
