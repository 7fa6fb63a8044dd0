"""The law of rejection sampling, by finding where its uniforms change what comes out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bien.core.sampling.rejection import Law, judge_chain

VOCAB = 3
Laws = dict[tuple[int, ...], NDArray[np.float64]]  # by prefix, of the next token


def laws(seed: int, length: int, sharpness: float) -> Laws:
    rng, out = np.random.default_rng(seed), {}
    for n in range(length + 1):
        for prefix in itertools.product(range(VOCAB), repeat=n):
            weights = rng.random(VOCAB) ** sharpness
            if rng.random() < 0.3:
                weights[rng.integers(VOCAB)] = 0
            out[prefix] = weights / weights.sum()
    return out


def edge(accepts: Callable[[float], bool]) -> float:
    """Where a coin stops to accept."""
    low, high = 0.0, 1.0
    if not accepts(low):
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return high


def swept(token: Callable[[float], int]) -> dict[int, float]:
    """The length of [0, 1) that yields each token; tokens go up with the uniform."""
    out, low, last = {}, 0.0, 1 - 2**-53
    while True:
        here = token(low)
        if token(last) == here:
            out[here] = 1 - low
            return out
        a, b = low, last
        for _ in range(50):
            middle = (a + b) / 2
            a, b = (middle, b) if token(middle) == here else (a, middle)
        out[here], low = b - low, b


def outcomes(rule: Any, p: Laws, q: Laws, told: Laws, drafts: tuple[int, ...]) -> Iterator[tuple[float, Any]]:
    """(chance, tokens) of all that a drafted chain may become; `told`: what verification is told of q."""
    n = len(drafts)
    target = torch.tensor(np.stack([p[drafts[:i]] for i in range(n)]))
    given = [Law(torch.tensor(told[drafts[:i]])) for i in range(n)]

    def judged(coins: list[float], u: float = 0.5) -> tuple[int, int | None]:
        return judge_chain(rule, target, given, list(drafts), coins, u)

    never, always = 1 - 2**-53, 0.0
    bounds = []
    for i in range(n):
        others = [always] * i + [never] * (n - i)

        def accepts(coin: float, i: int = i, others: list[float] = others) -> bool:
            return judged([*others[:i], coin, *others[i + 1 :]])[0] > i

        bounds.append(edge(accepts))
    for taken in range(n + 1):
        # standard asks from the left, block for the last coin that accepts.
        left = [*bounds[:taken], *(1 - b for b in bounds[taken : taken + 1])]
        right = [*bounds[max(0, taken - 1) : taken], *(1 - b for b in bounds[taken:])]
        chance = float(np.prod(left if rule == "standard" else right))
        if chance < 1e-12:
            continue
        coins = [always] * taken + [never] * (n - taken)
        found, token = judged(coins)
        assert found == taken
        if token is None:
            yield chance, drafts
            continue
        for other, share in swept(lambda u, coins=coins: judged(coins, u)[1]).items():  # type: ignore[misc]
            yield chance * share, (*drafts[:taken], other)


def joint(rule: Any, p: Laws, q: Laws, told: Laws, length: int) -> tuple[dict[Any, float], float]:
    """The law of the first `length` tokens, and the drafts that are taken on average."""
    out: dict[Any, float] = dict.fromkeys(itertools.product(range(VOCAB), repeat=length), 0.0)
    taken = 0.0
    for drafts in out:
        drawn = float(np.prod([q[drafts[:i]][t] for i, t in enumerate(drafts)]))
        if not drawn:
            continue
        for chance, tokens in outcomes(rule, p, q, told, drafts):
            taken += drawn * chance * (len(tokens) if tokens == drafts else len(tokens) - 1)
            for rest in itertools.product(range(VOCAB), repeat=length - len(tokens)):
                whole = (*tokens, *rest)
                behind = [p[whole[:i]][whole[i]] for i in range(len(tokens), length)]
                out[whole] += drawn * chance * float(np.prod(behind))
    return out, taken


@pytest.mark.parametrize(
    ("length", "seed"),
    [(1, 0), (2, 0), (2, 1), *(pytest.param(3, n, marks=pytest.mark.slow) for n in range(4))],
)
def test_the_law_is_the_targets(length: int, seed: int) -> None:
    """Of the whole text, not of each position alone; and block takes at least as many drafts."""
    p, q = laws(seed, length, 1.0), laws(seed + 50, length, 2.0)
    mean = {}
    for rule in ("standard", "block"):
        found, mean[rule] = joint(rule, p, q, q, length)
        for text, chance in found.items():
            exact = float(np.prod([p[text[:i]][t] for i, t in enumerate(text)]))
            assert chance == pytest.approx(exact, abs=1e-9), (rule, text)
    overlap = [np.minimum(p[()], q[()]).sum()]
    assert mean["standard"] >= overlap[0] - 1e-9
    assert mean["block"] >= mean["standard"] - 1e-9
    if length == 3:
        assert mean["block"] > mean["standard"] + 1e-4


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_wrong_q_shows(rule: str) -> None:
    p, q, other = laws(1, 2, 1.0), laws(51, 2, 2.0), laws(52, 2, 1.0)
    found, _ = joint(rule, p, q, other, 2)
    exact = {t: float(np.prod([p[t[:i]][x] for i, x in enumerate(t)])) for t in found}
    assert sum(abs(found[t] - exact[t]) for t in found) > 0.02


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_q_over_some_tokens(rule: str) -> None:
    """Sparse laws and laws of a smaller vocabulary are those that they spread to."""
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    sparse = [
        Law(torch.tensor([0.7, 0.3]), torch.tensor([3, 1])),
        Law(torch.tensor([0.25, 0.75], dtype=torch.float64)),
    ]
    dense = [Law(torch.tensor([0, 0.3, 0, 0.7])), Law(torch.tensor([0.25, 0.75, 0, 0], dtype=torch.float64))]
    for u in np.linspace(0, 0.999, 30):
        coins = [float(u), float((u * 7) % 1)]
        for x in ([3, 1], [1, 0]):
            found = judge_chain(rule, p, sparse, x, coins, float(u))  # type: ignore[arg-type]
            assert found == judge_chain(rule, p, dense, x, coins, float(u))  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_equal_laws_take_all(rule: str) -> None:
    p = torch.tensor([[0.1, 0.9], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    coins = [1 - 2**-53] * 3
    given = [Law(row) for row in p]
    assert judge_chain(rule, p, given, [0, 1, 0], coins, 0.5) == (3, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_forbidden_draft_is_never_taken(rule: str) -> None:
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    given = [Law(torch.tensor([0.5, 0.5]))] * 2
    assert judge_chain(rule, p, given, [1, 0], [0.0, 0.0], 0.9) == (0, 0)  # type: ignore[arg-type]
