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
from typing import Any

from bien.core.api import Context, NoParameters, Provider, hookimpl
from bien.gateway.api import Messages, Steps, Thinking, unwrapped
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
        """A JSON string that can be a name, or None."""
        held: list[str] = []
        yield from self.reader.blank()
        if (yield from self.reader.peek()) != '"' or not (yield from self.reader.json(held.append)):
            return None
        text: str = json.loads("".join(held))
        return text if text.isprintable() else None

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


class HermesDialect(Dialect):
    """Most ChatML templates know no tools: then they are described in the system message."""

    def spell(self, messages: Messages, tools: Messages | None) -> Messages:
        out: Messages = []
        for message in messages:
            if message["role"] == "tool":
                text = f"<tool_response>\n{message['content']}\n</tool_response>"
                if out and out[-1].get("name") == _RESULTS:
                    out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n{text}"}
                else:
                    out.append({"role": "user", "name": _RESULTS, "content": text})
            elif calls := message.get("tool_calls"):
                said = {k: v for k, v in message.items() if k != "tool_calls"}
                texts = [message["content"], *(_call(call["function"]) for call in calls)]
                out.append({**said, "content": "\n".join(text for text in texts if text)})
            else:
                out.append(message)
        for message in out:
            if message.get("name") == _RESULTS:
                del message["name"]
        if not tools:
            return out
        described = _TOLD.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if out and out[0]["role"] == "system":
            return [{**out[0], "content": f"{out[0]['content']}\n\n{described}"}, *out[1:]]
        return [{"role": "system", "content": described}, *out]


_RESULTS = "\0results"  # a name that no client can give: results in a row are one message
_TOLD = """# Tools

You may call functions. Here they are, as JSON:
<tools>
{}
</tools>

To call one, write a JSON object with its name and arguments between tags, and nothing after it:
<tool_call>
{{"name": "the function's name", "arguments": {{"its parameter": "value"}}}}
</tool_call>"""


def _call(function: dict[str, Any]) -> str:
    call = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{BEGIN}\n{call}\n{END}"


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [Provider("parser", "hermes", _build, summary="<tool_call> with JSON: Hermes, Qwen2.5, Qwen3")]


def _build(config: NoParameters, ctx: Context) -> HermesDialect:
    return HermesDialect(Hermes, MARKS)
