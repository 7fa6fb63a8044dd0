"""Raw values are typed by schemas, however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.gateway.parsing.tools import TYPES, Tools
from bien.gateway.parsing.values import Value
from tests.gateway.parsing.test_json_text import VALUES, pieces

CUTS = st.lists(st.integers(0, 999), max_size=9)


def typed(
    text: str, types: set[str] | frozenset[str] = TYPES, cuts: list[int] | None = None, **options: Any
) -> Any:
    value = Value(frozenset(types), **options)
    parts = [*text] if cuts is None else pieces(text, cuts)
    return json.loads("".join([*(value.push(part) for part in parts), value.close()]))


@given(st.text(), CUTS)
def test_a_string_stays_one(text: str, cuts: list[int]) -> None:
    assert typed(text, {"string"}, cuts) == text
    assert typed(f"\n{text}\n", {"string"}, cuts, trim=True) == text


@given(VALUES.filter(lambda v: not isinstance(v, str)), CUTS)
def test_anything_else_is_what_it_says(value: Any, cuts: list[int]) -> None:
    for text in (json.dumps(value), f"\n {json.dumps(value, indent=1, ensure_ascii=False)}\n"):
        assert typed(text, TYPES, cuts) == value
        assert typed(text, TYPES - {"string"}, cuts) == value


@given(
    st.text(alphabet='{}[]"\\0123456789-+.eE truefalsnTFN\n', max_size=12),
    st.sets(st.sampled_from(sorted(TYPES))),
    CUTS,
)
def test_cuts_change_nothing(text: str, types: set[str], cuts: list[int]) -> None:
    assert typed(text, types, cuts) == typed(text, types)


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("12", {"string"}, "12"),
        ("12", {"integer"}, 12),
        ("12", {"string", "null"}, "12"),
        ("null", {"string", "null"}, None),
        ("nullable", {"string", "null"}, "nullable"),
        ("True", {"boolean"}, True),
        ("None", {"null"}, None),
        ("twelve", {"integer"}, "twelve"),
        ("[1, 2", {"array"}, "[1, 2"),
        ("{'a': (1, None)}", {"object"}, {"a": [1, None]}),
        ('["a\nb"]', {"array"}, ["a\nb"]),
        ('"quoted"', TYPES, '"quoted"'),
        ('"quoted"', TYPES - {"string"}, "quoted"),
        ("5", {"boolean"}, "5"),
        ("NaN", {"number"}, "NaN"),
        ("{'a': 1e999}", {"object"}, "{'a': 1e999}"),
        ("[" * 20000, {"array"}, "[" * 20000),
        ("", {"integer"}, ""),
        ("  \n", TYPES, "  \n"),
    ],
)
def test_types(text: str, types: set[str], value: Any) -> None:
    assert typed(text, types) == typed(text, types, []) == value


def test_a_string_does_not_wait_where_it_can_be_nothing_else() -> None:
    assert Value(frozenset({"string", "null"})).push("no") == '"no'
    assert Value(TYPES).push("hello") == '"hello'
    assert Value(frozenset({"string", "null"})).push("nu") == ""


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": ["string", "null"]},
        "b": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/c"}]},
        "c": {"enum": ["x", 1]},
        "d": {"const": None},
        "e": {"allOf": [{"description": "none"}, {"type": "array"}]},
        "f": {"description": "anything"},
        "g": {"$ref": "#/$defs/g"},
        "h": {"properties": {}},
        "i": True,
    },
    "$defs": {"c": {"type": "boolean"}, "g": {"$ref": "#/$defs/g"}},
}


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("a", {"string", "null"}),
        ("b", {"integer", "boolean"}),
        ("c", {"string", "integer"}),
        ("d", {"null"}),
        ("e", {"array"}),
        ("f", TYPES),
        ("g", TYPES),
        ("h", {"object"}),
        ("i", TYPES),
        ("unknown", TYPES),
    ],
)
def test_types_of_parameters(name: str, types: set[str]) -> None:
    tools = Tools([{"function": {"name": "f", "parameters": SCHEMA}}])
    assert tools.types("f", name) == tools.types("f", name) == types


@given(VALUES)
def test_no_schema_is_an_error(schema: Any) -> None:
    for given_ in (schema, {"properties": schema}, {"properties": {"a": schema}, "$ref": schema}):
        assert Tools([{"function": {"name": "f", "parameters": given_}}]).types("f", "a") <= TYPES
    assert Tools([{"function": {"name": "f"}}]).types("g", "a") == TYPES
