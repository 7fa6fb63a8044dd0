"""JSON is followed to its end, mended where models nearly write it, and refused where they do not."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.gateway.parsing.json_text import JsonText, quoted
from bien.gateway.testing.turns import begins_json

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[i:j] for i, j in itertools.pairwise(edges)]


def follow(parts: list[str]) -> tuple[str, str, bool, bool]:
    """What came out, what was left over, done, failed."""
    value, out = JsonText(), ""
    for n, part in enumerate(parts):
        passed, end = value.push(part)
        out += passed
        if value.done or value.failed:
            return out, value.left + part[end:] + "".join(parts[n + 1 :]), value.done, value.failed
    return out + value.close(), "", value.done, value.failed


@given(VALUES, st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(0, 999), max_size=9))
def test_a_value_passes_whole(value: Any, ascii: bool, indent: Any, cuts: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    assert follow(pieces(text, cuts)) == (text, "", True, False)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), st.lists(st.integers(0, 999), max_size=9))
def test_it_ends_where_the_value_does(value: Any, cuts: list[int]) -> None:
    text = json.dumps(value)
    assert follow(pieces(text + "\n</tool_call>{", cuts)) == (text, "\n</tool_call>{", True, False)


@settings(max_examples=150)
@given(
    st.lists(
        st.sampled_from(
            [
                "{",
                "}",
                "[",
                "]",
                ",",
                ":",
                '"',
                "\\",
                "u00",
                "é",
                "1",
                "-",
                ".",
                "e",
                "tru",
                "e",
                "null",
                " ",
                "a",
            ]
        ),
        max_size=14,
    ).map("".join),
    st.lists(st.integers(0, 99), max_size=6),
)
def test_whatever_comes_what_comes_out_begins_json(text: str, cuts: list[int]) -> None:
    whole = follow([text] if text else [])
    assert follow(pieces(text, cuts)) == whole
    out, _, done, failed = whole
    assert begins_json(out)
    assert not (done and failed)
    if done:
        json.loads(out)
    try:
        json.loads(text)
    except ValueError:
        pass
    else:
        assert done and out == text


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
        (r'{"a": "\d\'\u00g"}', {"a": "\\d'\\u00g"}),
        ('{"a": True, "b": [None, False]}', {"a": True, "b": [None, False]}),
    ],
)
def test_what_is_nearly_json_is_mended(text: str, mended: Any) -> None:
    for parts in ([text], [*text]):
        out, left, done, _ = follow(parts)
        assert (json.loads(out), left, done) == (mended, "", True)


@pytest.mark.parametrize(
    "text", ["{a: 1}", "{'a': 1}", "[1,]", "[01]", "[1.]", "[NaN]", '{"a" 1}', "[1}", "9" * 2000]
)
def test_what_is_not_is_refused_with_what_is_left(text: str) -> None:
    for parts in ([text], [*text]):
        out, left, done, failed = follow(parts)
        assert failed and not done
        assert out + left == text


@given(st.text(), st.text())
def test_quotations_add_up(one: str, other: str) -> None:
    assert json.loads(f'"{quoted(one)}{quoted(other)}"') == one + other
