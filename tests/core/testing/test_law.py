"""Speculation keeps the target's law: every drafter, length policy and rule; biased ones are caught."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise
from operator import mul

import pytest
import torch

from bien.core.sampling.rejection import Law as DrawnFrom
from bien.core.sampling.rejection import judge_chain
from bien.core.speculation.lengths import Lengths, Load, survival
from bien.core.speculation.options import SpeculationSpec
from bien.core.testing.law import (
    ONE,
    ZERO,
    Drafted,
    Drafter,
    Law,
    Model,
    Policy,
    Rule,
    Text,
    all_of,
    at_most,
    block,
    distance,
    greedy_chain,
    greedy_tree,
    invariant,
    mixed,
    output_law,
    random_model,
    residual,
    sampled_chain,
    siblings,
    standard,
    target_law,
)

SEEDS = range(5)
SIZE, DRAFTS, COUNT = 3, 2, 3


def models(seed: int) -> tuple[Model, Model]:
    """A target, and what a drafter takes it for."""
    target = random_model(seed, SIZE)
    return target, mixed(target, random_model(seed + 1000, SIZE), Fraction(1, 2))


def bias(seed: int, drafter: Drafter, policy: Policy, rule: Rule, target: Model | None = None) -> Fraction:
    target = target or models(seed)[0]
    law = output_law(target, drafter, policy, rule, COUNT)
    assert sum(law.values()) == 1
    return distance(law, target_law(target, COUNT))


def admitted(spec: SpeculationSpec, *, stale: bool, before: list[float] | None = None) -> Policy:
    """The core's own length control, of one sequence among others whose drafts are known."""

    def policy(drafted: Drafted) -> int:
        lengths = Lengths(spec, stale=stale)
        for tokens in range(1, 12):  # steps cost more the more they compute
            lengths.cost.add(tokens, 1.0 + 0.25 * tokens)
        other = [0.9, 0.6]
        chances = survival(list(drafted.confidence), list(drafted.parents))
        for _ in range(2):
            lengths.admit([before or [0.8, 0.5], other], Load(2, 2))
        return lengths.admit([chances, other], Load(2, 2))[0]

    return policy


FIXED = SpeculationSpec(verification="standard")
CONFIDENT = SpeculationSpec(verification="standard", length="confidence", min_chance=0.5)
BUDGET = SpeculationSpec(verification="standard", length="budget")
POLICIES = {
    "all": all_of,
    "one": at_most(1),
    "none": at_most(0),
    "fixed": admitted(FIXED, stale=True),
    "confidence": admitted(CONFIDENT, stale=True),
    "budget": admitted(BUDGET, stale=True),
}


@pytest.mark.parametrize("rule", [standard, block, invariant])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_sampled_chains(rule: Rule, policy: str, seed: int) -> None:
    _, like = models(seed)
    assert bias(seed, sampled_chain(like, DRAFTS), POLICIES[policy], rule) == 0


@pytest.mark.parametrize("rule", [standard, block, invariant, siblings])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_certain_chains(rule: Rule, policy: str, seed: int) -> None:
    """What is not drawn may be cut by its own chance."""
    _, like = models(seed)
    assert bias(seed, greedy_chain(like, DRAFTS), POLICIES[policy], rule) == 0


@pytest.mark.parametrize("rule", [invariant, siblings])
@pytest.mark.parametrize("policy", [*POLICIES, "three"])
@pytest.mark.parametrize("seed", SEEDS)
def test_trees(rule: Rule, policy: str, seed: int) -> None:
    _, like = models(seed)
    chosen = at_most(3) if policy == "three" else POLICIES[policy]
    assert bias(seed, greedy_tree(like, 2, 2), chosen, rule) == 0


@pytest.mark.parametrize("own", [False, True])
def test_a_draw_of_the_target_excuses_every_policy(own: bool) -> None:
    """Under `invariant` the text does not depend on drafts: own chances and any budget are exact."""
    for seed in SEEDS:
        _, like = models(seed)
        for policy in (cut_by_own, best_of_now, admitted(BUDGET, stale=False)):
            assert bias(seed, sampled_chain(like, DRAFTS, own=own), policy, invariant) == 0


def cut_by_own(drafted: Drafted) -> int:
    """Planted: as "p_min" of some engines, on sampled drafts."""
    chances = [law[token] for law, token in zip(drafted.laws, drafted.tokens, strict=True)]
    return next((i for i, c in enumerate(chances) if c < Fraction(1, 2)), len(chances))


def best_of_now(drafted: Drafted) -> int:
    """Planted: the budget with the best rate, by the confidences of the drafts that it admits."""
    chances = list(accumulate(drafted.confidence, mul))
    seconds = [1.0, 1.7, 1.7]  # one draft costs as much as two
    rates = [(1 + sum(chances[:n])) / seconds[n] for n in range(len(chances) + 1)]
    return rates.index(max(rates))


def wrong_residual(text: Text, drafted: Drafted, target: Model) -> Law:
    """Planted: what replaces a rejected draft comes from the target's whole law."""
    law: Law = {}
    reached, chance = text, ONE
    for token, q in zip(drafted.tokens, drafted.laws, strict=True):
        p = target(reached)
        taken = min(ONE, p[token] / q[token])
        for other, x in enumerate(p):
            path = (*reached[len(text) :], other)
            law[path] = law.get(path, ZERO) + chance * (1 - taken) * x
        reached, chance = (*reached, token), chance * taken
    for other, x in enumerate(target(reached)):
        path = (*reached[len(text) :], other)
        law[path] = law.get(path, ZERO) + chance * x
    return law


def dropped_sibling(text: Text, drafted: Drafted, target: Model) -> Law:
    """Planted: a rejected sibling keeps its chance, and the next is tried as if it were the first."""
    law: Law = {}
    open_: list[tuple[int, Text, Fraction]] = [(-1, (), ONE)]
    while open_:
        node, path, chance = open_.pop()
        row = target(text + path)
        for i, parent in enumerate(drafted.parents):
            token = drafted.tokens[i]
            if parent == node:
                open_.append((i, (*path, token), chance * row[token]))
                chance *= 1 - row[token]
        for token, p in enumerate(row):
            law[(*path, token)] = law.get((*path, token), ZERO) + chance * p
    return law


def first_of_block(text: Text, drafted: Drafted, target: Model) -> Law:
    """Planted: block verification whose residual forgets the weight of the prefix."""
    changed = dict(block(text, drafted, target))
    n = len(drafted.tokens)
    if n < 2:
        return changed
    q, p = drafted.laws[1], target(text + drafted.tokens[:1])
    total = sum((c for path, c in changed.items() if len(path) == 2), ZERO)
    for path in [path for path in changed if len(path) == 2]:
        del changed[path]
    for token, x in enumerate(residual(p, q, ONE)):
        path = (drafted.tokens[0], token)
        changed[path] = changed.get(path, ZERO) + total * x
    return changed


PLANTED: dict[str, tuple[bool, bool, Policy, Rule]] = {  # tree, own confidence, policy, rule
    "own-token cut": (False, True, cut_by_own, standard),
    "own-token cut, block": (False, True, cut_by_own, block),
    "own confidence below a threshold": (False, True, admitted(CONFIDENT, stale=True), standard),
    "budget of the same step": (False, False, best_of_now, standard),
    "wrong residual": (False, False, all_of, wrong_residual),
    "residual without the weight": (False, False, all_of, first_of_block),
    "dropped sibling": (True, False, all_of, dropped_sibling),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_biases_are_caught(name: str) -> None:
    tree, own, policy, rule = PLANTED[name]
    found = []
    for seed in range(30):
        _, like = models(seed)
        drafter = greedy_tree(like, 2, 1) if tree else sampled_chain(like, DRAFTS, own=own)
        found.append(bias(seed, drafter, policy, rule))
    assert max(found) > Fraction(1, 200)


def test_the_example_by_hand() -> None:
    """A draft of chance 0.1 is never verified: [0.5, 0.5] becomes [0.55, 0.45] (reference: p_min 0.5)."""
    half = Fraction(1, 2)
    target: Model = lambda text: [half, half]  # noqa: E731
    like: Model = lambda text: [Fraction(9, 10), Fraction(1, 10)]  # noqa: E731
    law = output_law(target, sampled_chain(like, 1, own=True), cut_by_own, standard, 1)
    assert law == {(0,): Fraction(11, 20), (1,): Fraction(9, 20)}


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_the_code_decides_where_the_law_says(rule: str) -> None:
    """`judge_chain` is a step function of its coins and its u: its steps are those of the exact law."""
    reference: Rule = standard if rule == "standard" else block
    for seed in range(3):
        target, like = models(seed)
        for drafted in sampled_chain(like, DRAFTS)(()):
            exact = reference((), drafted, target)
            assert _law_of_code(rule, drafted, target) == pytest.approx(
                {path: float(p) for path, p in exact.items()}, abs=1e-9
            )


def _law_of_code(rule: str, drafted: Drafted, target: Model) -> dict[Text, float]:
    rows = [[float(x) for x in target(drafted.tokens[:i])] for i in range(DRAFTS + 1)]
    p = torch.tensor(rows[:DRAFTS], dtype=torch.float64)
    laws = [DrawnFrom(torch.tensor([float(x) for x in q], dtype=torch.float64)) for q in drafted.laws]

    def judge(coins: list[float], u: float) -> tuple[int, int | None]:
        return judge_chain(rule, p, laws, list(drafted.tokens), coins, u)  # type: ignore[arg-type]

    law: dict[Text, float] = {}
    edges: list[list[float]] = []
    for i in range(DRAFTS):  # where a coin changes what is taken, whatever the others show
        steps = {0.0, 1.0}
        for other in (0.0, 1 - 1e-12):
            coins = [other] * DRAFTS
            steps |= set(_steps(lambda x, i=i, coins=coins: judge([*coins[:i], x, *coins[i + 1 :]], 0.5)[0]))
        edges.append(sorted(steps))
    for a in pairwise(edges[0]):
        for b in pairwise(edges[1]):
            coins, weight = [sum(a) / 2, sum(b) / 2], (a[1] - a[0]) * (b[1] - b[0])
            taken, replaced = judge(coins, 0.5)
            prefix = drafted.tokens[:taken]
            if replaced is None:
                for token, x in enumerate(rows[taken]):
                    law[(*prefix, token)] = law.get((*prefix, token), 0.0) + weight * x
                continue
            points = [0.0, *_steps(lambda u, coins=coins: judge(coins, u)[1]), 1.0]
            for low, high in pairwise(points):
                path = (*prefix, int(judge(coins, (low + high) / 2)[1] or 0))
                law[path] = law.get(path, 0.0) + weight * (high - low)
    return {path: x for path, x in law.items() if x > 1e-12}


def _steps(function: object, low: float = 0.0, high: float = 1 - 1e-15) -> list[float]:
    """Where a step function on [0, 1) of at most a few steps changes."""
    call = function
    assert callable(call)
    grid = [low + (high - low) * i / 12 for i in range(13)]
    found = []
    for a, b in pairwise(grid):
        left, right = call(a), call(b)
        if left == right:
            continue
        for _ in range(36):
            middle = (a + b) / 2
            if call(middle) == left:
                a = middle
            else:
                b = middle
        found.append(b)
    return found
