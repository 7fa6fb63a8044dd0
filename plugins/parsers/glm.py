"""GLM-4.5, 4.7 and 5: a function's name, and keys and values in tags, values typed by the tool's schema.

    <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>

GLM-4.5 puts each on a line of its own; a call may have no arguments. As in vLLM
and SGLang a tag is one however it is spelled; in a value only </arg_value> is.
"""

from __future__ import annotations

from collections.abc import Iterable

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import KEY, NAME, Steps, Thinking
from bien.plugins.parsers._dialect import Dialect

BEGIN, END = "<tool_call>", "</tool_call>"
ARGUMENT, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MARKS = frozenset({BEGIN, END, ARGUMENT, KEY_END, VALUE, VALUE_END, "<think>", "</think>"})


class Glm(Thinking):
    starts = (BEGIN,)

    def read(self, found: str) -> Steps[None]:
        head = yield from self.reader.collect((ARGUMENT, END), NAME)
        if head is None or not head[0].strip():
            return
        name, found = head[0].strip(), head[1]
        self.call(name)
        while found == ARGUMENT:
            key = yield from self.reader.collect((KEY_END,), KEY)
            if key is None:
                return self.end(complete=False)
            found = yield from self.reader.until((VALUE, END), self.stray)
            if found == VALUE:
                self.parameter(key[0].strip())
                yield from self.value(self.tools.types(name, key[0].strip()), (VALUE_END,))
                found = yield from self.between((ARGUMENT, END))
        self.end_parameters()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("parser", "glm", _build, summary="<arg_key> and <arg_value>: GLM-4.5, 4.7, 5")]


def _build(config: NoParameters, ctx: Context) -> Dialect:
    return Dialect(Glm, MARKS)
