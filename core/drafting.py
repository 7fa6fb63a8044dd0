"""`Drafting`: the drafts of all sequences, from who proposes them to what became of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from bien.core.content import TokenContent
from bien.core.flight import FlightItem
from bien.core.guarded import GuardedSpeculator
from bien.core.plan import StepPlan, StepResult
from bien.core.sequence import Sequence, Status
from bien.core.speculation.acceptance import Acceptance
from bien.core.speculation.counts import DraftCounts
from bien.core.speculation.draft import Draft, Scope
from bien.core.speculation.lengths import Lengths, Load, depths, survival
from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.prediction import MOST as PREDICTED
from bien.core.speculation.prediction import PREDICTION, Prediction


class Drafting:
    """Of one engine. Drafts come from what a client predicts, as long as that comes true; else from a host
    drafter, or from a device drafter with the results of steps."""

    def __init__(
        self,
        host: GuardedSpeculator | None,
        device_drafts: int,
        spec: SpeculationSpec,
        *,
        name: str,
        drawn: bool,
        trusted: bool,
    ) -> None:
        """`device_drafts`: of a round of a device drafter, 0 without one. `name`: of the drafter, for counts.
        `drawn`: its drafts are drawn, and judged by their law. `trusted`: their confidences may be used in
        the same round."""
        self.lengths = Lengths(spec, stale=drawn)
        self._host = host
        self._name = name
        self._spec = spec
        self._drawn = drawn
        self._trusted = trusted
        self._chosen = spec.length != "fixed"
        most = host.caps.max_drafts if host else device_drafts
        self._most = most if spec.max_drafts is None else min(most, spec.max_drafts)
        self._observed = Acceptance()
        self._predicted = 0  # sequences with slot, KV and a prediction
        self._largest = 0  # prompt tokens of a step, of all so far
        self.counts = DraftCounts()

    # -- a sequence's life

    def enter(self, s: Sequence) -> None:
        """It was submitted: settle whether it drafts, and how much."""
        sampling, predicted = s.request.sampling, s.request.prediction
        if not sampling.speculate:
            return
        known = s.content.ids_known
        s.max_drafts = self._most if known or self._host is None else 0
        if predicted is not None and known and self._spec.max_drafts != 0:
            s.prediction = Prediction(predicted.ids().tolist())
            s.max_drafts = max(s.max_drafts, PREDICTED)
        for most in (self._spec.max_drafts, sampling.max_drafts):
            s.max_drafts = s.max_drafts if most is None else min(s.max_drafts, most)

    def start(self, s: Sequence) -> None:
        """It got slot and KV."""
        self._predicted += s.prediction is not None
        if self._host is not None and s.max_drafts and isinstance(s.content, TokenContent):
            scope = Scope(s.request.tenant, s.request.session, s.request.salt)
            self._host.start(s.id, s.content.tokens(), scope)

    def extend(self, s: Sequence, tokens: list[int]) -> None:
        """It gained tokens."""
        if s.prediction is not None:
            s.prediction.extend(tokens)
        if self._host is not None and s.max_drafts and s.kv is not None:
            self._host.extend(s.id, tokens)

    def stop(self, s: Sequence) -> None:
        """It lost slot and KV."""
        self._predicted -= s.prediction is not None
        if self._host is not None and s.max_drafts:
            self._host.end(s.id)

    # -- a round

    def propose(self, s: Sequence, room: int, proposed: int = 0, draft: Draft | None = None) -> None:
        """Drafts for its next step, which has room for so many. `proposed`, `draft`: a device drafter's
        count, parents and confidences."""
        limit = min(room, s.max_drafts)
        if limit <= 0 or s.status is not Status.RUNNING:
            return
        if s.prediction is not None and (tokens := s.prediction.propose(min(limit, self._share))):
            s.draft, s.ready, s.hosted = Draft(tokens, source=PREDICTION), len(tokens), True
        elif self._host is not None:
            s.draft = self._host.propose(s.id, min(limit, self._most))
            s.ready, s.hosted = len(s.draft), True
        elif proposed:
            known = Draft() if draft is None else draft  # without tokens it is false
            s.draft, s.ready, s.hosted = known, min(proposed, limit), False
        s.drafts = s.ready

    def admit(self, sequences: Iterable[Sequence], slots: int) -> None:
        """Say how many of the drafts that are ready the next step may verify. `slots`: those free, for
        sequences that wait."""
        if not self._chosen:
            return
        drafting, load, prompts = [], Load(0, 0), 0
        for s in sequences:
            if s.status is Status.RUNNING:
                if s.ready:
                    drafting.append(s)
                if (pending := s.pending) == 1:
                    load.gaining += 1
                else:
                    prompts += pending
            elif s.status is Status.WAITING and slots:
                slots -= 1
                prompts += s.pending
        if drafting:
            load.tokens = load.gaining + min(prompts, self._largest)
            self._admit(drafting, load)

    def even(self, plan: StepPlan) -> None:
        """A scheduler may leave drafts out: whoever comes last. Which drafts are verified must not depend on
        drawn tokens, as would how many a sequence has left: the likeliest of all stay instead."""
        if not self._drawn or not self._chosen:
            return
        items = [item for item in plan.items if item.sequence.drafts]
        kept = sum(item.drafts for item in items)
        if kept == sum(item.sequence.drafts for item in items):
            return
        counts = self.lengths.best([self._chances(item.sequence) for item in items], kept)
        for item, count in zip(items, counts, strict=True):
            s, new = item.sequence, item.tokens - item.drafts
            item.drafts = min(count, s.drafts, max(0, s.reserved - s.planned - new))
            item.tokens = new + item.drafts

    def planned(self, items: list[FlightItem]) -> None:
        """A step begins."""
        if self._chosen:
            prompts = sum(item.count for item in items if item.count - item.drafts > 1)
            self._largest = max(self._largest, prompts)

    def observe(self, item: FlightItem, accepted: int) -> None:
        """What became of a row's drafts."""
        s, source, depth = item.sequence, item.source or self._name, item.depth
        self.counts.add(source, item.drafts, depth, accepted)
        s.counts.add(source, item.drafts, depth, accepted)
        self._observed.add(source, depth, accepted)
        if self._host is not None and source != PREDICTION:
            self._host.observe(s.id, item.drafts, accepted)

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many positions took so long."""
        if self._chosen:
            self.lengths.cost.add(tokens, seconds)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

    # -- parts of it

    @property
    def _share(self) -> int:
        # Of what may be drafted of predictions in a step.
        return PREDICTED // max(1, self._predicted)

    def _admit(self, drafting: list[Sequence], load: Load) -> None:
        guessed = any(self._told(s) is None for s in drafting)
        # A sequence's drafts follow its last token: with it come new ones.
        rounds: list[Hashable] = [(s.order, s.length) for s in drafting]
        counts = self.lengths.admit([self._chances(s) for s in drafting], load, guessed, rounds)
        for s, count in zip(drafting, counts, strict=True):
            s.drafts = count

    def _told(self, s: Sequence) -> list[float] | None:
        # Confidences of a drafter that may be used.
        return s.draft.confidence if self._trusted or s.hosted else None

    def _chances(self, s: Sequence) -> list[float]:
        """That each of its drafts is accepted, those before it included."""
        told, parents = self._told(s), s.draft.parents
        if parents is not None:
            parents = parents[: s.ready]
        if told is not None:
            return survival(told[: s.ready], parents)
        at = depths(s.ready, parents)
        chances = self._observed.chances(s.draft.source or self._name, max(at))
        if parents is None:
            return survival(chances, None)
        # One of several siblings is accepted at most.
        return survival(
            [chances[d - 1] / parents.count(p) for d, p in zip(at, parents, strict=True)], parents
        )


def proposals(result: StepResult) -> list[tuple[int, Draft | None]] | None:
    """What a device drafter has ready for each row: how many drafts, and what it says of them."""
    if result.proposed is None:
        return None
    counts, out, at = result.proposed.tolist(), [], 0
    for count in counts:
        told, parents = (
            None if values is None else values[at : at + count].tolist()
            for values in (result.confidence, result.parents)
        )
        out.append((count, None if told is None and parents is None else Draft([], parents, told)))
        at += count
    return out
