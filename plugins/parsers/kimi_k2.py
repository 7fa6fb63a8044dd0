"""Kimi K2 and K2.5: control tokens around an id, which names the function, and JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
    <|tool_call_end|><|tool_calls_section_end|>

The id goes to the client as it is, and back into the template. As in vLLM and SGLang a
mark is one however it is spelled, except inside JSON strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import NAME, Steps, Thinking
from bien.plugins.parsers._dialect import Dialect

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS = frozenset({SECTION, SECTION_END, BEGIN, ARGUMENTS, END, "<think>", "</think>"})
_ID = re.compile(r"(?:functions\.)?(.+?):[0-9]+")


class KimiK2(Thinking):
    starts = (SECTION, BEGIN, SECTION_END)

    def read(self, found: str) -> Steps[None]:
        if found != BEGIN:
            self.reader.forget()
            return self.frame()
        head = yield from self.reader.collect((ARGUMENTS,), NAME)
        id = head[0].strip() if head is not None else ""
        full = _ID.fullmatch(id)
        name = full[1] if full else id.removeprefix("functions.")
        if not name:
            return
        self.call(name, id if full else "")
        if (yield from self.arguments()):
            yield from self.reader.blank()
            yield from self.reader.accept(END)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("parser", "kimi-k2", _build, summary="<|tool_call_begin|> with ids of its own: Kimi K2")]


def _build(config: NoParameters, ctx: Context) -> Dialect:
    return Dialect(KimiK2, MARKS)
