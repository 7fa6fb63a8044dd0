"""/v1/responses: OpenAI's Responses API without a memory, as Codex uses it: every request brings the whole
conversation.

Clients are ahead of servers: a field that nobody here knows is accepted, and a tool that is no function is
left out; the answer's `tools` says which are there. What else would change the result is refused by name.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bien.core.errors import UserError, nearest
from bien.gateway.parsing.calling import Calling
from bien.gateway.protocols.ask import Ask, Chat
from bien.gateway.protocols.fields import MAX_SESSION_LENGTH, at_least, between, decode
from bien.gateway.protocols.response_items import Item, read_items
from bien.gateway.protocols.thinking import Thinking
from bien.gateway.protocols.turns import Functions, Turns


class Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(msgspec.Struct):
    type: str
    name: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name


class Text(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a wish; nothing in a prompt says it


class ResponsesFields(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[Item]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None  # 0 to 2
    top_p: float | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None  # one per conversation: the session
    # served with these values only
    store: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    truncation: Any = None
    top_logprobs: Any = None
    context_management: Any = None
    moderation: Any = None


_ONLY: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "context_management": ([],),
    "moderation": (),
}
_SEALED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


class ResponseStyle(msgspec.Struct):
    """What an answer says of its request, beside what an `Ask` has."""

    said: dict[str, Any]  # fields of the response object
    summary: bool  # reasoning comes as its summary: nothing shorter is made here
    sealed: bool  # and sealed, so that it can be sent back


def read(body: bytes) -> Ask:
    """UserError naming the field that is wrong."""
    fields = decode(body, ResponsesFields, _ONLY)
    if _LOGPROBS in (fields.include or ()):
        raise UserError(
            f"include holds {_LOGPROBS!r}, which is not served; valid: {_SEALED!r}", field="include"
        )
    session = fields.prompt_cache_key or ""
    functions = _functions(fields.tools or [])
    most = fields.max_output_tokens
    return Ask(
        model=fields.model,
        prompt=Chat(
            _turns(fields).messages,
            tools=functions.tools,
            thinking=_thinking(fields),
            calling=_calling(fields, functions.names),
            bends=True,
        ),
        max_tokens=None if most is None else at_least("max_output_tokens", most, 1, 1),
        temperature=between("temperature", fields.temperature, 0, 2, 1.0),
        top_p=between("top_p", fields.top_p, 0, 1, 1.0, above=True),
        stream=bool(fields.stream),
        session=session if len(session) <= MAX_SESSION_LENGTH else "",
        shorten=True,
        style=_style(fields),
    )


def _turns(fields: ResponsesFields) -> Turns:
    turns = Turns()
    if fields.instructions:
        turns.system(fields.instructions)
    if isinstance(fields.input, str):
        turns.user(fields.input)
    else:
        read_items(turns, fields.input)
    if not turns.messages:
        raise UserError("input is empty; valid: a text, or at least one item", field="input")
    return turns


def _functions(tools: list[Tool]) -> Functions:
    found = Functions()
    for at, tool in enumerate(tools):
        if tool.type == "function":
            found.add(tool.name, tool.description, tool.parameters, f"tools[{at}]")
    return found


def _calling(fields: ResponsesFields, known: list[str]) -> Calling:
    choice, parallel = fields.tool_choice, fields.parallel_tool_calls is not False
    if choice is None or choice == "auto" or (choice == "none" and not known):
        return Calling(parallel=parallel)
    if choice == "none":
        return Calling("none", parallel=parallel)
    if choice != "required" and choice.type != "function":
        raise UserError(
            f"tool_choice of type {choice.type!r} is not served; valid: 'none', 'auto', 'required', an "
            "object of type 'function'",
            field="tool_choice",
        )
    if choice == "required":
        if not known:
            raise UserError("tool_choice='required' without functions; valid: 'auto'", field="tool_choice")
        return Calling("required", parallel=parallel)
    if choice.name not in known:
        raise UserError(
            f"tool_choice.name={choice.name!r}; {nearest(choice.name or '', known)}", field="tool_choice.name"
        )
    return Calling("required", choice.name or "", parallel)


def _thinking(fields: ResponsesFields) -> Thinking:
    shape = fields.text.format if fields.text else None
    if shape is not None and shape.get("type") != "text":
        raise UserError(
            f"text.format of type {shape.get('type')!r} is not served; valid: 'text', null",
            field="text.format",
        )
    return Thinking.of_effort(fields.reasoning.effort if fields.reasoning else None, "reasoning.effort")


def _style(fields: ResponsesFields) -> ResponseStyle:
    reasoning = fields.reasoning or Reasoning()
    summary = reasoning.summary or reasoning.generate_summary
    said: dict[str, Any] = {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": summary},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "tools": [tool for tool in fields.tools or () if tool.type == "function"],
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
    }
    return ResponseStyle(said, summary not in (None, "none"), _SEALED in (fields.include or ()))
