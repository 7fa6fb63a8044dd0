"""The suite of parsers passes a good one, and fails each of these."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bien.core.testing.suites import failures
from bien.core.text.marks import Mark, Piece
from bien.gateway.parsing.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text
from bien.gateway.parsing.parser import AnswerParser, Opening, Parser
from bien.gateway.parsing.tools import Tools
from bien.gateway.testing import ParserSuite
from bien.gateway.testing.turns import Turn
from bien.plugins.parsers.hermes import MARKS, Hermes


class Wrapped:
    """A good parser, with a fault."""

    def __init__(self, opening: Opening) -> None:
        self.inner = Hermes(opening)

    @property
    def reasoning(self) -> bool:
        return self.inner.reasoning

    def push(self, piece: Piece) -> list[Event]:
        return self.change(self.inner.push(piece))

    def finish(self, ended: bool) -> list[Event]:
        return self.change(self.inner.finish(ended))

    def change(self, events: list[Event]) -> list[Event]:
        return events


class HoldsAll(Wrapped):
    """Waits for the end of the answer."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        self.held: list[Event] = []

    def push(self, piece: Piece) -> list[Event]:
        self.held += self.inner.push(piece)
        return []

    def finish(self, ended: bool) -> list[Event]:
        return [*self.held, *self.inner.finish(ended)]


class HoldsArguments(Wrapped):
    """Sends arguments when the call ends."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        self.held = ""

    def change(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if isinstance(event, CallArguments):
                self.held += event.text
                continue
            if isinstance(event, CallEnd) and self.held:
                out.append(CallArguments(event.index, self.held))
                self.held = ""
            out.append(event)
        return out


class RepeatsArguments(Wrapped):
    """All of them once more in the last event."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        self.sent = ""

    def change(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if isinstance(event, CallArguments):
                self.sent += event.text
            elif isinstance(event, CallEnd):
                out.append(CallArguments(event.index, self.sent))
                self.sent = ""
            out.append(event)
        return out


class DropsCallsWithoutArguments(Wrapped):
    def change(self, events: list[Event]) -> list[Event]:
        return [e for e in events if not (isinstance(e, CallArguments) and e.text == "{}")]


class LosesTextOfSecondPiece(Wrapped):
    """What comes with a mark in one piece is forgotten."""

    def change(self, events: list[Event]) -> list[Event]:
        begun = any(isinstance(e, CallBegin) for e in events)
        return [e for e in events if not (begun and isinstance(e, Text))]


class ReasonsAloud(Wrapped):
    def change(self, events: list[Event]) -> list[Event]:
        return [Text(e.text) if isinstance(e, Reasoning) else e for e in events]


class NeverReasons(Wrapped):
    @property
    def reasoning(self) -> bool:
        return False


class AlwaysReasons(Wrapped):
    @property
    def reasoning(self) -> bool:
        return True


class CallsWithoutTools(Wrapped):
    def __init__(self, opening: Opening) -> None:
        super().__init__(Opening(opening.tail, Tools([{"function": {"name": "any"}}]), opening.thinks))


class NamesItsCalls(Wrapped):
    """Ids where the dialect has none, which nobody could find again."""

    def change(self, events: list[Event]) -> list[Event]:
        return [msgspec.structs.replace(e, id="call_1") if isinstance(e, CallBegin) else e for e in events]


class CountsFromOne(Wrapped):
    def change(self, events: list[Event]) -> list[Event]:
        return [msgspec.structs.replace(e, index=e.index + 1) if hasattr(e, "index") else e for e in events]


class NeverEnds(Wrapped):
    def change(self, events: list[Event]) -> list[Event]:
        return [e for e in events if not isinstance(e, CallEnd)]


class AllComplete(Wrapped):
    """Says of a call that was cut that it is complete."""

    def change(self, events: list[Event]) -> list[Event]:
        return [CallEnd(e.index) if isinstance(e, CallEnd) else e for e in events]


class ClosesWhatWasCut(Wrapped):
    """Sends a brace too many."""

    def change(self, events: list[Event]) -> list[Event]:
        return [
            x for e in events for x in ([CallArguments(e.index, "}"), e] if isinstance(e, CallEnd) else [e])
        ]


class Raises(Wrapped):
    def change(self, events: list[Event]) -> list[Event]:
        if any(isinstance(e, CallEnd) and not e.complete for e in events):
            raise ValueError("this is no call")
        return events


class Shared(Wrapped):
    """Mixes up answers that have a call open at the same time."""

    calling: set[int] = set()

    def change(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if isinstance(event, CallBegin):
                Shared.calling.add(id(self))
            elif isinstance(event, CallEnd):
                Shared.calling.discard(id(self))
            elif isinstance(event, CallArguments) and len(Shared.calling) > 1:
                continue
            out.append(event)
        return out


class WholePieces(Wrapped):
    """Finds a mark only if it comes in one piece."""

    def push(self, piece: Piece) -> list[Event]:
        text = piece.text if isinstance(piece, Mark) else piece
        if "<" in text and not any(mark in text for mark in MARKS):
            text = text.replace("<", "‹")
        return self.inner.push(text)


class OnlyMarks(Wrapped):
    """Knows marks from text although its dialect does not."""

    def push(self, piece: Piece) -> list[Event]:
        return [Text(piece.text)] if isinstance(piece, Mark) else self.inner.push(piece)


class Whole:
    """Reads the answer when it is over, with a regular expression."""

    reasoning = False

    def __init__(self, opening: Opening) -> None:
        self.text = ""

    def push(self, piece: Piece) -> list[Event]:
        self.text += piece.text if isinstance(piece, Mark) else piece
        return []

    def finish(self, ended: bool) -> list[Event]:
        found = re.findall(r"<tool_call>(.*?)</tool_call>", self.text, re.DOTALL)
        out: list[Event] = []
        for n, text in enumerate(found):
            call = json.loads(text)
            arguments = CallArguments(n, json.dumps(call["arguments"]))
            out += [CallBegin(n, call["name"]), arguments, CallEnd(n)]
        return out or [Text(self.text)]


FAULTS: list[Any] = [
    HoldsAll,
    HoldsArguments,
    RepeatsArguments,
    DropsCallsWithoutArguments,
    LosesTextOfSecondPiece,
    ReasonsAloud,
    NeverReasons,
    AlwaysReasons,
    CallsWithoutTools,
    NamesItsCalls,
    CountsFromOne,
    NeverEnds,
    AllComplete,
    ClosesWhatWasCut,
    Raises,
    Shared,
    WholePieces,
    OnlyMarks,
    Whole,
]
EXPECTED = {
    "HoldsArguments": "test_arguments_do_not_wait",
    "AllComplete": "test_every_beginning_is_one_of_the_whole",
    "Shared": "test_answers_do_not_know_each_other",
    "WholePieces": "test_cuts_change_nothing",
    "OnlyMarks": "test_marks_are_what_they_are_spelled",
    "Raises": "test_every_beginning_is_one_of_the_whole",
    "AlwaysReasons": "test_knows_when_it_reasons",
    "CallsWithoutTools": "test_without_tools_nothing_is_a_call",
}


class Built:
    marks = MARKS
    exact = False
    calls = True

    def __init__(self, answer: Callable[[Opening], AnswerParser]) -> None:
        self.begin = answer

    def close(self) -> None:
        """Nothing."""


def suite(answer: Any) -> type[ParserSuite]:
    class Suite(ParserSuite):
        rounds = 4

        def build(self) -> Parser:
            return Built(answer)

        def write(self, turn: Turn) -> str:
            calls = [
                f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>"
                for c in turn.calls
            ]
            thought = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
            return thought + "\n".join([turn.text, *calls] if turn.text else calls)

    return Suite


def test_a_good_one_passes() -> None:
    assert failures(suite(Wrapped)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: Any) -> None:
    Shared.calling.clear()
    found = failures(suite(fault))
    assert found
    if (name := EXPECTED.get(fault.__name__)) is not None:
        assert name in {line.partition(":")[0] for line in found}


def test_it_says_what_it_needs() -> None:
    with pytest.raises(NotImplementedError, match="def build"):
        ParserSuite().build()
    with pytest.raises(NotImplementedError, match="def write"):
        ParserSuite().write(Turn())
