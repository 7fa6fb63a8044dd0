"""No dialect: all that a model says is text."""

from __future__ import annotations

from collections.abc import Iterable

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import Opening, Script, Steps


class Plain(Script):
    def run(self) -> Steps[None]:
        yield from self.reader.until((), self.say)


class NoParser:
    marks: frozenset[str] = frozenset()
    exact = False
    calls = False

    def begin(self, opening: Opening) -> Plain:
        return Plain(opening)

    def close(self) -> None:
        """Nothing to give back."""


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("parser", "none", _build, summary="no tool calls, no reasoning: all is text")]


def _build(config: NoParameters, ctx: Context) -> NoParser:
    return NoParser()
