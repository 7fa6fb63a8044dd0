from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.speculation.prediction import FIRST, MOST, REACH, Prediction

TEXT = [random.Random(i).randrange(1000) for i in range(400)]


def play(predicted: list[int], output: list[int], limit: int = MOST) -> tuple[int, int, int]:
    """Rounds, drafted and accepted when the output is said, a round at a time."""
    prediction, at, rounds, drafted, accepted = Prediction(predicted), 0, 0, 0, 0
    while at < len(output):
        draft = prediction.propose(min(limit, len(output) - at - 1))
        good = next((i for i, t in enumerate(draft) if t != output[at + i]), len(draft))
        prediction.extend(output[at : at + good + 1])
        at, rounds = at + good + 1, rounds + 1
        drafted, accepted = drafted + len(draft), accepted + good
    return rounds, drafted, accepted


def test_what_comes_true_takes_few_rounds() -> None:
    rounds, drafted, accepted = play(TEXT, TEXT)
    assert drafted == accepted == len(TEXT) - rounds
    assert rounds < 30
    assert Prediction(TEXT).propose(100) == TEXT[:FIRST]
    assert Prediction(TEXT).propose(3) == TEXT[:3]
    assert Prediction(TEXT).propose(0) == Prediction([]).propose(9) == []


def test_what_does_not_is_left_alone() -> None:
    other = [t + 1000 for t in TEXT]
    rounds, drafted, accepted = play(TEXT, other)
    assert (rounds, accepted) == (len(other), 0)
    assert drafted <= FIRST + 4


def test_an_exchanged_token_costs_one_round() -> None:
    output = TEXT[:100] + [5000] + TEXT[101:]
    assert play(TEXT, output)[0] <= play(TEXT, TEXT)[0] + 2


def test_meets_again_behind_what_was_put_in_or_left_out() -> None:
    straight = play(TEXT, TEXT)[0]
    new = [2000 + i for i in range(30)]
    assert play(TEXT, TEXT[:100] + new + TEXT[100:])[0] <= straight + len(new) + 6
    assert play(TEXT, TEXT[:100] + TEXT[150:])[0] <= straight + 6
    assert play(TEXT, TEXT[:100] + new + TEXT[100 + REACH + 20 :])[0] <= straight + len(new) + 6
    assert play(TEXT, new + TEXT)[0] <= straight + len(new) + 6


def test_meets_again_at_parts_that_were_moved() -> None:
    moved = TEXT[300:] + TEXT[:300]
    assert play(TEXT, moved)[0] <= play(TEXT, TEXT)[0] + 16


def test_two_tokens_far_away_are_chance() -> None:
    predicted = [1, 2, 3, 4] * 50 + [7, 8] + TEXT
    output = [7, 8, 9, 10]
    assert play(predicted, output)[1] <= FIRST + 4


def test_goes_on_with_the_nearest_of_many() -> None:
    predicted = [*TEXT[:50], 1, 2, *TEXT[50:100], 1, 2, *TEXT[100:]]
    prediction = Prediction(predicted)
    prediction.extend([*TEXT[:50], 5000, 5001, 1, 2])
    assert prediction.propose(4) == TEXT[50:54]


def test_the_end_is_the_end() -> None:
    prediction = Prediction([1, 2, 3])
    prediction.extend([1, 2])
    assert prediction.propose(8) == [3]
    prediction.extend([3])
    assert prediction.propose(8) == []
    prediction.extend([4, 5, 6])
    assert prediction.propose(8) == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=40),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), max_size=20),
    st.integers(0, 40),
)
def test_drafts_are_parts_of_the_prediction(text: list[int], output: list[list[int]], limit: int) -> None:
    """However the tokens come."""
    whole, parts = Prediction(text), Prediction(text)
    for tokens in output:
        parts.extend(tokens)
        draft = parts.propose(limit)
        assert len(draft) <= min(limit, MOST)
        assert any(text[i : i + len(draft)] == draft for i in range(len(text) + 1))
    whole.extend([t for tokens in output for t in tokens])
    assert whole.propose(limit) == parts.propose(limit)
