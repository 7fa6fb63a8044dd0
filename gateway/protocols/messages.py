"""/v1/messages: Anthropic's API, as Claude Code and the SDKs speak it.

Clients are ahead of servers: a field that nobody here knows is accepted. One that would change the result and
is not served is refused by name.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from bien.core.errors import UserError, nearest
from bien.gateway.parsing.calling import AUTO, Calling
from bien.gateway.protocols.ask import Ask, Chat
from bien.gateway.protocols.blocks import Block, content, plain
from bien.gateway.protocols.fields import (
    MAX_INT,
    MAX_SESSION_LENGTH,
    at_least,
    between,
    decode,
    stop_strings,
)
from bien.gateway.protocols.thinking import Thinking
from bien.gateway.protocols.turns import Functions, Turns

OLD_VERSION = "2023-01-01"
LEAST_BUDGET = 1024  # Anthropic's
_SESSION = re.compile(r"_session_([0-9A-Za-z-]+)$")  # Claude Code's user_id ends so, or is an object in JSON


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]  # "system": what a client's hooks add on the way
    content: str | list[Block]


class Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None  # omitted: only the signature comes


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: Any = None


class Metadata(msgspec.Struct):
    user_id: str | None = None


class MessagesFields(msgspec.Struct, kw_only=True):
    model: str
    messages: list[Message]
    max_tokens: int | None = None  # required where something is generated
    system: str | list[Block] | None = None
    stream: bool | None = None
    temperature: float | None = None  # 0 to 1
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # one tier is here
    context_management: Any = None  # the answer says that no edit was applied
    # served with these values only
    container: Any = None
    mcp_servers: Any = None
    thread: Any = None
    compaction: Any = None


_ONLY: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "thread": (),
    "compaction": (),
}


class MessageStyle(msgspec.Struct, frozen=True):
    hide_reasoning: bool = False  # it goes to the client sealed
    edits_context: bool = False  # edits were asked for, and the answer says that there were none


def check_version(version: str | None) -> None:
    """UserError for the one version whose streams have another form. Newer ones are as this one."""
    if version == OLD_VERSION:
        raise UserError(
            f"anthropic-version={version!r} is not served; valid: '2023-06-01' or later",
            field="anthropic-version",
        )


def read(body: bytes) -> Ask:
    """UserError naming the field that is wrong."""
    fields = decode(body, MessagesFields, _ONLY)
    if fields.max_tokens is None:
        raise UserError("field 'max_tokens' is required and missing", field="max_tokens")
    last = len(fields.messages) - 1
    if last >= 0 and fields.messages[last].role == "assistant":
        raise UserError(
            f"messages[{last}] is the assistant's, and answers are not begun by clients here; valid: a last "
            "message of role 'user'",
            field=f"messages[{last}].role",
        )
    ask = _ask(fields)
    ask.max_tokens = at_least("max_tokens", fields.max_tokens, 1, 1)
    return ask


def read_count(body: bytes) -> Ask:
    """What would be asked, for its prompt alone: `max_tokens` may be missing."""
    return _ask(decode(body, MessagesFields, _ONLY))


def _ask(fields: MessagesFields) -> Ask:
    if not fields.messages:
        raise UserError("messages is empty; valid: at least one message", field="messages")
    functions = _functions(fields.tools)
    return Ask(
        model=fields.model,
        prompt=Chat(
            _turns(fields).messages,
            tools=functions.tools,
            thinking=_thinking(fields),
            calling=_calling(fields.tool_choice, functions.names),
            leads=bool(fields.system),
            bends=True,
        ),
        max_tokens=None,
        temperature=between("temperature", fields.temperature, 0, 1, 1.0),
        top_p=between("top_p", fields.top_p, 0, 1, 1.0, above=True),
        top_k=at_least("top_k", fields.top_k, 0, 0),
        stops=stop_strings("stop_sequences", fields.stop_sequences or []),
        stream=bool(fields.stream),
        include_usage=True,
        session=_session(fields.metadata),
        shorten=True,
        style=MessageStyle(
            hide_reasoning=fields.thinking is not None and fields.thinking.display == "omitted",
            edits_context=fields.context_management is not None,
        ),
    )


def _turns(fields: MessagesFields) -> Turns:
    turns = Turns()
    if fields.system:
        turns.system(plain(fields.system, "system"))
    for at, message in enumerate(fields.messages):
        where = f"messages[{at}].content"
        if message.role == "system":
            turns.system(plain(message.content, where))
        else:
            content(turns, message.role, message.content, where)
    return turns


def _functions(tools: list[Tool] | None) -> Functions:
    found = Functions()
    for at, tool in enumerate(tools or ()):
        where = f"tools[{at}]"
        if tool.type not in (None, "custom"):
            raise UserError(
                f"{where}.type={tool.type!r} is not served; valid: 'custom', null", field=f"{where}.type"
            )
        if tool.input_schema is None:
            raise UserError(
                f"{where} has no input_schema; valid: a JSON schema", field=f"{where}.input_schema"
            )
        found.add(tool.name, tool.description, tool.input_schema, where)
    return found


def _calling(choice: Choice | None, known: list[str]) -> Calling:
    if choice is None:
        return AUTO
    parallel = not choice.disable_parallel_tool_use
    if choice.type in ("auto", "none"):
        return Calling("none" if choice.type == "none" and known else "auto", parallel=parallel)
    if not known:
        raise UserError(
            f"tool_choice.type={choice.type!r} without tools; valid: 'auto', 'none'", field="tool_choice.type"
        )
    if choice.type == "tool" and choice.name not in known:
        raise UserError(
            f"tool_choice.name={choice.name!r}; {nearest(choice.name or '', known)}", field="tool_choice.name"
        )
    return Calling("required", (choice.name or "") if choice.type == "tool" else "", parallel)


def _thinking(fields: MessagesFields) -> Thinking:
    """As in the API, nothing said means no thinking: a client that does not ask for it has set `max_tokens`
    for the text alone."""
    config, output = fields.thinking, fields.output_config
    if output is not None and output.format is not None:
        raise UserError("output_config.format is not served; valid: null", field="output_config.format")
    effort = Thinking.of_effort(output.effort if output else None, "output_config.effort").effort
    if config is None or config.type == "disabled":
        return Thinking(on=False)
    if config.type == "adaptive":
        return Thinking(on=True, effort=effort)
    budget, most = config.budget_tokens, fields.max_tokens or MAX_INT
    if budget is None:
        raise UserError(
            "thinking is enabled without budget_tokens; valid: "
            f"{LEAST_BUDGET} or more, or thinking of type 'adaptive'",
            field="thinking.budget_tokens",
        )
    if not LEAST_BUDGET <= budget < most:
        raise UserError(
            f"thinking.budget_tokens={budget}; valid: from {LEAST_BUDGET} to below max_tokens={most}",
            field="thinking.budget_tokens",
        )
    return Thinking(on=True, effort=effort, budget=budget)


def _session(metadata: Metadata | None) -> str:
    user = (metadata.user_id if metadata else None) or ""
    found = ""
    if user.startswith("{"):
        try:
            said = msgspec.json.decode(user, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            said = {}
        found = said["session_id"] if isinstance(said.get("session_id"), str) else ""
    elif match := _SESSION.search(user):
        found = match[1]
    return found if len(found) <= MAX_SESSION_LENGTH else ""
