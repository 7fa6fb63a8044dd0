from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.text.stop import StopMatcher

letters = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def run(stop_strings: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stop_strings)
    return "".join([*map(matcher.push, pieces), matcher.flush()]), matcher.matched


@given(stops, st.lists(letters, max_size=6))
def test_pieces_give_what_the_whole_gives(stop_strings: list[str], pieces: list[str]) -> None:
    assert run(stop_strings, pieces) == run(stop_strings, ["".join(pieces)])


@given(stops, letters)
def test_the_text_is_cut_where_the_first_stop_string_is_complete(stop_strings: list[str], text: str) -> None:
    shown, matched = run(stop_strings, [text])
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop_strings)]
    if not ends:
        assert (shown, matched) == (text, None)
    else:
        longest = max((s for s in stop_strings if text[: ends[0]].endswith(s)), key=len)
        assert (shown, matched) == (text[: ends[0] - len(longest)], longest)


@given(stops, letters)
def test_no_more_is_held_back_than_the_start_of_a_stop_string(stop_strings: list[str], text: str) -> None:
    matcher = StopMatcher(stop_strings)
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert shown + held == text
        assert not held or any(s.startswith(held) and s != held for s in stop_strings)
        tails = [text[i:] for i in range(len(shown))]
        assert not any(s.startswith(t) for s in stop_strings for t in tails)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["ab<", "end", ">cd"], ["ab", "", ""]),
        (["ab<e", "x"], ["ab", "<ex"]),
        (["<<end"], ["<"]),
    ],
)
def test_pieces_as_they_come(pieces: list[str], shown: list[str]) -> None:
    matcher = StopMatcher(["<end>"])
    assert [matcher.push(p) for p in pieces] == shown
