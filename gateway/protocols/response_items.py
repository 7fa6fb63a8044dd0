"""Input items of OpenAI's Responses API, read into turns."""

from __future__ import annotations

import msgspec

from bien.core.errors import UserError, nearest
from bien.gateway.protocols.sealed import unseal
from bien.gateway.protocols.turns import Turns


class Content(msgspec.Struct):
    """Of any type: the refusal of one that is not served can so name it."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[Content] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None  # JSON
    input: str | None = None  # of a custom tool
    output: str | list[Content] | None = None
    summary: list[Content] | None = None
    encrypted_content: str | None = None


_NEEDS = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
}
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal")


def read_items(turns: Turns, items: list[Item]) -> None:
    """UserError naming an item that is not served."""
    for at, item in enumerate(items):
        where = f"input[{at}]"
        if item.type not in _NEEDS:
            raise UserError(
                f"{where} has type {item.type!r}; {nearest(item.type, _NEEDS)}", field=f"{where}.type"
            )
        for name in _NEEDS[item.type]:
            if getattr(item, name) is None:
                raise UserError(
                    f"{where} ({item.type}) has no {name}; valid: a {name}", field=f"{where}.{name}"
                )
        if item.type == "message":
            _message(turns, item, where)
        elif item.type == "reasoning":
            turns.thought(_reasoning(item))
        elif item.type.endswith("_output"):
            turns.result(item.call_id or "", _text(item.output, f"{where}.output"), f"{where}.call_id")
        elif item.type == "function_call":
            turns.call(item.call_id or "", item.name or "", item.arguments or "")
        else:
            turns.call(item.call_id or "", item.name or "", {"input": item.input or ""})


def _message(turns: Turns, item: Item, where: str) -> None:
    if item.role not in _ROLES:
        raise UserError(
            f"{where} has role {item.role!r}; valid: {', '.join(map(repr, _ROLES))}", field=f"{where}.role"
        )
    text = _text(item.content, f"{where}.content")
    if item.role == "user":
        turns.user(text)
    elif item.role == "assistant":
        turns.said(text)
    else:
        turns.system(text)


def _text(content: str | list[Content] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for at, part in enumerate(content):
        if part.type not in _TEXTS:
            raise UserError(
                f"{where}[{at}] has type {part.type!r}; valid: {', '.join(map(repr, _TEXTS))}",
                field=f"{where}[{at}].type",
            )
        if part.text is None and part.refusal is None:
            raise UserError(f"{where}[{at}] has no text; valid: a text", field=f"{where}[{at}].text")
    return "\n".join(part.text or part.refusal or "" for part in content)


def _reasoning(item: Item) -> str:
    """As whole as it came back. What another server has encrypted is nothing that this model could read."""
    whole = item.content if isinstance(item.content, list) else []
    if found := "".join(part.text or "" for part in whole):
        return found
    if (sealed := unseal(item.encrypted_content or "")) is not None:
        return sealed
    return "\n".join(part.text or "" for part in item.summary or ())
