"""Qwen3-Coder and Qwen3.5: functions and parameters in tags, values typed by the tool's schema.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

The line breaks around a value are not its own. The outer tag may be missing, as these models leave it out at
times. As in vLLM and SGLang a tag is one however it is spelled; in a value only </parameter> is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import KEY, Steps, Thinking
from bien.plugins.parsers._dialect import Dialect

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKS = frozenset({BEGIN, END, "<think>", "</think>"})
_NAME = re.compile(r"[ \t]*[\w.:/-]{0,256}[ \t]*")


class Qwen3Coder(Thinking):
    starts = (BEGIN, FUNCTION)

    def read(self, found: str) -> Steps[None]:
        reader = self.reader
        if found == BEGIN:
            yield from reader.blank()
            if not (yield from reader.accept(FUNCTION)):
                return
        head = yield from reader.collect((">",), _NAME)
        if head is None or not head[0].strip():
            return
        name = head[0].strip()
        self.call(name)
        while (found := (yield from self.between((PARAMETER, FUNCTION_END, END)))) == PARAMETER:
            key = yield from reader.collect((">",), KEY)
            if key is None:
                return self.end(complete=False)
            parameter = key[0].strip()
            self.parameter(parameter)
            yield from self.value(self.tools.types(name, parameter), (PARAMETER_END,), trim=True)
        self.end_parameters()
        if found == FUNCTION_END:
            yield from reader.blank()
            yield from reader.accept(END)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider("parser", "qwen3-coder", _build, summary="<function=…><parameter=…>: Qwen3-Coder, Qwen3.5")
    ]


def _build(config: NoParameters, ctx: Context) -> Dialect:
    return Dialect(Qwen3Coder, MARKS)
