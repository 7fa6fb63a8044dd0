"""DeepSeek: V3 and R1, V3.1 (both JSON between control tokens), V3.2 and V4 (DSML).

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

What a parameter says of itself (`string`) counts; the tool's schema where it says nothing. A DSML call may
hold JSON instead. As in vLLM and SGLang a mark is one however it is spelled, except inside JSON strings; in a
parameter only its end is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import NAME, TYPES, Steps, Thinking
from bien.plugins.parsers._dialect import Dialect

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DSML = "｜DSML｜"
_NAMES = ("tool_calls", "function_calls", "toolcalls", "tool")  # V4's, V3.2's; what V4 makes of it at times
SECTIONS = tuple(f"<{slash}{DSML}{name}>" for slash in ("", "/") for name in _NAMES)
INVOKE, INVOKE_END = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"
MARKS = frozenset({CALLS, CALLS_END, BEGIN, SEPARATOR, END, DSML, "<think>", "</think>"})
_HEAD = re.compile(r"[^<>]{0,2048}")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class DeepSeek(Thinking):
    starts = (CALLS, CALLS_END, BEGIN, *SECTIONS, INVOKE)

    def read(self, found: str) -> Steps[None]:
        if found == BEGIN:
            yield from self._json_call()
        elif found == INVOKE:
            yield from self._invoke()
        else:
            self.reader.forget()
            self.frame()

    def _json_call(self) -> Steps[None]:
        reader = self.reader
        head = yield from reader.collect((SEPARATOR,), NAME)
        if head is None:
            return
        name = head[0].strip()
        yield from reader.blank()
        if name == "function" and (yield from reader.peek()) not in ("{", ""):
            line = yield from reader.collect(("```json", "```", "{"), NAME)
            if line is None:
                return
            name = line[0].strip()
            if line[1] == "{":
                return
        if not name:
            return
        self.call(name)
        if (yield from self.arguments()):
            yield from reader.blank()
            if (yield from reader.accept("```")):
                yield from reader.blank()
            yield from reader.accept(END)

    def _invoke(self) -> Steps[None]:
        reader = self.reader
        head = yield from reader.collect((">",), _HEAD)
        name = dict(_ATTRIBUTE.findall(head[0])).get("name", "") if head else ""
        if not name:
            return
        self.call(name)
        yield from reader.blank()
        if (yield from reader.peek()) == "{":
            if (yield from self.arguments()):
                yield from reader.blank()
                yield from reader.accept(INVOKE_END)
            return
        while (yield from self.between((PARAMETER, INVOKE_END))) == PARAMETER:
            head = yield from reader.collect((">",), _HEAD)
            said = dict(_ATTRIBUTE.findall(head[0])) if head else {}
            if "name" not in said:
                return self.end(complete=False)
            types = self.tools.types(name, said["name"])
            if "string" in said:
                types = frozenset({"string"}) if said["string"] == "true" else TYPES - {"string"}
            self.parameter(said["name"])
            yield from self.value(types, (PARAMETER_END,))
        self.end_parameters()


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("parser", "deepseek", _build, summary="DeepSeek V3, R1, V3.1 (JSON), V3.2, V4 (DSML)")]


def _build(config: NoParameters, ctx: Context) -> Dialect:
    return Dialect(DeepSeek, MARKS)
