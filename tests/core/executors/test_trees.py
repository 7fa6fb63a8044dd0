"""Drafts that are trees: the text, its logits and its log-probabilities are those without any."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.errors import PluginFault
from bien.core.executors.trees import Tree
from bien.core.request import SamplingParams
from bien.core.testing.toy import write_toy
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from tests.core.executors.driver import Driver

PROMPT = [9, 4, 7, 7, 1, 30, 22, 5, 90, 41, 3]
COLD = SamplingParams(temperature=0.0, logprobs=2)
WARM = SamplingParams(temperature=1.0, logprobs=2)
PENAL = msgspec.structs.replace(
    COLD, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3, min_tokens=9
)


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt_oss: sinks, and windows that deep trees leave."""
    changes = {"sliding_window": 4} if request.param == "gpt_oss" else {}
    return write_toy(tmp_path_factory.mktemp(request.param), request.param, **changes)


def grown(rng: random.Random, truth: list[int], nodes: int) -> tuple[list[int], list[int], int]:
    """(tokens, parents, how many are taken): siblings differ, some paths go along the truth."""
    tokens: list[int] = []
    parents: list[int] = []
    right: list[int] = []  # how many tokens of the truth a node's path holds; -1: it has left it
    children: dict[int, set[int]] = {}
    for _ in range(nodes):
        parent = rng.choice([-1, *range(len(tokens)), len(tokens) - 1, len(tokens) - 1])
        above = 0 if parent < 0 else right[parent]
        taken = children.setdefault(parent, set())
        goal = truth[above] if 0 <= above < len(truth) else -1
        if goal >= 0 and goal not in taken and rng.random() < 0.6:
            token = goal
        else:
            token = rng.choice([t for t in range(3, 90) if t not in taken and t != goal])
        taken.add(token)
        tokens.append(token)
        parents.append(parent)
        right.append(above + 1 if token == goal else -1)
    return tokens, parents, max(0, *right)


@pytest.mark.parametrize("sampling", [COLD, WARM, PENAL], ids=["cold", "warm", "penalties"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_trees_change_nothing(folder: Path, sampling: SamplingParams, seed: int) -> None:
    """Beside chunks, chains and rows without drafts; paths are taken, moved, and read by what follows."""
    rng = random.Random(seed)
    ends = tuple(range(3, 40))
    plain = Driver(folder, dtype="float64")
    slot = plain.add(PROMPT, sampling=sampling, seed=5, ends=ends)
    truth: list[int] = []
    logits, values = [], []
    while len(truth) < 34:
        truth += plain.step({slot: len(plain.content[slot]) - plain.computed[slot]})[slot]
        logits.append(plain.logits[slot][0])
        values.append(bytes(plain.logprobs[slot].chosen) + bytes(plain.logprobs[slot].ids))
    driver = Driver(folder, dtype="float64", shuffle=seed, block_tokens=4)
    long = driver.add([rng.randrange(3, 90) for _ in range(90)])
    tree = driver.add(PROMPT, sampling=sampling, seed=5, ends=ends)
    twin = driver.add(PROMPT, sampling=sampling, seed=5, ends=ends)
    out = driver.step({tree: len(PROMPT), twin: len(PROMPT)})[tree]
    moved = 0
    while len(out) < 26:
        other = driver.content[twin][len(PROMPT) :]
        nodes, parents, right = grown(rng, truth[len(out) :], rng.randrange(1, 12))
        chain = truth[len(other) : len(other) + rng.randrange(0, 3)]
        work = {long: min(7, len(driver.content[long]) - driver.computed[long])}
        at = len(out)
        gained = driver.step(work | {tree: 1, twin: 1}, {tree: nodes, twin: chain}, parents={tree: parents})
        assert gained[tree] == truth[at : at + right + 1]
        assert gained[twin] == truth[len(other) : len(other) + len(chain) + 1]
        path = Tree.of(parents).walk(nodes, gained[tree][:-1])
        moved += path != list(range(len(path)))
        for j, node in enumerate([-1, *path]):
            np.testing.assert_allclose(driver.logits[tree][node + 1], logits[at + j], rtol=1e-9, atol=1e-9)
        found = driver.logprobs[tree]
        chosen, ids = np.frombuffer(found.chosen, "<f4"), np.frombuffer(found.ids, "<u4").reshape(-1, 2)
        for j in range(right + 1):
            want = np.frombuffer(values[at + j][:4], "<f4")
            np.testing.assert_allclose(chosen[j], want[0], atol=1e-6)
            assert ids[j].tobytes() == values[at + j][4:]
        out += gained[tree]
        if len(driver.content[twin]) - len(PROMPT) > 28:
            break
    assert out == truth[: len(out)]
    assert moved or seed
    assert driver.generate(tree, 3) == truth[len(out) : len(out) + 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_a_tree_knows_its_paths(numbers: list[int]) -> None:
    parents = [n % (i + 1) - 1 for i, n in enumerate(numbers)]
    tree = Tree.of(parents)
    for node, depth in enumerate(tree.depth):
        path = tree.path(node)
        assert len(path) == depth + 1 and path[-1] == node
        assert [parents[n] for n in path] == [-1, *path[:-1]]
        assert sorted(path) == np.flatnonzero(tree.ancestors()[node]).tolist()
        own = list(range(100, 100 + len(parents)))
        assert tree.walk(own, [own[n] for n in path] + [7, 8]) == path
    first = tree.first_path()
    assert first == tree.path(first[-1]) and first[-1] not in parents


def test_of_equal_siblings_the_first_is_taken() -> None:
    assert Tree.of([-1, -1, 1]).walk([5, 5, 6], [5, 6]) == [0]


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2], [-1, 0, 3]])
def test_parents_that_come_too_late(parents: list[int]) -> None:
    with pytest.raises(PluginFault, match="valid: -1, or an earlier node"):
        Tree.of(parents)


def test_parents_that_do_not_fit_the_plan(folder: Path) -> None:
    driver = Driver(folder)
    slot = driver.add(PROMPT)
    driver.step({slot: len(PROMPT)})
    with pytest.raises(PluginFault, match="3 parents of 2 drafts"):
        driver.step({slot: 1}, {slot: [4, 5]}, parents={slot: [-1, -1, 0]})


def test_trees_on_a_model_with_states(tmp_path: Path) -> None:
    driver = Driver(write_tiny_hybrid(tmp_path))
    slot = driver.add(PROMPT)
    driver.step({slot: len(PROMPT)})
    with pytest.raises(PluginFault, match="is of kind 'state'; valid for trees: full, window"):
        driver.step({slot: 1}, {slot: [4, 5]}, parents={slot: [-1, -1]})
