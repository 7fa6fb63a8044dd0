"""Assistants' turns to write and read again, for the conformance suite of parsers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bien.gateway.parsing.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text

TYPED: dict[str, Any] = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "z": {"type": "null"},
    "o": {"type": "object"},
    "a": {"type": "array"},
    "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "do_it", "parameters": {"type": "object", "properties": TYPED}},
    },
    {"type": "function", "function": {"name": "look-up.now", "description": "Takes nothing."}},
]
_WORDS = [
    "a",
    "Zürich",
    "你好",
    "😀",
    " ",
    "\n",
    "\\",
    '"',
    "\\n",
    "<",
    ">",
    "</",
    "{",
    "}",
    "'",
    "&amp;",
    "\t",
    "0",
]


@dataclass(slots=True)
class Call:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(slots=True)
class Turn:
    """Text has no blanks at its ends: they frame a dialect's marks."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)


EDGES: list[Turn] = [
    Turn(),
    Turn(text="Hello, world."),
    Turn(reasoning="Why?\n\nBecause.", text="So."),
    Turn(calls=[Call("look-up.now")]),
    Turn(text="I look.", calls=[Call("look-up.now"), Call("do_it", {"s": "x"}), Call("look-up.now")]),
    Turn(reasoning="Hm.", calls=[Call("do_it", {"s": ""}), Call("do_it", {"s": "12", "n": 12, "u": None})]),
    Turn(calls=[Call("do_it", {"o": {"a": {"b": [1, {"c": "d\n"}], "e": {}}}, "a": [], "b": False})]),
    Turn(calls=[Call("do_it", {"s": 'C:\\new\\"x"\n\tdone\n', "x": -1.5e-7, "z": None})]),
]


def random_turn(rng: random.Random) -> Turn:
    calls = [_call(rng) for _ in range(rng.randint(0, 3))]
    return Turn(_text(rng).strip(), _text(rng).strip(), calls)


def random_cuts(text: str, rng: random.Random) -> list[str]:
    """The text in pieces."""
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 12))))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read_back(events: Iterable[Event]) -> Turn:
    """The turn that events tell of. AssertionError where they break their order, or a call is incomplete."""
    turn = Turn()
    for event in events:
        if isinstance(event, Reasoning):
            turn.reasoning += event.text
        elif isinstance(event, Text):
            turn.text += event.text
        elif isinstance(event, CallBegin):
            turn.calls.append(Call(event.name, {}, event.id))
    for call, text in zip(turn.calls, arguments_of(events), strict=True):
        call.arguments = json.loads(text)
    return turn


def arguments_of(events: Iterable[Event], *, cut: bool = False) -> list[str]:
    """The arguments of each call as they came. AssertionError where calls break their order, or one is not
    complete unless the answer was `cut`."""
    out: list[str] = []
    is_open = False
    for event in events:
        if isinstance(event, CallBegin):
            assert not is_open and event.index == len(out), f"{event} while call {len(out) - 1} is open"
            assert event.name, f"{event} has no name"
            out.append("")
            is_open = True
        elif isinstance(event, (CallArguments, CallEnd)):
            assert is_open and event.index == len(out) - 1, f"{event}, and no such call is open"
            if isinstance(event, CallArguments):
                out[-1] += event.text
            else:
                is_open = False
                assert cut or event.complete, f"{event} in an answer that is whole"
                assert not event.complete or _is_json(out[-1]), f"the arguments are {out[-1]!r}"
        else:
            assert not is_open, f"{event} while a call is open"
    assert not is_open, "a call that began has no end"
    return out


def begins_json(text: str) -> bool:
    """Whether more text could make a JSON value of it, found by trying what is missing."""
    if not text.strip() or _is_json(text):
        return True
    missing, inside, escaped = "", False, False
    for char in text:
        if inside:
            inside, escaped = char != '"' or escaped, char == "\\" and not escaped
        elif char == '"':
            inside = True
        elif char in "{[":
            missing = "}]"["{[".index(char)] + missing
        elif char in "}]" and missing:
            missing = missing[1:]
    tails = ['"', '\\"', '0"', '00"', '000"', '0000"'] if inside else ["", "0", '""', "null", ":0", '"":0']
    return any(_is_json(text + tail + more + missing) for tail in tails for more in ("", ":0"))


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: json.loads("?"))
    except ValueError:
        return False
    return True


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_WORDS) for _ in range(rng.choice([0, 3, 20])))


def _call(rng: random.Random) -> Call:
    made: dict[str, Callable[[], Any]] = {
        "s": lambda: _text(rng),
        "n": lambda: rng.randint(-(10**18), 10**18),
        "x": lambda: rng.choice([0.5, -1e300, 3, 1e-9]),
        "b": lambda: rng.random() < 0.5,
        "z": lambda: None,
        "o": lambda: {_text(rng): {"deep": [_text(rng), None, {}]}, "k": 1},
        "a": lambda: [_text(rng), [], {"x": True}][: rng.randint(0, 3)],
        "u": lambda: rng.choice([None, _text(rng) + "."]),
    }
    chosen = rng.sample(sorted(made), rng.randint(0, len(made)))
    return Call("do_it", {name: made[name]() for name in chosen}) if chosen else Call("look-up.now")
