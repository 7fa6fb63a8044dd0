"""The drafts of an engine's sequences: whose they are, how many, and what became of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bien.core.build import check_topology, drafting_limits
from bien.core.deployment import PoolSpec, Selection
from bien.core.drafting import Drafting
from bien.core.errors import DeploymentError
from bien.core.flight import FlightItem
from bien.core.plan import ExecutorPlan, PlanItem, StepPlan
from bien.core.request import SamplingParams, TokenIds
from bien.core.speculation.draft import Draft, Scope
from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.prediction import MOST as PREDICTED
from bien.core.speculation.speculator import SpeculatorCaps
from bien.core.testing.harness import Harness, toy_groups
from bien.core.testing.hash_executor import oracle
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig

GROUPS = toy_groups()
PROMPT = [random.Random(i).randrange(50) for i in range(12)]


class Knowing:
    """Drafts what the model will say, and is as sure of each as it is told."""

    def __init__(self, confidence: list[float] | None = None, source: str = "", most: int = 4) -> None:
        self.caps = _caps(most, confidence)
        self.confidence, self.source = confidence, source
        self.texts: dict[str, list[int]] = {}
        self.scopes: list[Scope] = []
        self.observed: list[tuple[int, int]] = []

    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        self.texts[id] = list(tokens)
        self.scopes.append(scope)

    def extend(self, id: str, tokens: list[int]) -> None:
        self.texts[id] += tokens

    def propose(self, id: str, limit: int) -> Draft:
        told = None if self.confidence is None else self.confidence[:limit]
        return Draft(oracle(self.texts[id], limit, GROUPS), None, told, self.source)

    def observe(self, id: str, drafted: int, accepted: int) -> None:
        self.observed.append((drafted, accepted))

    def end(self, id: str) -> None:
        del self.texts[id]

    def close(self) -> None:
        pass


def _caps(most: int, confidence: list[float] | None) -> SpeculatorCaps:
    return SpeculatorCaps(place="host", max_drafts=most, confidence="own" if confidence else "none")


def harness(speculator: Any = None, budget: int = 64, **fields: Any) -> Harness:
    return Harness(Fcfs(FcfsConfig(token_budget=budget)), groups=GROUPS, speculator=speculator, **fields)


def watched(h: Harness) -> list[ExecutorPlan]:
    plans: list[ExecutorPlan] = []
    forward = h.executor.forward

    def kept(plan: ExecutorPlan) -> Any:
        plans.append(plan)
        return forward(plan)

    h.executor.forward = kept  # type: ignore[method-assign]
    return plans


def asking(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, seed=0, **fields)


@pytest.mark.parametrize(("asked", "pool", "most"), [
    (None, None, 4), (2, None, 2), (None, 3, 3), (2, 3, 2), (9, 9, 4), (0, None, 0), (None, 0, 0),
])  # fmt: skip
@pytest.mark.parametrize("place", ["host", "device"])
def test_a_round_has_no_more_drafts_than_each_allows(
    asked: int | None, pool: int | None, most: int, place: str
) -> None:
    options: dict[str, Any] = {"drafting": {"speculation": SpeculationSpec(max_drafts=pool)}}
    if place == "host":
        h = harness(Knowing(), **options)
    else:
        h = harness(draft=lambda text: oracle(text, 4, GROUPS), device_drafts=4, **options)
    plans = watched(h)
    h.submit("a", PROMPT, sampling=asking(max_drafts=asked))
    h.run()
    h.expect("a", PROMPT)
    assert max(int(plan.drafts.max()) for plan in plans) == most


def test_who_opts_out_is_not_even_known_to_the_drafter() -> None:
    knowing = Knowing()
    h = harness(knowing)
    h.submit("out", PROMPT, sampling=asking(speculate=False))
    h.submit("none", PROMPT, sampling=asking(max_drafts=0))
    h.run()
    assert not knowing.scopes
    h.submit("in", PROMPT, sampling=asking(), tenant="t", session="s", salt="pepper")
    h.run()
    assert knowing.scopes == [Scope("t", "s", "pepper")]


def test_drafts_are_cut_where_their_chance_falls_too_low() -> None:
    knowing = Knowing([0.9, 0.9, 0.5, 0.9])
    options = {"speculation": SpeculationSpec(length="confidence", min_chance=0.6)}
    h = harness(knowing, drafting=options)
    h.submit("a", PROMPT, sampling=asking())
    h.run()
    h.expect("a", PROMPT)
    assert set(knowing.observed) <= {(2, 2), (1, 1)}
    assert (2, 2) in knowing.observed


def test_drafters_that_say_nothing_are_judged_by_what_was_observed() -> None:
    """Half a chance at first, which two drafts do not have; then all are taken."""
    knowing = Knowing()
    options = {"speculation": SpeculationSpec(length="confidence", min_chance=0.5)}
    h = harness(knowing, drafting=options, max_context=400, blocks=200)
    h.submit("a", PROMPT, sampling=SamplingParams(200, temperature=0.0, ignore_eos=True, seed=0))
    h.run()
    assert knowing.observed[0] == (1, 1)
    assert knowing.observed[20] == (4, 4)


@pytest.mark.parametrize(("sequences", "per_round"), [(1, 2), (16, 0)])
def test_a_budget_follows_the_engines_own_steps(sequences: int, per_round: int) -> None:
    """A step costs as much as 16 positions beside its own: unlikely drafts pay for one sequence only."""
    knowing = Knowing([0.3] * 4)
    options = {"speculation": SpeculationSpec(length="budget")}
    h = harness(knowing, 256, drafting=options, slots=16, blocks=400)
    plans = watched(h)
    for i in range(sequences):
        h.submit(str(i), PROMPT, sampling=SamplingParams(120, temperature=0.0, ignore_eos=True, seed=0))
    h.run()
    h.expect("0", PROMPT)
    late = [n for plan in plans[len(plans) // 2 :] if plan.rows == sequences for n in plan.drafts.tolist()]
    assert sorted(late)[len(late) // 2] == per_round


def test_counts_by_source_and_position() -> None:
    h = harness(Knowing(source="mine"))
    h.submit("a", PROMPT, sampling=asking())
    h.run()
    counts = h.engine.stats()
    assert counts.drafts is not None
    (mine,) = counts.drafts.sources.values()
    assert list(counts.drafts.sources) == ["mine"]
    assert mine.drafted == counts.drafted == sum(mine.drafted_at)
    assert mine.accepted_at == mine.drafted_at
    assert len(mine.drafted_at) == 4


def test_a_drafter_without_a_source_is_named_as_in_the_deployment() -> None:
    h = harness(Knowing(), drafting={"drafter": "knowing"})
    h.submit("a", PROMPT, sampling=asking())
    h.run()
    drafts = h.engine.stats().drafts
    assert drafts is not None
    assert list(drafts.sources) == ["knowing"]


@pytest.mark.parametrize("pool", ["none", "host", "device"])
def test_a_clients_prediction_comes_first(pool: str) -> None:
    """Beside any drafter or none; where it went wrong the pool's own goes on."""
    wrong = lambda text: [(t + 1) % 50 for t in oracle(text, 3, GROUPS)]  # noqa: E731
    options: dict[str, Any] = {"device": {"draft": wrong, "device_drafts": 3}}.get(pool, {})
    own = Knowing(most=2)
    h = harness(own if pool == "host" else None, drafting={"drafter": "own"}, **options)
    plans = watched(h)
    right = oracle(PROMPT, 40, GROUPS)
    expected = TokenIds.of(right[:20] + [60] * 3 + right[26:])
    sampling = SamplingParams(40, temperature=0.0, ignore_eos=True, seed=0)
    h.submit("a", PROMPT, sampling=sampling, prediction=expected)
    h.submit("b", PROMPT[:5], 12)
    h.run()
    h.expect("a", PROMPT)
    h.expect("b", PROMPT[:5])
    drafts = h.engine.stats().drafts
    assert drafts is not None
    found = drafts.sources["prediction"]
    assert found.accepted >= 24
    assert found.drafted - found.accepted < 24
    assert ("own" in drafts.sources) is (pool != "none")
    if pool == "host":
        assert drafts.sources["own"].drafted == sum(n for n, _ in own.observed)
    hosted = [plan for plan in plans if len(plan.hosted)]
    assert bool(hosted) is (pool == "device")
    for plan in hosted:
        assert set(plan.hosted.tolist()) <= {0, *plan.drafts.tolist()}
        assert len(plan.draft_tokens) == plan.hosted.sum()


def test_predictions_share_what_a_step_may_draft() -> None:
    """What their logits take is counted once for all."""
    h = harness(slots=8, blocks=200)
    plans = watched(h)
    prompts = [PROMPT[: 4 + i] for i in range(8)]
    for i, prompt in enumerate(prompts):
        right = TokenIds.of(oracle(prompt, 40, GROUPS))
        count = 40 if i == 0 else 8
        sampling = SamplingParams(count, temperature=0.0, ignore_eos=True, seed=0)
        h.submit(str(i), prompt, sampling=sampling, prediction=right)
    h.engine.abort("7")
    h.run()
    h.expect("0", prompts[0])
    assert max(int(plan.drafts.sum()) for plan in plans) <= PREDICTED
    assert max(int(plan.drafts.max()) for plan in plans) > PREDICTED // 2, "whoever is left alone has all"
    assert any(plan.rows == 7 and set(plan.drafts.tolist()) == {PREDICTED // 7} for plan in plans)


def test_who_drafts_nothing_gets_no_prediction_either() -> None:
    for fields, pool in (({"speculate": False}, None), ({"max_drafts": 0}, None), ({}, 0)):
        h = harness(drafting={"speculation": SpeculationSpec(max_drafts=pool)})
        h.submit("a", PROMPT, sampling=asking(**fields), prediction=TokenIds.of(oracle(PROMPT, 20, GROUPS)))
        h.run()
        assert h.engine.stats().drafted == 0


def test_a_sequence_without_prediction_does_not_wait_for_others() -> None:
    """Of a pool without a drafter, only those with a prediction wait for each step to end."""
    h = harness(depth=2)
    h.submit("a", PROMPT, 8, prediction=TokenIds.of([1, 2]))
    h.submit("b", PROMPT[:4], 8)
    plans = watched(h)
    h.run()
    assert max(plan.rows for plan in plans) == 2
    assert any(plan.rows == 1 and int(plan.slots[0]) == 1 for plan in plans)


def sequences(confidences: list[list[float]]) -> list[Any]:
    h = harness(slots=len(confidences))
    for i in range(len(confidences)):
        h.submit(str(i), PROMPT, 20)
    h.step()
    found = list(h.engine._sequences.values())
    for s, told in zip(found, confidences, strict=True):
        s.draft, s.ready = Draft([], None, told), len(told)
        s.reserved = s.planned + 1 + len(told)
    return found


def drawn(length: str = "budget", **fields: bool) -> Drafting:
    spec = SpeculationSpec(length=length, verification="standard")  # type: ignore[arg-type]
    return Drafting(None, 4, spec, **{"name": "d", "drawn": True, "trusted": True, **fields})  # type: ignore[arg-type]


def test_what_a_scheduler_leaves_out_is_the_least_likely() -> None:
    """Not the drafts of whoever comes last: how many those are would depend on what was drawn."""
    drafting, found = drawn(), sequences([[0.2, 0.2], [0.9, 0.9], [0.95, 0.1]])
    drafting.admit(found, 0)
    assert [s.drafts for s in found] == [2, 2, 2]
    plan = StepPlan([PlanItem(found[0], 3, 2), PlanItem(found[1], 2, 1), PlanItem(found[2], 1, 0)])
    drafting.even(plan)
    assert [item.drafts for item in plan.items] == [0, 2, 1]
    assert [item.tokens for item in plan.items] == [1, 3, 2]


class Holding(Fcfs):
    """Leaves sequence "a" out of so many steps once its drafts of a round are there."""

    def __init__(self, held: int) -> None:
        super().__init__(FcfsConfig(token_budget=64))
        self.held, self.now = held, False

    def plan(self, view: Any) -> StepPlan:
        plan = super().plan(view)
        if self.now and self.held:
            self.held -= 1
            plan.items = [item for item in plan.items if item.sequence.id != "a"]
        return plan


def verified(chance: float, held: int) -> list[int]:
    """Of a sequence's rounds, how many of four drafts were verified. In the fifth all had this chance, and
    the scheduler then held the sequence back; in all others they had a better one."""
    rounds: list[int] = []

    def draft(context: list[int]) -> Draft:
        rounds.append(0)
        scheduler.now = len(rounds) == 5
        return Draft(oracle(context, 4, GROUPS), None, [chance if scheduler.now else 0.9] * 4)

    scheduler = Holding(held)
    spec = SpeculationSpec(length="budget", verification="standard")
    options = {"speculation": spec, "drawn": True, "trusted": True}
    h = Harness(scheduler, groups=GROUPS, draft=draft, device_drafts=4, drafting=options)
    plans = watched(h)
    h.submit("a", PROMPT, sampling=SamplingParams(60, temperature=0.0, ignore_eos=True, seed=0))
    h.submit("b", PROMPT[:5], sampling=SamplingParams(60, temperature=0.0, ignore_eos=True, max_drafts=0))
    while len(rounds) < 9:
        h.step()
    counts = [dict(zip(p.slots.tolist(), p.drafts.tolist(), strict=True)) for p in plans]
    return [c[0] for c in counts if 0 in c][1:]


@pytest.mark.parametrize("held", [0, 1, 3, 6])
def test_a_budget_is_blind_to_the_drafts_that_it_admits(held: int) -> None:
    """However often they were there before, for a scheduler left their sequence out."""
    likely, unlikely = verified(0.99, held), verified(0.01, held)
    assert likely[:6] == unlikely[:6] and likely[4] == 4
    assert (likely[6], unlikely[6]) == (4, 0), "two rounds later it knows"


def test_confidences_that_know_the_drawn_token_are_not_used() -> None:
    found = sequences([[0.99] * 4, [0.01] * 4])
    told, blind = drawn("confidence"), drawn("confidence", trusted=False)
    told.admit(found, 0)
    assert [s.drafts for s in found] == [4, 0]
    blind.admit(found, 0)
    assert [s.drafts for s in found] == [1, 1]


def test_which_limits_follow_from_the_pool() -> None:
    def limits(verification: str, **caps: Any) -> dict[str, Any]:
        spec = PoolSpec(
            speculator=Selection("mine"),
            speculation=SpeculationSpec(verification=verification, max_drafts=3),  # type: ignore[arg-type]
        )
        return drafting_limits(spec, SpeculatorCaps(max_drafts=5, **caps))

    host = limits("standard", place="host", confidence="own")
    assert host == {"device_drafts": 0, "drafter": "mine", "drawn": False, "trusted": True}
    sampled: dict[str, Any] = {"place": "device", "deterministic": False, "q_kind": "dense"}
    found = limits("block", confidence="own", **sampled)
    assert found == {"device_drafts": 3, "drafter": "mine", "drawn": True, "trusted": False}
    assert limits("block", confidence="prior", **sampled)["trusted"]
    assert not limits("invariant", confidence="own", **sampled)["drawn"]
    assert drafting_limits(PoolSpec(), None) == {}


@pytest.mark.parametrize("kinds", ["full+state", "full+window+state+draft"])
def test_trees_are_refused_where_nothing_can_be_moved(kinds: str) -> None:
    caps = SpeculatorCaps(place="device", max_drafts=3, topology="tree")
    with pytest.raises(DeploymentError, match=r"'mine' drafts trees, .* group 'state' is of kind 'state'"):
        check_topology(caps, toy_groups(kinds), "mine")
    check_topology(SpeculatorCaps(place="device", max_drafts=3), toy_groups(kinds), "mine")
    check_topology(caps, toy_groups("full+window+draft"), "mine")


def test_a_budget_reckons_with_prompts_that_the_step_may_compute() -> None:
    """Those that run, and those that may come in; never more than a step has ever had."""
    found = sequences([[0.5] * 4, [0.5] * 4])
    h = harness()
    h.submit("new", [7] * 200, 4)
    (new,) = h.engine._sequences.values()
    drafting = drawn(trusted=True)
    loads: list[tuple[int, int]] = []
    admit = drafting.lengths.admit
    drafting.lengths.admit = lambda chances, load, guessed=False, rounds=None: (  # type: ignore[method-assign]
        loads.append((load.gaining, load.tokens)) or admit(chances, load, guessed, rounds)  # type: ignore[func-returns-value]
    )
    drafting.admit([*found, new], 1)
    drafting.planned([FlightItem(found[0], 0, 0, 1, 0, True), FlightItem(new, 0, 0, 64, 0, False)])
    drafting.admit([*found, new], 1)
    drafting.admit([*found, new], 0)
    assert loads == [(2, 2), (2, 66), (2, 2)]
