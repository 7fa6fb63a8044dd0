"""Conformance suite of parsers. Subclass it in your tests, give `build`, and `write` turns as your model does

class TestMine(ParserSuite):
    def build(self):
        return MyParser()

    def write(self, turn):
        calls = "".join(f"<call>{json.dumps([c.name, c.arguments])}</call>" for c in turn.calls)
        return f"<think>{turn.reasoning}</think>{turn.text}{calls}"
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import replace

from bien.core.text.marks import Mark, Piece
from bien.gateway.parsing.events import CallArguments, CallBegin, Event, Reasoning, Text, merged
from bien.gateway.parsing.parser import Opening, Parser
from bien.gateway.parsing.tools import Tools
from bien.gateway.testing.turns import (
    EDGES,
    TOOLS,
    Call,
    Turn,
    arguments_of,
    begins_json,
    random_cuts,
    random_turn,
    read_back,
)


class ParserSuite:
    """What every parser must do, whatever its dialect."""

    rounds = 40
    """Random turns per test."""
    tail = ""
    """The end of the prompt, behind which `write` continues."""
    thinks = True
    """Whether turns may have reasoning."""
    most_calls = 3
    """In one turn."""
    streams_strings = True
    """Whether a parameter that is a string goes on before it ends. Every dialect can, mostly."""

    def build(self) -> Parser:
        raise NotImplementedError("a suite needs `def build(self): return <your parser>`")

    def write(self, turn: Turn) -> str:
        """The answer as the model writes it, all marks spelled."""
        raise NotImplementedError("a suite needs `def write(self, turn): return <the answer's text>`")

    def call_id(self, name: str, index: int) -> str:
        """The id that `write` gives a call; empty where the dialect has none."""
        return ""

    def test_reads_what_its_model_writes(self) -> None:
        for turn in self._turns(1):
            text = self.write(turn)
            found = read_back(self._read([text]))
            assert found == turn, f"{text!r} was read as {found}, and is {turn}"

    def test_cuts_change_nothing(self) -> None:
        """Neither between characters nor anywhere else, however many at a time."""
        rng = random.Random(2)
        for turn in self._turns(2):
            text = self.write(turn)
            whole = self._read([text])
            for pieces in ([*text], *(random_cuts(text, rng) for _ in range(4))):
                self._same(whole, self._read(pieces), pieces)

    def test_marks_are_what_they_are_spelled(self) -> None:
        """Control tokens come as marks where a tokenizer has them, and as text where an engine gives text."""
        for turn in self._turns(3):
            text = self.write(turn)
            self._same(self._read([text]), self._read(self._marked(text), exact=True), [text])

    def test_every_beginning_is_one_of_the_whole(self) -> None:
        """At max_tokens what was sent is kept: it begins what would have come, and JSON begins as JSON."""
        for turn in [*EDGES[3:], *self._turns(4)[-4:]]:
            text = self.write(self._fit(turn))
            whole = merged(self._read([text]))
            for end in range(0, len(text), 1 + len(text) // 40):
                parser = self.build().begin(self._opening())
                sent = merged(parser.push(text[:end]))
                self._begins(sent, whole, text[:end])
                events = [*sent, *parser.finish(False)]
                for arguments in arguments_of(events, cut=True):
                    assert begins_json(arguments), f"{text[:end]!r}: the arguments are {arguments!r}"

    def test_text_does_not_wait(self) -> None:
        parser = self.build().begin(self._opening())
        text = self.write(Turn(text="One two three."))
        before, _, after = text.partition("One two three.")
        shown = ""
        for piece in (before, "One", " two", " three."):
            shown = shown + "".join(e.text for e in parser.push(piece) if isinstance(e, Text))
            assert shown.endswith(piece.strip()) or piece == before, f"{piece!r} is held back: {shown!r}"
        parser.push(after)
        parser.finish(True)

    def test_arguments_do_not_wait(self) -> None:
        if not self.streams_strings:
            return
        long = "word " * 2000
        text = self.write(Turn(calls=[Call("do_it", {"s": long}, self.call_id("do_it", 0))]))
        at = text.index(long)
        parser = self.build().begin(self._opening())
        events = parser.push(text[:at])
        assert any(isinstance(e, CallBegin) for e in events), "a call begins when its name is known"
        for n in range(0, len(long) - 50, 50):
            sent = "".join(e.text for e in parser.push(long[n : n + 50]) if isinstance(e, CallArguments))
            assert len(sent) > 20, f"of an argument's next 50 characters {len(sent)} are sent"

    def test_without_tools_nothing_is_a_call(self) -> None:
        for turn in self._turns(5):
            for pieces in ([self.write(turn)], [*self.write(turn)]):
                events = self._read(pieces, tools=Tools())
                assert all(isinstance(e, (Reasoning, Text)) for e in events), (
                    f"a call without tools: {events}"
                )

    def test_an_answer_without_marks_is_text(self) -> None:
        for text in ("Hello", "a < b && c > d", "{\n  [1]\n}", "<tool", "?"):
            for pieces in ([text], [*text]):
                events = merged(self._read(pieces, tail=""))
                assert events == [Text(text)], f"{text!r} was read as {events}"

    def test_nonsense_is_no_error(self) -> None:
        """Marks anywhere, lost or doubled: no exception, the same however it is cut, calls in their order."""
        rng = random.Random(6)
        marks = sorted(self.build().marks) or ["<x>"]
        for turn in self._turns(6):
            text = self.write(turn)
            for _ in range(rng.randint(1, 3)):
                at, to = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
                text = rng.choice(
                    [
                        text[:at] + rng.choice(marks) + text[at:],
                        text[:at] + text[to:],
                        text[:to] + text[at:],
                        text[:to],
                    ]
                )
            for ended in (True, False):
                whole = self._read([text], ended=ended)
                self._same(whole, self._read([*text], ended=ended), [text])
                for arguments in arguments_of(whole, cut=True):
                    assert begins_json(arguments), f"{text!r}: the arguments are {arguments!r}"

    def test_answers_do_not_know_each_other(self) -> None:
        turns = [self._fit(turn) for turn in EDGES]
        parser = self.build()
        answers = [(parser.begin(self._opening()), self.write(turn)) for turn in turns]
        got: list[list[Event]] = [[] for _ in answers]
        for at in range(max(len(text) for _, text in answers)):
            for n, (answer, text) in enumerate(answers):
                got[n] += answer.push(text[at : at + 1]) if at < len(text) else []
        for n, (answer, _) in enumerate(answers):
            found = read_back([*got[n], *answer.finish(True)])
            assert found == turns[n], f"beside other answers {turns[n]} was read as {found}"

    def test_knows_when_it_reasons(self) -> None:
        if not self.thinks:
            return
        before, _, after = self.write(Turn("Hm, yes.", "So.")).partition("Hm, yes.")
        answer = self.build().begin(self._opening())
        answer.push(before + "Hm,")
        assert answer.reasoning, "it reasons, and does not say so"
        answer.push(" yes." + after)
        assert not answer.reasoning, "it does not reason any more, and says that it does"

    def _turns(self, seed: int) -> list[Turn]:
        rng = random.Random(seed)
        return [self._fit(turn) for turn in [*EDGES, *(random_turn(rng) for _ in range(self.rounds))]]

    def _fit(self, turn: Turn) -> Turn:
        calls = [replace(c, id=self.call_id(c.name, i)) for i, c in enumerate(turn.calls[: self.most_calls])]
        return Turn(turn.reasoning if self.thinks else "", turn.text, calls)

    def _opening(self, tools: Tools | None = None, tail: str | None = None, exact: bool = False) -> Opening:
        known = Tools(TOOLS) if tools is None else tools
        return Opening(self.tail if tail is None else tail, known, self.thinks, exact)

    def _read(
        self,
        pieces: Iterable[Piece],
        *,
        ended: bool = True,
        tools: Tools | None = None,
        tail: str | None = None,
        exact: bool = False,
    ) -> list[Event]:
        parser = self.build()
        answer = parser.begin(self._opening(tools, tail, exact and parser.exact))
        events = [event for piece in pieces for event in answer.push(piece)]
        return [*events, *answer.finish(ended)]

    def _marked(self, text: str) -> list[Piece]:
        marks = self.build().marks
        if not marks:
            return [text]
        parts = re.split("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")", text)
        return [Mark(part) if part in marks else part for part in parts if part]

    def _same(self, whole: list[Event], events: list[Event], pieces: Iterable[Piece]) -> None:
        one, other = merged(whole), merged(events)
        assert one == other, f"whole it is read as {one}, in the pieces {list(pieces)} as {other}"

    def _begins(self, sent: list[Event], whole: list[Event], text: str) -> None:
        for n, event in enumerate(sent):
            last = n == len(sent) - 1
            other = whole[n] if n < len(whole) else None
            if last and type(event) is type(other) and hasattr(event, "text"):
                assert other.text.startswith(event.text), f"{text!r} is read as {event}, the whole as {other}"  # type: ignore[union-attr]
            else:
                assert event == other, f"{text!r} is read as {event}, the whole as {other}"
