"""How many drafts are verified: against cost curves that are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.speculation.lengths import LOOK, Lengths, Load, depths, survival
from bien.core.speculation.options import SpeculationSpec

Cost = Callable[[float], float]
CODE = [0.9, 0.85, 0.85, 0.8, 0.8, 0.75, 0.7]


def bound_by_memory(tokens: float) -> float:
    """As accelerators are: flat, then in proportion."""
    return 0.01 * max(1.0, tokens / 64)


def in_proportion(tokens: float) -> float:
    """As processors without spare lanes are."""
    return 0.001 + 0.001 * tokens


def free(tokens: float) -> float:
    return 0.01


def budget(cost: Cost, most: int = 800, **options: bool) -> Lengths:
    lengths = Lengths(SpeculationSpec(length="budget"), **options)
    for tokens in range(1, most):
        lengths.cost.add(tokens, cost(tokens))
    return lengths


def admitted(lengths: Lengths, rounds: int, chances: list[float] = CODE) -> int:
    """By `rounds` sequences which all draft alike."""
    return sum(lengths.admit([survival(chances, None)] * rounds, Load(rounds, rounds)))


def test_fixed_takes_all() -> None:
    assert Lengths(SpeculationSpec()).admit([[0.1, 0.0], [], [0.9]], Load(3, 3)) == [2, 0, 1]


def test_confidence_cuts_at_the_first_unlikely_node() -> None:
    lengths = Lengths(SpeculationSpec(length="confidence", min_chance=0.5))
    assert lengths.admit([survival([0.9, 0.8, 0.6, 0.99], None)], Load(1, 1)) == [2]
    assert lengths.admit([[0.6, 0.5, 0.2], [0.5], [0.49], []], Load(4, 4)) == [2, 1, 0, 0]
    assert lengths.admit([[0.3, 0.6, 0.1, 0.55, 0.2]], Load(1, 1)) == [4], "siblings in a tree"


def test_budget_drafts_all_where_it_is_free() -> None:
    lengths = budget(free)
    for rounds in (1, 16, 100):
        assert admitted(lengths, rounds) == 7 * rounds


def test_budget_goes_down_smoothly_with_the_load() -> None:
    lengths = budget(bound_by_memory)
    counts = [admitted(lengths, rounds) / rounds for rounds in range(1, 100)]
    assert counts[0] == counts[4] == 7, "capacity is free"
    assert counts[79:] == [0] * 20, "all capacity is used without drafts"
    for before, after in pairwise(counts):
        assert before - 1.2 <= after <= before + 0.2


def test_budget_takes_the_likeliest_of_all() -> None:
    lengths = budget(in_proportion, most=100)
    sure, unsure = survival([0.99] * 4, None), survival([0.3] * 4, None)
    counts = lengths.admit([unsure, sure, unsure], Load(3, 3))
    assert counts == [0, 4, 0]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([bound_by_memory, in_proportion, free]))
def test_never_less_than_without_drafts_where_costs_are_exact(seed: int, cost: Cost) -> None:
    """In expected tokens per second; of chains, more drafts or fewer would not have been better."""
    rng = random.Random(seed)
    lengths, chances = exact(cost), []
    trees = rng.random() < 0.5
    for _ in range(rng.randrange(1, 20)):
        parents = [rng.randrange(-1, i) for i in range(rng.randrange(9))]
        chances.append(survival([rng.random() for _ in parents], parents if trees else None))
    load = Load(len(chances) + rng.randrange(4), len(chances) + 4 + rng.randrange(100))

    def goodput(counts: list[int]) -> float:
        gained = load.gaining + sum(sum(c[:n]) for c, n in zip(chances, counts, strict=True))
        return gained / cost(load.tokens + sum(counts))

    found = goodput(lengths.admit(chances, load))
    assert found >= goodput([0] * len(chances)) * (1 - 1e-9)
    if not trees:
        every = range(sum(map(len, chances)) + 1)
        assert found >= max(goodput(lengths.best(chances, n)) for n in every) * (1 - 1e-9)


def exact(cost: Cost) -> Lengths:
    lengths = budget(cost, most=2)
    lengths.cost.seconds = lambda tokens: [cost(t) for t in tokens]  # type: ignore[assignment, method-assign, return-value]
    lengths.cost.knows = lambda tokens: True  # type: ignore[method-assign]
    return lengths


def test_the_order_of_sequences_does_not_matter() -> None:
    rng = random.Random(2)
    chances = [survival([rng.random() for _ in range(6)], None) for _ in range(12)]
    counts = budget(in_proportion).admit(chances, Load(12, 12))
    order = list(range(12))
    rng.shuffle(order)
    again = budget(in_proportion).admit([chances[i] for i in order], Load(12, 12))
    assert again == [counts[i] for i in order]
    assert 0 < sum(counts) < 72


def test_no_hysteresis() -> None:
    """A load that came and went leaves nothing behind."""
    lengths = budget(bound_by_memory)
    before = [admitted(lengths, rounds) for rounds in (4, 30, 80)]
    assert [admitted(lengths, rounds) for rounds in (80, 30, 4)] == before[::-1]


def test_a_stale_budget_does_not_see_what_it_admits() -> None:
    """The number of drafts of a step is the same whatever confidences they have; two steps on it tells."""
    for now in ([0.01] * 7, [1.0] * 7, CODE):
        lengths = budget(bound_by_memory, stale=True)
        seen = [admitted(lengths, 20) for _ in range(4)][2:]
        assert seen[0] == seen[1]
        assert admitted(lengths, 20, now) == seen[0]
        assert admitted(lengths, 20) == seen[0]
        after = admitted(lengths, 20)
        assert (after < seen[0]) is (now[0] < 0.5)
        assert (after > seen[0]) is (now[0] == 1)


def test_nor_does_it_at_first() -> None:
    """The number of all drafts: how they are spread follows from what is known now."""
    found = set()
    for now in ([0.01] * 4, [1.0] * 4, [0.9, 0.5, 0.5, 0.1]):
        lengths = budget(in_proportion, stale=True)
        found.add((admitted(lengths, 3, now), admitted(lengths, 3, now)))
    assert len(found) == 1


def test_a_stale_budget_is_blind_to_a_round_that_waits() -> None:
    """While others bring new drafts at each step."""
    steady, found = survival([0.9] * 4, None), []
    for now in (0.99, 0.01):
        lengths, waits = budget(in_proportion, stale=True), survival([now] * 4, None)
        found.append([sum(lengths.admit([waits, steady], Load(2, 2), False, ["a", n])) for n in range(6)])
    assert found[0] == found[1]
    assert all(found[0][2:])


def test_a_stale_budget_ranks_by_what_is_known_now() -> None:
    lengths = budget(in_proportion, stale=True)
    likely, unlikely = survival([0.95] * 4, None), survival([0.1] * 4, None)
    for _ in range(2):
        lengths.admit([likely, unlikely], Load(2, 2))
    assert lengths.admit([unlikely, likely], Load(2, 2)) == [0, 4]
    assert lengths.admit([unlikely, unlikely], Load(2, 2)) in ([2, 2], [4, 0], [3, 1])


def test_a_stale_budget_follows_the_number_of_sequences_at_once() -> None:
    live, stale = budget(bound_by_memory), budget(bound_by_memory, stale=True)
    for _ in range(3):
        admitted(stale, 4)
    for rounds in (16, 64, 2):
        assert abs(admitted(stale, rounds) - admitted(live, rounds)) <= rounds // 4


def test_looks_again_at_what_it_does_not_know() -> None:
    """Steps without drafts are never seen by themselves where all are admitted; nor those with drafts where
    none is."""
    lengths = Lengths(SpeculationSpec(length="budget"))
    seen = []
    for _ in range(8 * LOOK):
        count = admitted(lengths, 8)
        seen.append(count)
        lengths.cost.add(8 + count, in_proportion(8 + count) ** 3)
    assert 0 in seen[:LOOK]
    assert seen[-1] == 0
    assert sum(map(bool, seen[LOOK:])) < 12


def test_looks_at_a_drafter_that_nobody_asks() -> None:
    lengths = budget(in_proportion, most=200)
    unlikely = [survival([0.01] * 4, None)] * 8
    asked = [sum(lengths.admit(unlikely, Load(8, 8), guessed=True)) for _ in range(4 * LOOK)]
    assert sum(map(bool, asked)) == 4
    told = [sum(lengths.admit(unlikely, Load(8, 8), guessed=False)) for _ in range(4 * LOOK)]
    assert not any(told)
    by_confidence = Lengths(SpeculationSpec(length="confidence"))
    for guessed in (True, False):
        asked = [sum(by_confidence.admit(unlikely, Load(8, 8), guessed)) for _ in range(4 * LOOK)]
        assert sum(map(bool, asked)) == (4 if guessed else 0)


@pytest.mark.parametrize("parents", [None, [-1, 0, 1, 2]])
def test_survival_of_a_chain(parents: list[int] | None) -> None:
    assert survival([0.5, 0.5, 1.0, 0.1], parents) == [0.5, 0.25, 0.25, 0.025]
    assert depths(4, parents) == [1, 2, 3, 4]


def test_survival_of_a_tree() -> None:
    parents = [-1, -1, 0, 2, 1]
    assert survival([0.5, 0.25, 0.5, 1.0, 1.0], parents) == [0.5, 0.25, 0.25, 0.25, 0.25]
    assert depths(5, parents) == [1, 1, 2, 3, 2]
