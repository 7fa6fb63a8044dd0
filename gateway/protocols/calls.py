"""Tools and calls as OpenAI's chat has them: read from requests, written into answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from bien.core.errors import UserError, nearest
from bien.gateway.parsing.calling import AUTO, Calling
from bien.gateway.parsing.events import CallArguments, CallBegin, Event, Reasoning, Text
from bien.gateway.protocols.turns import Functions


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # accepted; nothing forces a model to keep to a schema yet


class ToolSpec(msgspec.Struct, forbid_unknown_fields=True):
    """Only functions are served; the other kind's field is known, so that the refusal names the kind."""

    type: str
    function: FunctionSpec | None = None
    custom: Any = None
    cache_control: Any = None


class Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class Choose(msgspec.Struct, forbid_unknown_fields=True):
    function: Named
    type: Literal["function"] = "function"


def read_tools(
    tools: list[ToolSpec] | None, choice: str | Choose | None, parallel: bool | None
) -> tuple[list[dict[str, Any]] | None, Calling]:
    """Tools for the chat template (None: there are none), and what is wanted of calls. UserError naming the
    field that is wrong."""
    found = Functions()
    for i, tool in enumerate(tools or ()):
        where, function = f"tools[{i}]", tool.function
        if tool.type != "function" or function is None:
            raise UserError(
                f"{where} has type {tool.type!r}{' and no function' if tool.type == 'function' else ''}; "
                "valid: 'function' with a function",
                field=f"{where}.type",
            )
        found.add(function.name, function.description, function.parameters, f"{where}.function")
    return found.tools, _calling(choice, found.names, parallel is not False)


def _calling(choice: str | Choose | None, names: list[str], parallel: bool) -> Calling:
    if isinstance(choice, Choose):
        name = choice.function.name
        if name not in names:
            raise UserError(f"tool_choice names {name!r}; {nearest(name, names)}", field="tool_choice")
        return Calling("required", name, parallel=False)
    if choice not in (None, "auto", "none", "required"):
        valid = "'auto', 'none', 'required', {'type': 'function', 'function': {'name': …}}, null"
        raise UserError(f"tool_choice={choice!r} is not served; valid: {valid}", field="tool_choice")
    if choice == "required" and not names:
        raise UserError(
            "tool_choice='required' needs tools; valid: 'auto', 'none', null", field="tool_choice"
        )
    if choice in (None, "auto") and parallel:
        return AUTO
    return Calling(choice or "auto", parallel=parallel)  # type: ignore[arg-type]


def delta_of(event: Event) -> dict[str, Any] | None:
    """What a chunk's `delta` says of it; None: nothing."""
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, CallBegin):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": event.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


def message_of(events: Iterable[Event]) -> dict[str, Any]:
    """Fields of a whole answer's message."""
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Text):
            text.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.id, "type": "function", "function": function})
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    out: dict[str, Any] = {"content": "".join(text) if text or not calls else None}
    if reasoning:
        out["reasoning_content"] = "".join(reasoning)
    if calls:
        out["tool_calls"] = calls
    return out
