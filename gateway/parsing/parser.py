"""The contract of the kind `parser`: a dialect, and what reads one answer in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from bien.core.text.marks import Piece
from bien.gateway.parsing.events import Event
from bien.gateway.parsing.tools import Tools


@dataclass(frozen=True, slots=True)
class Opening:
    """What is known of an answer before it comes; written by the gateway."""

    tail: str = ""  # the end of the prompt, control tokens spelled: where the answer begins
    tools: Tools = field(default_factory=Tools)  # those that may be called; none: nothing is read as a call
    thinks: bool = True  # whether the model's template or vocabulary knows marks of reasoning
    exact: bool = False  # whether control tokens come as marks; if not, all that comes is text


class AnswerParser(Protocol):
    """Reads one answer. It never raises, whatever a model says: what it cannot read is text."""

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning, for all that is known."""
        ...

    def push(self, piece: Piece) -> list[Event]:
        """The events that a piece adds. Nothing is held back that cannot be the beginning of a mark, of the
        blanks that frame one, or of a value whose type is still open."""
        ...

    def finish(self, ended: bool) -> list[Event]:
        """Nothing more comes. `ended`: the model said so; otherwise the answer was cut. A call that is open
        ends here, complete only where the model left out no more than closing marks. One that was cut before
        its name was known is left out."""
        ...


Messages = list[dict[str, Any]]
"""As chat templates take them."""


class Parser(Protocol):
    """A dialect. Its `begin` is called for each answer, from one thread."""

    marks: frozenset[str]
    """Control tokens that it wants to see, as their vocabulary spells them."""

    exact: bool
    """Whether only these tokens are marks. If not, ordinary text that spells one is one too."""

    calls: bool
    """Whether it has tool calls at all."""

    def begin(self, opening: Opening) -> AnswerParser: ...

    def close(self) -> None: ...


@runtime_checkable
class Speller(Protocol):
    """A `Parser` may have this too, for models whose chat template knows no tools."""

    def spell(self, messages: Messages, tools: Messages | None) -> Messages:
        """The conversation with tools, calls and results written into what the template knows: `content` of
        the roles system, user and assistant. Does not change what it is given."""
        ...
