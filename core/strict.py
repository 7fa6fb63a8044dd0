"""Strict decoding of what people write by hand: an error names the full path and the nearest valid key."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from bien.core.errors import DeploymentError, nearest

T = TypeVar("T")
_WHERE = re.compile(r"^(?P<text>.*) - at `\$?(?P<path>.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_PATH = re.compile(rf"({_STEP.pattern})*")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def decode(raw: Any, into: type[T], path: str = "") -> T:
    """`raw` (tables and lists, as a TOML reader returns them) as `into`.

    DeploymentError with `field` = the full path, e.g. `pool[0].scheduler.token_bugdet`, for an unknown
    key, a missing key, a wrong type or a value outside its choices.
    """
    for where, text in _faults(raw, inspect.type_info(into), path):
        raise DeploymentError(f"{where}: {text}", field=where)
    try:
        return msgspec.convert(raw, into)
    except msgspec.ValidationError as error:
        found = _WHERE.match(str(error))
        text, below = (found["text"], found["path"]) if found else (str(error), "")
        where = (path + below).lstrip(".") or "(top level)"
        text = text.replace("`", "") + _given(raw, below, text)
        raise DeploymentError(f"{where}: {text}", field=where) from None


def join(path: str, key: str) -> str:
    """`pool[0]` and `count` make `pool[0].count`."""
    return f"{path}.{key}" if path else key


def _given(raw: Any, below: str, text: str) -> str:
    """The clause that shows the value at `below` of `raw`; "" where the path does not say which it is."""
    if "..." in below or not _PATH.fullmatch(below):  # some key of a table of free keys
        return ""
    for key, index in _STEP.findall(below):
        raw = raw[key] if key else raw[int(index)]
    return f" ({_short.repr(raw)})" if ", got " in text else f", got {_short.repr(raw)}"


def _faults(raw: Any, info: inspect.Type, path: str) -> Iterator[tuple[str, str]]:
    """The faults that msgspec would report without the valid choices: keys and literals."""
    if isinstance(info, inspect.UnionType):
        tables = [t for t in info.types if isinstance(t, inspect.StructType)]
        if isinstance(raw, Mapping) and len(tables) == 1:
            yield from _faults(raw, tables[0], path)
        elif isinstance(raw, str) and not any(isinstance(t, inspect.StrType) for t in info.types):
            for literal in info.types:
                yield from _faults(raw, literal, path)
    elif isinstance(info, inspect.StructType) and isinstance(raw, Mapping):
        fields = {f.encode_name: f for f in info.fields}
        for key, value in raw.items():
            if key in fields:
                yield from _faults(value, fields[key].type, join(path, key))
            elif info.forbid_unknown_fields:
                yield join(path, str(key)), f"unknown key {key!r}; {nearest(str(key), fields)}"
    elif isinstance(info, (inspect.VarTupleType, inspect.ListType)) and isinstance(raw, (list, tuple)):
        for i, value in enumerate(raw):
            yield from _faults(value, info.item_type, f"{path}[{i}]")
    elif isinstance(info, inspect.LiteralType) and raw not in info.values:
        yield path, f"{raw!r} is not a choice; {nearest(str(raw), map(str, info.values))}"
