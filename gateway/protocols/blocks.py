"""Content blocks of Anthropic's API, read into turns."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bien.core.errors import UserError
from bien.gateway.protocols.sealed import unseal
from bien.gateway.protocols.turns import Turns


class Block(msgspec.Struct):
    """Of any type: the refusal of one that is not served can so name it."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


_NEEDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_OF = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "redacted_thinking", "tool_use")}


def content(turns: Turns, role: Literal["user", "assistant"], found: str | list[Block], where: str) -> None:
    """A message's content becomes turns. UserError naming a block that is not served, or not in this role."""
    if isinstance(found, str):
        found = [Block("text", text=found)]
    if role == "user" and not found:
        raise UserError(f"{where} is empty; valid: at least one block", field=where)
    if role == "assistant":
        turns.said()
    for at, block in enumerate(found):
        _check(block, _OF[role], f"{where}[{at}]")
        if block.type == "tool_result":
            result = plain(block.content or "", f"{where}[{at}].content")
            turns.result(block.tool_use_id or "", _failed(result) if block.is_error else result,
                         f"{where}[{at}].tool_use_id")  # fmt: skip
        elif role == "user":
            turns.user(block.text or "", new=False)
        elif block.type == "tool_use":
            turns.call(block.id or "", block.name or "", block.input or {})
        elif block.type == "text":
            turns.said(block.text or "")
        else:
            _thought(turns, block)


def plain(found: str | list[Block], where: str) -> str:
    """Content that may only be text."""
    if isinstance(found, str):
        return found
    for at, block in enumerate(found):
        _check(block, ("text",), f"{where}[{at}]")
    return "\n".join(block.text or "" for block in found)


def _check(block: Block, valid: tuple[str, ...], where: str) -> None:
    if block.type not in valid:
        raise UserError(
            f"{where} has type {block.type!r}; valid: {', '.join(map(repr, valid))}", field=f"{where}.type"
        )
    for name in _NEEDS[block.type]:
        if getattr(block, name) is None:
            raise UserError(f"{where} ({block.type}) has no {name}; valid: a {name}", field=f"{where}.{name}")


def _thought(turns: Turns, block: Block) -> None:
    """What another server has redacted is nothing that this model could read."""
    text = block.thinking or unseal(block.signature or block.data or "")
    if text:
        turns.thought(text)


def _failed(text: str) -> str:
    """Templates have no other place to say so."""
    return text if text.lstrip().lower().startswith(("error", "<tool_use_error")) else f"Error: {text}"
