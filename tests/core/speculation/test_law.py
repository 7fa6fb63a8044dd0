"""The law of a verify round, in exact arithmetic: nothing is sampled, every outcome is enumerated.

A round yields some tokens; the target alone yields the rest. If, for every target, context and drafts, the
law of the next k+1 tokens is the target's own, then by induction over rounds so is the law of any text.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.plan import i32
from bien.core.sampling.verify import verify_rows

VOCAB = range(3)
Text = tuple[int, ...]
Law = dict[Text, Fraction]
Model = Callable[[Text], list[Fraction]]  # probabilities of the next token
Policy = Callable[[Model, Text], Law]  # (target, drafts) -> law of what one round yields


def model(weights: list[int]) -> Model:
    """A target whose next token depends on the two tokens before it."""

    def next(text: Text) -> list[Fraction]:
        row = 3 * sum((t + 1) * 4**i for i, t in enumerate(text[-2:])) % len(weights)
        chosen = [weights[(row + i) % len(weights)] for i in VOCAB]
        total = sum(chosen)
        return [Fraction(w, total) for w in chosen] if total else [Fraction(1, 3)] * 3

    return next


def alone(target: Model, length: int, start: Text = ()) -> Law:
    """The target's own law of `length` tokens after `start`, `start` included."""
    law = {start: Fraction(1)}
    for _ in range(length):
        law = {
            (*text, t): p * q
            for text, p in law.items()
            for t, q in zip(VOCAB, target(text), strict=True)
            if q
        }
    return law


def completed(target: Model, round: Law, length: int) -> Law:
    """What a round yields, continued by the target to `length` tokens."""
    law: Law = defaultdict(Fraction)
    for text, p in round.items():
        for whole, q in alone(target, length - len(text), text).items():
            law[whole] += p * q
    return dict(law)


def draws(target: Model, drafts: Text) -> Iterator[tuple[Text, Fraction]]:
    """All target tokens that may be drawn along a row of drafts, each at its position, with probability."""
    rows = [target(drafts[:j]) for j in range(len(drafts) + 1)]
    for drawn in itertools.product(VOCAB, repeat=len(rows)):
        p = Fraction(1)
        for row, token in zip(rows, drawn, strict=True):
            p *= row[token]
        if p:
            yield drawn, p


def ours(target: Model, drafts: Text) -> Law:
    law: Law = defaultdict(Fraction)
    for drawn, p in draws(target, drafts):
        verdict = verify_rows(i32(list(drawn)), i32([1]), i32([len(drafts)]), i32(list(drafts)))
        law[tuple(verdict.tokens.tolist())] += p
    return law


def by_coin(
    accepts: Callable[[list[Fraction], int], Fraction],
    residual: Callable[[list[Fraction], int], list[Fraction]],
) -> Policy:
    """Draft by draft: a coin accepts it, else the residual law yields the round's last token."""

    def policy(target: Model, drafts: Text) -> Law:
        law: Law = defaultdict(Fraction)
        reached = Fraction(1)
        for j, draft in enumerate(drafts):
            row = target(drafts[:j])
            yes = accepts(row, draft)
            if yes < 1:
                rest = residual(row, draft)
                for token in VOCAB:
                    law[(*drafts[:j], token)] += reached * (1 - yes) * rest[token]
            reached *= yes
        for token, p in zip(VOCAB, target(drafts), strict=True):
            law[(*drafts, token)] += reached * p
        return {text: p for text, p in law.items() if p}

    return policy


def without(row: list[Fraction], draft: int) -> list[Fraction]:
    rest = [Fraction(0) if t == draft else p for t, p in enumerate(row)]
    return [p / sum(rest) for p in rest]


def whole(row: list[Fraction], draft: int) -> list[Fraction]:
    return row


def trusts_a_confident_drafter(target: Model, drafts: Text) -> Law:
    """Verification stops where the drafter is sure of its own token (q >= 1/2): the rest is accepted."""
    return by_coin(lambda row, draft: Fraction(1) if draft == 0 else row[draft], without)(target, drafts)


def verifies_past_a_mismatch(target: Model, drafts: Text) -> Law:
    law: Law = defaultdict(Fraction)
    for drawn, p in draws(target, drafts):
        law[drawn] += p  # all k+1 drawn tokens, those behind a rejected draft too
    return law


def keeps_the_rejected_draft(target: Model, drafts: Text) -> Law:
    law: Law = defaultdict(Fraction)
    for drawn, p in draws(target, drafts):
        n = next((j for j, d in enumerate(drafts) if d != drawn[j]), len(drafts))
        law[(*drafts[:n], drafts[n]) if n < len(drafts) else drawn] += p
    return law


RIGHT: dict[str, Policy] = {
    "ours": ours,
    "coin and residual": by_coin(lambda row, draft: row[draft], without),
}
BIASED: dict[str, Policy] = {
    "accepts with the largest probability": by_coin(lambda row, draft: max(row), without),
    "residual keeps the draft": by_coin(lambda row, draft: row[draft], whole),
    "accepts everything": by_coin(lambda row, draft: Fraction(1), whole),
    "trusts a confident drafter": trusts_a_confident_drafter,
    "verifies past a mismatch": verifies_past_a_mismatch,
    "keeps the rejected draft": keeps_the_rejected_draft,
}


def fits(policy: Policy, target: Model, most: int) -> bool:
    for k in range(most + 1):
        exact = alone(target, k + 1)
        for drafts in itertools.product(VOCAB, repeat=k):
            if completed(target, policy(target, drafts), k + 1) != exact:
                return False
    return True


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=5, max_size=12))
@pytest.mark.parametrize("name", RIGHT)
def test_a_round_keeps_the_target_law(name: str, weights: list[int]) -> None:
    assert fits(RIGHT[name], model(weights), 2)


@pytest.mark.parametrize("name", BIASED)
def test_a_biased_policy_is_caught(name: str) -> None:
    assert not fits(BIASED[name], model([1, 2, 5, 3, 1, 7, 2]), 2)
