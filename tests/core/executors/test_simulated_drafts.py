"""Forced acceptance in simulations: the lengths of a real engine, published curves, costs of drafting."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from bien.core.architectures.registry import read_architecture
from bien.core.costs.layout import Layout
from bien.core.costs.machine import load_machine
from bien.core.costs.step import StepModel
from bien.core.errors import DeploymentError
from bien.core.executors.simulated_drafts import AHEAD, SimulatedDrafts
from bien.core.executors.simulated_machine import MachineCost
from bien.core.plan import ExecutorPlan, NewSequence, i32
from bien.core.providers import Context
from bien.core.request import SamplingParams, TokenIds
from bien.core.sampling.acceptance import forced_lengths
from bien.core.speculation.golden import GOLDEN, chances_of
from bien.core.speculation.options import SpeculationSpec
from bien.plugins.speculators.simulated import SimulatedDrafter, SimulatedDrafterConfig
from bien.plugins.speculators.simulated import _make as make

CHANCES = (0.9, 0.7, 0.5, 1.0)


def entering(slot: int, prompt: int = 5, *, seed: int = 3, drafts: int = 4) -> NewSequence:
    tokens = TokenIds.of(range(prompt))
    return NewSequence(slot, tokens, prompt, SamplingParams(), seed, max_drafts=drafts)


def verifying(slots: list[int], starts: list[int], drafts: list[int]) -> ExecutorPlan:
    counts = [1 + n for n in drafts]
    return ExecutorPlan(1, i32(slots), i32(starts), i32(counts), i32(drafts), i32([1] * len(slots)))


def test_lengths_are_those_of_a_real_engine() -> None:
    drafts = SimulatedDrafts(4, CHANCES)
    for slot, seed in ((0, 11), (1, 2**63 + 5)):
        drafts.enter(entering(slot, seed=seed))
    for at in (4, 5, 9, 4 + AHEAD, 3 * AHEAD, 6):
        for limit in (0, 1, 4):
            plan = verifying([0, 1], [at, at + 2], [limit, limit])
            seeds = np.array([11, 2**63 + 5], np.uint64)
            expected = forced_lengths(CHANCES, seeds, np.array([at, at + 2]) - 4, [0, 0], [limit, limit])
            assert drafts.accepted(plan).tolist() == (1 + expected).tolist()


def test_chunks_gain_nothing_and_propose_nothing() -> None:
    drafts = SimulatedDrafts(4, (1.0,) * 4)
    for slot in (0, 1, 2):
        drafts.enter(entering(slot, drafts=(4, 2, 0)[slot]))
    plan = ExecutorPlan(1, i32([0, 1, 2]), i32([0, 5, 5]), i32([3, 3, 1]), i32([0, 2, 0]), i32([0, 1, 1]))
    assert drafts.accepted(plan).tolist() == [0, 3, 1]
    assert drafts.proposed(plan).tolist() == [0, 2, 0]


@pytest.mark.parametrize("name", GOLDEN)
def test_published_curves_come_out(name: str) -> None:
    for k in (1, 4, 8):
        spec = SpeculationSpec(golden=name, max_drafts=k)
        drafts = SimulatedDrafts(k, spec.acceptance)
        drafts.enter(entering(0, prompt=1))
        gained = [int(drafts.accepted(verifying([0], [at], [k]))[0]) for at in range(1, 4001)]
        assert np.mean(gained) == pytest.approx(GOLDEN[name][k - 1], abs=0.03)
        assert set(gained) <= {int(GOLDEN[name][k - 1]), int(GOLDEN[name][k - 1]) + 1}


def test_lengths_become_chances() -> None:
    assert chances_of(1.0) == (0.0,)
    assert chances_of(3.22) == (1.0, 1.0, 0.22)
    spec = SpeculationSpec(acceptance_length=2.5)
    assert spec.acceptance == (1.0, 0.5)
    assert msgspec.convert(msgspec.to_builtins(spec), SpeculationSpec) == spec


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"golden": "kimi-k3/mtp", "max_drafts": 4}, "no acceptance curve 'kimi-k3/mtp'"),
        ({"golden": "kimi-k3/dspark"}, "max_drafts is not given"),
        ({"golden": "kimi-k3/dspark", "max_drafts": 9}, "1 to 8 drafts; max_drafts is 9"),
        ({"acceptance": [0.5], "acceptance_length": 2.0}, "both given"),
        ({"golden": "kimi-k3/dspark", "max_drafts": 4, "acceptance_length": 2.0}, "both given"),
        ({"acceptance_length": 0.5}, "acceptance_length"),
    ],
)
def test_what_is_no_acceptance_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert(given, SpeculationSpec)


def test_a_simulated_drafter_needs_forced_acceptance_and_no_weights() -> None:
    with pytest.raises(DeploymentError, match="acceptance_length"):
        make(SimulatedDrafterConfig(), Context())
    with pytest.raises(DeploymentError, match="simulations only"):
        SimulatedDrafter(SimulatedDrafterConfig()).load(None, (), None)
    with pytest.raises(ValueError, match="passes = 5"):
        SimulatedDrafterConfig(max_drafts=4, passes=5)


def test_drafting_and_verifying_cost() -> None:
    a = read_architecture("kimi-k3", 64, "bfloat16")
    model = StepModel(a, load_machine("b300"), Layout(tensor=8, expert=8))
    plain = verifying([0, 1], [5000, 9000], [0, 0])
    drafted = verifying([0, 1], [5000, 9000], [4, 4])
    one = SimulatedDrafter(SimulatedDrafterConfig(max_drafts=4, passes=1, layers=5))
    four = SimulatedDrafter(SimulatedDrafterConfig(max_drafts=4, layers=5))
    without, block, chain = (MachineCost(model, drafter=d) for d in (None, one, four))
    assert without(drafted) > without(plain)
    assert without(drafted) < block(drafted) < chain(drafted) < 2 * without(drafted)
    chunk = ExecutorPlan(1, i32([0]), i32([0]), i32([64]), i32([0]), i32([0]))
    assert block(chunk) == without(chunk), "a chunk that yields nothing drafts nothing"
    whole = model.seconds(np.array([5000]), np.array([1]), 1)
    assert model.part(np.array([5000]), np.array([1]), 1, a.layers) == pytest.approx(whole)


def test_a_context_without_one_has_none() -> None:
    ctx = Context()
    assert SimulatedDrafts.of(ctx) is None
    ctx.parts["speculator"] = SimpleNamespace(caps=None)
    assert SimulatedDrafts.of(ctx) is None
