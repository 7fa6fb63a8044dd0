"""Lines for people. Names and paths are shown as they are: no markup, no emoji codes, no highlighting."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from bien.replay.report.words import clean


def as_is(text: str, style: str = "") -> Text:
    """For a console or a table."""
    return Text(clean(text), style)


def say(text: str, style: str = "", console: Console | None = None) -> None:
    """A line beside the results, on stderr unless a console is given."""
    (console or Console(stderr=True)).print(as_is(text, style), soft_wrap=True)
