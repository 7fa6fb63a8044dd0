"""Turns of a conversation are held against those before, within bounded memory."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bien.core.request import TokenIds
from bien.gateway.notes import Rewrite
from bien.gateway.rewrites import Rewrites

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
ids = st.lists(st.integers(0, 3), max_size=6)


def turn(rewrites: Rewrites, messages: list[dict[str, Any]], prompt: list[int], answer: list[int]) -> Any:
    begun, found = rewrites.begin("", None, messages, TokenIds.of(prompt))
    assert begun is not None
    rewrites.end(begun, TokenIds.of(answer).packed)
    return found


@given(ids, ids, ids)
def test_the_first_difference(prompt: list[int], answer: list[int], now: list[int]) -> None:
    rewrites, before = Rewrites(), prompt + answer
    assert turn(rewrites, [USER], prompt, answer) is None
    found = turn(rewrites, [USER, ANSWER, USER], now, [])
    if now[: len(before)] == before:
        assert found is None
    else:
        at = next(
            (n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b),
            min(len(before), len(now)),
        )
        assert found == Rewrite(at, "prompt" if at < len(prompt) else "answer")


def test_memory_is_bounded_and_a_conversation_takes_one_place() -> None:
    rewrites, messages = Rewrites(max_bytes=10_000), [USER]
    for n in range(9):
        turn(rewrites, messages, [n] * 1000, [])
        assert rewrites.held < 5000
        messages = [*messages, ANSWER, USER]
    for n in range(9):
        turn(rewrites, [{"role": "user", "content": str(n)}], [n] * 1000, [])
        assert 0 < rewrites.held <= 10_000
    found = [turn(rewrites, [{"role": "user", "content": str(n)}, ANSWER, USER], [99], []) for n in (0, 8)]
    assert found == [None, Rewrite(0, "prompt")]
    turn(rewrites, [USER], [1] * 5000, [])  # never fits
    assert rewrites.held <= 10_000


def test_numbers_that_nobody_can_write_down_are_no_conversation() -> None:
    message = {"role": "user", "content": "", "tool_calls": [{"function": {"arguments": {"n": 1 << 80}}}]}
    assert Rewrites().begin("", None, [message], TokenIds.of([1])) == (None, None)


def test_what_the_template_is_told_is_part_of_a_conversation() -> None:
    rewrites = Rewrites()
    begun, _ = rewrites.begin("", {"thinking": True}, [USER], TokenIds.of([1]))
    assert begun is not None
    rewrites.end(begun, b"")
    for told, differs in (({"thinking": False}, False), ({"thinking": True}, True)):
        _, found = rewrites.begin("", told, [USER, ANSWER, USER], TokenIds.of([2]))
        assert (found is not None) == differs
