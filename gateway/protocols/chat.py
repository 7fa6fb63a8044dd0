"""/v1/chat/completions: a conversation, rendered by the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from bien.core.errors import UserError
from bien.core.speculation.counts import DraftCounts
from bien.gateway.parsing.events import Event
from bien.gateway.protocols.acceptance import Speculation
from bien.gateway.protocols.ask import Ask, Chat, Choice, Usage
from bien.gateway.protocols.calls import Choose, ToolSpec, delta_of, message_of, read_tools
from bien.gateway.protocols.events import Events, encode, extension, ids_field, whole
from bien.gateway.protocols.fields import ONLY, Fields, common, decode, top_count
from bien.gateway.protocols.refusal import Refusal
from bien.gateway.protocols.scores import Score, chat_logprobs
from bien.gateway.protocols.thinking import Thinking
from bien.gateway.protocols.turns import call


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """Only text is served; the other kinds' fields are known, so that the refusal names the kind."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None
    cache_control: Any = None


class Function(msgspec.Struct):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    function: Function
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """Also what clients echo back of an assistant's turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ChatFields(Fields, forbid_unknown_fields=True, kw_only=True):
    messages: list[Message]
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None  # 0 to 20, with logprobs
    tools: list[ToolSpec] | None = None
    tool_choice: str | Choose | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: str | None = None
    verbosity: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None


MAX_TOP = 20  # OpenAI's

_ONLY: dict[str, tuple[Any, ...]] = {
    **ONLY,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
}


def read(body: bytes) -> Ask:
    """UserError naming the field that is wrong."""
    fields = decode(body, ChatFields, _ONLY)
    if not fields.messages:
        raise UserError("messages is empty; valid: at least one message", field="messages")
    messages = [_message(m, i) for i, m in enumerate(fields.messages)]
    tools, calling = read_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    thinking = Thinking.of_effort(fields.reasoning_effort, "reasoning_effort")
    prompt = Chat(messages, fields.chat_template_kwargs or {}, tools, thinking, calling)
    return Ask(prompt=prompt, logprobs=_logprobs(fields), **common(fields))


class ChatAnswer:
    """Writes chat.completion objects: a role chunk, content chunks, an empty chunk with the finish reason."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        self.id = id
        self._head = {"id": id, "object": "chat.completion", "created": created, "model": ask.model}
        chunk = {**self._head, "object": "chat.completion.chunk"}
        self._events = Events(ask, chunk, b'"delta":{"content":', b"}", b'"delta":{}', chat_logprobs)

    def opening(self, index: int, usage: Usage) -> bytes:
        return self._events.raw(
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % index
        )

    def piece(
        self,
        index: int,
        text: str,
        token_ids: bytes | None,
        usage: Usage | None,
        scores: list[Score] | None = None,
    ) -> bytes:
        return self._events.piece(index, text, token_ids, usage, scores)

    def said(
        self,
        index: int,
        events: Sequence[Event],
        token_ids: bytes | None,
        usage: Usage | None,
        scores: list[Score] | None = None,
    ) -> bytes:
        deltas = [b'"delta":' + encode(delta) for event in events if (delta := delta_of(event))]
        deltas = deltas or [b'"delta":{"content":""}'] * (token_ids is not None or scores is not None)
        last = len(deltas) - 1
        return b"".join(
            self._events.chunk(index, delta, token_ids, usage, scores)
            if i == last
            else self._events.chunk(index, delta, None, None, None)
            for i, delta in enumerate(deltas)
        )

    def closing(
        self,
        index: int,
        finish: str,
        usage: Usage,
        speculation: Speculation | None = None,
        stop: str | None = None,
    ) -> bytes:
        return self._events.closing(index, finish, usage, speculation)

    def end(self, usage: Usage, drafts: DraftCounts | None = None) -> bytes:
        return self._events.end(usage, drafts)

    def failed(self, refusal: Refusal) -> bytes:
        return refusal.event()

    def whole(
        self,
        choices: list[Choice],
        usage: Usage,
        speculation: Speculation | None = None,
        prompt_logprobs: bytes | None = None,
        drafts: DraftCounts | None = None,
    ) -> bytes:
        prompt = b"" if prompt_logprobs is None else b',"prompt_logprobs":' + prompt_logprobs
        written = [_choice(i, choice) for i, choice in enumerate(choices)]
        return whole(
            self._head, written, usage, prompt + extension(speculation) + self._events.metrics(drafts)
        )


def _choice(index: int, choice: Choice) -> bytes:
    logprobs = None if choice.scores is None else msgspec.Raw(chat_logprobs(choice.scores))
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.events is not None:
        message |= message_of(choice.events)
    body = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}
    return encode(body)[:-1] + ids_field(choice.token_ids) + b"}"


def _logprobs(fields: ChatFields) -> int | None:
    top = top_count("top_logprobs", fields.top_logprobs or 0, MAX_TOP)
    if top and not fields.logprobs:
        raise UserError(f"top_logprobs={top} needs logprobs=true; valid: 0", field="top_logprobs")
    return top if fields.logprobs else None


def _message(message: Message, at: int) -> dict[str, Any]:
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise UserError(
                f"messages[{at}].{name} is not served; valid: null", field=f"messages[{at}].{name}"
            )
    # Templates know "system"; "developer" is its newer name in the API.
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": _content(message, at)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    if message.reasoning is not None:
        out.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        out["tool_calls"] = [call(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]
    return out


def _content(message: Message, at: int) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise UserError(
                f"messages[{at}] ({message.role}) has no content; valid: a string or a list of text parts",
                field=f"messages[{at}].content",
            )
        return ""
    for n, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise UserError(
                f"messages[{at}].content[{n}] has type {part.type!r}"
                f"{' and no text' if part.type == 'text' else ''}; valid: 'text' with a text",
                field=f"messages[{at}].content[{n}].type",
            )
    return "\n".join(part.text or "" for part in content)
