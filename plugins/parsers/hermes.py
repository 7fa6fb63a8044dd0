"""Hermes, which most ChatML models speak (Hermes, Qwen2.5, Qwen3): JSON in tags.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

As in vLLM and SGLang a tag is one however it is spelled, except inside JSON strings. `parameters` is read as
`arguments`, either order and further keys are taken, and a closing brace or tag may be missing at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import Steps, Thinking, unwrapped
from bien.plugins.parsers._dialect import Dialect

BEGIN, END = "<tool_call>", "</tool_call>"
MARKS = frozenset({BEGIN, END, "<think>", "</think>"})


class Hermes(Thinking):
    starts = (BEGIN,)

    def read(self, found: str) -> Steps[None]:
        reader = self.reader
        name, arguments = "", ""
        yield from reader.blank()
        more = yield from reader.accept("{")
        while more:
            key = yield from self._string()
            yield from reader.blank()
            if key is None or not (yield from reader.accept(":")):
                break
            if key in ("arguments", "parameters") and name and not self.called:
                self.call(name)
                if not (yield from self.content()):
                    return
            elif key == "name" and not name:
                name = (yield from self._string()) or ""
                if not name.strip():
                    break
            else:
                held: list[str] = []
                yield from reader.blank()
                if not (yield from reader.json(held.append)):
                    break
                if key in ("arguments", "parameters"):
                    arguments = "".join(held)
            yield from reader.blank()
            more = yield from reader.accept(",")
            if more:
                continue
            if not (yield from self._closed(bool(name))):
                break
            if name:
                self._finish(name, arguments)
                yield from reader.blank()
                yield from reader.accept(END)
            return
        if self.called:  # what follows its arguments is no call's
            self.end()

    def _string(self) -> Steps[str | None]:
        """A JSON string, or None."""
        held: list[str] = []
        yield from self.reader.blank()
        if (yield from self.reader.peek()) != '"' or not (yield from self.reader.json(held.append)):
            return None
        text: str = json.loads("".join(held))
        return text

    def _closed(self, named: bool) -> Steps[bool]:
        """Whether the object ends here, as it should or for want of a brace."""
        if (yield from self.reader.accept("}")):
            return True
        if not named:
            return False
        if (yield from self.reader.accept(END)):
            return True
        return self.reader.closed and self.reader.ended and not (yield from self.reader.peek())

    def _finish(self, name: str, arguments: str) -> None:
        if not self.called:
            self.call(name)
            self.argue(unwrapped(arguments))
        self.end()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("parser", "hermes", _build, summary="<tool_call> with JSON: Hermes, Qwen2.5, Qwen3")]


def _build(config: NoParameters, ctx: Context) -> Dialect:
    return Dialect(Hermes, MARKS)
