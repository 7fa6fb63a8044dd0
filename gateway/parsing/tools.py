"""`Tools`: the functions that a request offers, and what their schemas say of parameters' types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_DEPTH = 16  # of references and unions


class Tools:
    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()) -> None:
        """`tools`: as OpenAI's chat has them."""
        functions = [tool["function"] for tool in tools]
        self._schemas: dict[str, Any] = {f["name"]: f.get("parameters") for f in functions}
        self._known: dict[tuple[str, str], frozenset[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    @property
    def names(self) -> list[str]:
        return list(self._schemas)

    def types(self, function: str, parameter: str) -> frozenset[str]:
        """JSON Schema's types that the parameter may have; all where nothing is said of it."""
        key = (function, parameter)
        if (found := self._known.get(key)) is None:
            schema = self._schemas.get(function)
            found = _types(_property(schema, parameter, schema, _DEPTH), schema, _DEPTH)
            self._known[key] = found
        return found


def _property(schema: Any, name: str, root: Any, depth: int) -> Any:
    schema = _followed(schema, root, depth)
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    for part in _parts(schema) if depth else ():
        if (found := _property(part, name, root, depth - 1)) is not None:
            return found
    return None


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    schema = _followed(schema, root, depth)
    if not isinstance(schema, Mapping) or not depth:
        return TYPES
    said = schema.get("type")
    listed = [said] if isinstance(said, str) else said if isinstance(said, list) else []
    if named := TYPES.intersection(t for t in listed if isinstance(t, str)):
        return named
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if values := [*values, *([schema["const"]] if "const" in schema else [])]:
        return frozenset(kind_of(value) for value in values)
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list) and schema[union]:
            return frozenset().union(*(_types(part, root, depth - 1) for part in schema[union]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        if (found := _types(part, root, depth - 1)) != TYPES:
            return found
    return frozenset({"object"}) if "properties" in schema else TYPES


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    lists = (schema.get(key) for key in ("allOf", "anyOf", "oneOf"))
    return [part for found in lists if isinstance(found, list) for part in found]


def _followed(schema: Any, root: Any, depth: int) -> Any:
    """Behind references within the schema."""
    while isinstance(schema, Mapping) and isinstance(path := schema.get("$ref"), str) and depth:
        depth -= 1
        schema = root
        for step in path.removeprefix("#").strip("/").split("/") if path != "#" else ():
            step = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema


def kind_of(value: Any) -> str:
    """JSON Schema's type of a value."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array"}
    return kinds.get(type(value), "object")
