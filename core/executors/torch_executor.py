"""`TorchExecutor`: runs a model, its KV pools and the sampler in this process, on any torch device."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bien.core.clock import Clock
from bien.core.errors import PluginFault, ResourceError
from bien.core.executors.drafting import Drafting, Proposal, confirmed_rows
from bien.core.executors.pools import Pool, PoolIO, available_bytes
from bien.core.executors.rows import Rows
from bien.core.executors.slots import Slots
from bien.core.executors.trees import paths_of, trees_of
from bien.core.executors.verification import Judged, Verification, draft_tokens, yielding
from bien.core.kernels.base import Kernels
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.logprobs import TokenLogprobs
from bien.core.models.registry import CausalModel
from bien.core.plan import I32, ExecutorPlan, StateCopy, StepResult
from bien.core.sampling.logprobs import sliced_logprobs, token_logprobs
from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.speculator import DeviceSpeculator, DrafterParts

MAX_HOSTED = 64  # drafts of a row that come from the host, at most


@dataclass(slots=True)
class Step:
    """A forward that waits for `sample`."""

    plan: ExecutorPlan
    rows: Rows
    logits: Tensor  # [R, V] of the rows that yield tokens
    wanted: NDArray[np.int64]  # [R] which flat tokens these are
    began: float
    taps: dict[tuple[int, str], Tensor]  # what the drafter will absorb
    scores: dict[int, TokenLogprobs] | None = None  # by row, of prompt tokens, where asked for


class TorchExecutor:
    """See `Executor`. Steps run when they are called, in the caller's thread; futures come back done."""

    def __init__(
        self,
        model: CausalModel,
        groups: tuple[KVGroup, ...],
        kernels: Kernels,
        device: torch.device,
        clock: Clock,
        drafter: DeviceSpeculator | None = None,
        parts: DrafterParts | None = None,
        speculation: SpeculationSpec | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """`groups`: the model's, then the drafter's own (kind DRAFT). `parts`: with a drafter. `strict`: a
        drafter that fails is not left out but fails the step (ranks must not differ in what they leave
        out)."""
        self.model, self.groups, self.kernels, self.device = model, groups, kernels, device
        self.drafter, self._clock = drafter, clock
        self._taps = frozenset(drafter.caps.taps) if drafter else frozenset()
        self.speculation = speculation or SpeculationSpec()
        self._drafting: Drafting | None = None
        self.pools: tuple[Pool, ...] = ()
        self.io = PoolIO(())
        self.slots = Slots((), 0, 0)
        self._vocab = 0  # known from the first logits on
        if drafter is not None and parts is not None:
            own = tuple(i for i, g in enumerate(groups) if g.kind is GroupKind.DRAFT)
            with torch.inference_mode():
                drafter.load(model, own, parts)
            self._drafting = Drafting(drafter, own, self.speculation, strict=strict)

    def allocate(self, blocks: tuple[int, ...], slots: int, max_context: int) -> None:
        need = sum(g.block_bytes * (n + 1) for g, n in zip(self.groups, blocks, strict=True))
        free = available_bytes(self.device)
        if need > free:
            sizes = ", ".join(
                f"{g.name}: {n:,} blocks of {g.block_bytes:,} bytes"
                for g, n in zip(self.groups, blocks, strict=True)
            )
            raise ResourceError(
                f"KV pools need {need:,} bytes ({sizes}), but {free:,} are available on {self.device}; "
                "lower kv_tokens or slots of the pool"
            )
        self.pools = tuple(Pool.allocate(g, n, self.device) for g, n in zip(self.groups, blocks, strict=True))
        self.io = PoolIO(self.pools)
        drafts = max(self.drafter.caps.max_drafts if self.drafter else 0, MAX_HOSTED)
        self.slots = Slots(self.groups, slots, max_context + drafts + 2)

    @torch.inference_mode()
    def forward(self, plan: ExecutorPlan) -> Step:
        began = self._clock.time()
        self.slots.apply(plan)
        if self._drafting is not None:
            self._drafting.forget(plan.released)
        for copy in plan.restores:
            self._restore(copy)
        rows = Rows(
            self.pools,
            self.slots.tables,
            plan.slots,
            plan.starts,
            plan.counts,
            plan.drafts,
            self.kernels,
            self.device,
            trees=trees_of(plan),
        )
        if rows.trees:
            self._check_trees()
        if self.speculation.acceptance and self.slots.forced:
            self._record(plan, rows)
        slot = plan.slots if rows.tokens == plan.rows else np.repeat(plan.slots, plan.counts)
        tokens = torch.from_numpy(self.slots.tokens[slot, rows.host_places]).to(self.device)
        rows.ids = tokens
        hidden, taps = self.model.forward(tokens, rows, self._taps)
        scores = self._prompt_logprobs(plan, rows, hidden) if self.slots.prompt_logprobs else None
        wanted = yielding(plan, rows)
        if len(wanted) != rows.tokens:
            hidden = hidden.index_select(0, torch.from_numpy(wanted).to(self.device))
        logits = self.model.head(hidden) if len(wanted) else hidden.new_empty(0, 0)
        if len(wanted):
            self._vocab = logits.shape[1]
        return Step(plan, rows, logits, wanted, began, taps, scores)

    @torch.inference_mode()
    def sample(self, handle: Step, masks: Tensor | None = None) -> Future[StepResult]:
        """`masks`: [R, V] bool, True where a token is allowed, R = yielding rows."""
        plan = handle.plan
        accepted, tokens, logprobs = self.judge(handle, masks)
        self.commit(handle, accepted, tokens)
        return self.answer(handle, accepted, tokens, logprobs, self.draft(plan))

    # The parts of `sample`, for executors of several ranks.

    def answer(
        self,
        handle: Step,
        accepted: I32,
        tokens: I32,
        logprobs: dict[int, TokenLogprobs] | None,
        drafts: Proposal | None,
    ) -> Future[StepResult]:
        """The result of a step that has been committed, done."""
        result = StepResult(handle.plan.step, accepted, tokens)
        result.seconds = self._clock.time() - handle.began
        result.logprobs, result.prompt_logprobs = logprobs, handle.scores
        if drafts is not None:
            result.proposed, result.confidence = drafts.counts, drafts.confidence
            result.parents = drafts.parents
        done: Future[StepResult] = Future()
        done.set_result(result)
        return done

    @torch.inference_mode()
    def judge(
        self, handle: Step, masks: Tensor | None = None
    ) -> tuple[I32, I32, dict[int, TokenLogprobs] | None]:
        """(accepted, tokens, logprobs) of a `StepResult`: reads the logits, changes nothing."""
        plan, rows = handle.plan, handle.rows
        if not len(handle.logits):
            return np.zeros(plan.rows, np.int32), np.zeros(0, np.int32), None
        laws = {} if self._drafting is None else self._drafting.tested(plan)
        found = Verification(
            plan, rows, handle.logits, handle.wanted, self.slots, self.speculation, laws
        ).judge(masks)
        logprobs = self._logprobs(handle, found) if self.slots.logprobs else None
        return found.accepted, found.tokens, logprobs

    @torch.inference_mode()
    def commit(self, handle: Step, accepted: I32, tokens: I32) -> None:
        """Take over what a step yielded: tokens, settled states, snapshots, what the drafter absorbs."""
        plan, rows, taps = handle.plan, handle.rows, handle.taps
        if rows.trees:
            rows, taps = self._straightened(handle, accepted, tokens)
        self.slots.extend(plan.slots, accepted, tokens)
        self._settle(plan, rows, accepted)
        for copy in plan.snapshots:
            self._snapshot(copy, plan, rows, accepted)
        if self._drafting is not None:
            confirmed = confirmed_rows(plan.counts, plan.drafts, accepted)
            self._drafting.absorb(rows, taps, confirmed)

    @torch.inference_mode()
    def draft(self, plan: ExecutorPlan) -> Proposal | None:
        """Let the device drafter put drafts behind the rows of a committed plan; None without one."""
        drafting, state = self._drafting, self.slots
        if drafting is None:
            return None
        limits = drafting.limits(state, plan.slots, plan.samples)
        nothing = Proposal(np.zeros(plan.rows, np.int32))
        chosen = np.flatnonzero(limits)
        if not len(chosen):
            return nothing
        slots, ones = plan.slots[chosen], np.ones(len(chosen), np.int32)
        last = torch.from_numpy(state.tokens[slots, state.lengths[slots] - 1]).to(self.device)
        rows = Rows(
            self.pools,
            state.tables,
            slots,
            (state.lengths[slots] - 1).astype(np.int32),
            ones,
            np.zeros_like(ones),
            self.kernels,
            self.device,
            ids=last,
        )
        proposal = drafting.propose(state, rows, limits[chosen], self._vocab)
        if proposal is None:
            return nothing
        nothing.counts[chosen] = proposal.counts
        return Proposal(nothing.counts, proposal.confidence, proposal.parents)

    def close(self) -> None:
        if self.drafter is not None:
            self.drafter.close()
        self.pools, self.io = (), PoolIO(())

    def _check_trees(self) -> None:
        # What they leave behind can be moved to the taken path only where it is entries of attention.
        for group in self.groups:
            if group.kind not in (GroupKind.FULL, GroupKind.WINDOW, GroupKind.DRAFT):
                raise PluginFault(
                    f"a plan has trees of drafts, and KV group {group.name!r} is of kind "
                    f"{group.kind.value!r}; valid for trees: full, window"
                )

    def _record(self, plan: ExecutorPlan, rows: Rows) -> None:
        # Accepted lengths are drawn: what may be accepted must be the recorded text.
        state = self.slots
        for i, (slot, drafts) in enumerate(zip(plan.slots.tolist(), plan.drafts.tolist(), strict=True)):
            text = state.forced.get(slot)
            if text is None or not drafts:
                continue
            path = rows.trees[i].first_path() if i in rows.trees else list(range(drafts))
            begin = int(state.lengths[slot])
            known = text[begin - int(state.prompts[slot]) :][: len(path)]
            state.tokens[slot, begin + np.array(path[: len(known)], np.int64)] = known

    def _straightened(
        self, handle: Step, accepted: I32, tokens: I32
    ) -> tuple[Rows, dict[tuple[int, str], Tensor]]:
        # The taken path of every tree comes to the front: its entries, and its rows for the drafter.
        plan, rows, state = handle.plan, handle.rows, self.slots
        own = draft_tokens(plan, rows, state)
        order = np.arange(rows.tokens)
        source: list[int] = []
        target: list[int] = []
        for i, path in paths_of(rows.trees, plan, own, accepted, tokens).items():
            first = int(rows.offsets[i + 1]) - int(plan.drafts[i])
            others = sorted(set(range(int(plan.drafts[i]))) - set(path))
            order[first : int(rows.offsets[i + 1])] = first + np.array(path + others)
            source += [first + node for node in path]
            target += range(first, first + len(path))
        if source != target:
            for g, group in enumerate(self.groups):
                if group.kind is not GroupKind.DRAFT:
                    places = rows.group(g).mapping
                    flat = self.pools[g].data.flatten(1, 2)
                    flat[:, places[target]] = flat[:, places[source]]
        moved = torch.from_numpy(order).to(self.device)
        chains = Rows(
            self.pools,
            state.tables,
            plan.slots,
            plan.starts,
            plan.counts,
            plan.drafts,
            self.kernels,
            self.device,
            ids=rows.ids.index_select(0, moved),
        )
        return chains, {tap: x.index_select(0, moved) for tap, x in handle.taps.items()}

    def _logprobs(self, handle: Step, found: Judged) -> dict[int, TokenLogprobs]:
        plan, out = handle.plan, {}
        each = (1 + plan.drafts) * plan.samples
        rows, ends = (np.cumsum(each) - each).tolist(), np.cumsum(found.accepted).tolist()
        for i, (slot, gained) in enumerate(zip(plan.slots.tolist(), found.accepted.tolist(), strict=True)):
            top = self.slots.logprobs.get(slot)
            if top is not None and gained:
                own = slice(ends[i] - gained, ends[i])
                logits = handle.logits[rows[i] : rows[i] + gained]
                if found.places is not None:
                    logits = handle.logits[rows[i] + found.places[own].astype(np.int64)]
                out[i] = token_logprobs(logits, found.tokens[own], top)
        return out

    def _prompt_logprobs(self, plan: ExecutorPlan, rows: Rows, hidden: Tensor) -> dict[int, TokenLogprobs]:
        state, out = self.slots, {}
        for i, slot in enumerate(plan.slots.tolist()):
            top, start = state.prompt_logprobs.get(slot), int(plan.starts[i])
            # The position before a token predicts it; what the prompt's last one predicts is output.
            count = min(int(plan.counts[i]), int(state.prompts[slot]) - 1 - start)
            if top is not None and count > 0:
                first = int(rows.offsets[i])
                tokens = state.tokens[slot, start + 1 : start + 1 + count].astype(np.int32)
                out[i] = sliced_logprobs(hidden[first : first + count], self.model.head, tokens, top)
        return out

    def _restore(self, copy: StateCopy) -> None:
        data = self.pools[copy.group].data
        if copy.src:
            data[:, copy.dst].copy_(data[:, copy.src])
        else:
            data[:, copy.dst].zero_()

    def _settle(self, plan: ExecutorPlan, rows: Rows, accepted: I32) -> None:
        # After rejected drafts a recurrent state is put back to the last accepted token.
        ends = np.cumsum(rows.keep)
        for group, kept in rows.kept.items():
            live = self.pools[group]
            for i in np.flatnonzero((plan.drafts > 0) & (accepted <= plan.drafts)).tolist():
                index = int(ends[i]) - int(rows.keep[i]) + int(accepted[i]) - 1
                block = int(self.slots.tables[group][plan.slots[i], 0])
                live.data[:, block].copy_(kept[:, index])

    def _snapshot(self, copy: StateCopy, plan: ExecutorPlan, rows: Rows, accepted: I32) -> None:
        i = int(np.flatnonzero(plan.slots == copy.slot)[0])
        drafts = int(plan.drafts[i])
        behind = copy.position - int(plan.starts[i] + plan.counts[i]) + drafts  # drafts among the tokens
        if not 0 <= behind <= drafts:
            raise PluginFault(
                f"snapshot of slot {copy.slot} at {copy.position}: its step keeps states from "
                f"{copy.position - behind} to {copy.position - behind + drafts} only"
            )
        data = self.pools[copy.group].data
        if not drafts:
            data[:, copy.dst].copy_(data[:, copy.src])
        elif behind < int(accepted[i]):
            first = int(rows.keep[:i].sum())
            data[:, copy.dst].copy_(rows.kept[copy.group][:, first + behind])
