"""Strict reading of a drafter's config.json. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bien.core.api import ModelError

MOST = 1 << 31
SHOWN = 200  # characters of a value in a message


class Fields:
    """Fields that are looked for in several objects of the file, in order; null counts as absent. Every
    complaint is a ModelError that names the file, the field, its value and what is valid."""

    def __init__(self, kind: str, path: Path, *places: Mapping[str, Any]) -> None:
        """`kind`: the speculator that reads, for messages."""
        self.kind, self.path, self.places = kind, path, places

    def within(self, *places: Mapping[str, Any]) -> Fields:
        """The same file, looked through in these objects."""
        return Fields(self.kind, self.path, *places)

    def find(self, *names: str) -> Any:
        """The value as it is, by the first of these names that has one; None where none has."""
        found = (place[n] for n in names for place in self.places if place.get(n) is not None)
        return next(found, None)

    def whole(self, name: str, usual: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`. `usual`: where the field is absent; None: it must not be."""
        value = self.find(name)
        if value is None and usual is not None:
            return usual
        if type(value) is not int or not least <= value <= most:
            above = f"above {least - 1}" if most == MOST else f"from {least} to {most}"
            raise self.wrong(name, value, f"a whole number {above}")
        return value

    def number(self, name: str, usual: float | None = None, *, most: float = math.inf) -> float:
        """A finite number above 0, at most `most`. `usual` as in `whole`."""
        value = self.find(name)
        if value is None and usual is not None:
            return usual
        fits = type(value) is float or (type(value) is int and abs(value) < 1 << 53)
        if not fits or not 0 < value <= most or math.isinf(value):
            upto = "" if most == math.inf else f", at most {most:g}"
            raise self.wrong(name, value, f"a finite number above 0{upto}")
        return float(value)

    def flag(self, name: str, usual: bool | None = None) -> bool:
        """True or false. `usual` as in `whole`."""
        value = self.find(name)
        if value is None and usual is not None:
            return usual
        if type(value) is not bool:
            raise self.wrong(name, value, "true or false", "valid: true, false")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """An object; an empty one where the field is absent."""
        value = self.find(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return {} if value is None else value

    def names(self, name: str) -> list[str] | None:
        """A list of strings; None where the field is absent."""
        value = self.find(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(n, str) for n in value)):
            raise self.wrong(name, value, "a list of names")
        return None if value is None else list(value)

    def numbers(self, *names: str) -> list[int] | None:
        """A list of whole numbers, not empty, by the first of these names that has a value; None where none
        has."""
        value = self.find(*names)
        if value is None:
            return None
        if not isinstance(value, list) or not value or any(type(i) is not int for i in value):
            name = next(n for n in names if self.find(n) is not None)
            raise self.wrong(name, value, "a list of layers, as whole numbers")
        return list(value)

    def wrong(self, name: str, value: Any, needs: str, valid: str = "") -> ModelError:
        """What to raise. `valid`: in place of what it needs."""
        shown = repr(value)
        shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
        return ModelError(f"{self.kind}: {self.path} has {name} = {shown}; {valid or f'needs {needs}'}")


def read_fields(folder: Path, kind: str) -> Fields:
    """Of a drafter folder's config.json. ModelError where there is none. `kind`: whose, for messages."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise ModelError(
            f"{kind}: {path} {reason}; the folder of a drafter's checkpoint is needed"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"{kind}: {path} holds no object")
    return Fields(kind, path, found)
