"""What /v1/messages answers: a message of content blocks, whole or as Anthropic's events."""

from __future__ import annotations

from typing import Any

import msgspec

from bien.core.speculation.counts import DraftCounts
from bien.gateway.protocols.acceptance import Speculation
from bien.gateway.protocols.ask import Ask, Choice, Usage
from bien.gateway.protocols.messages import MessageStyle
from bien.gateway.protocols.parts import InParts, Part, Parts, parts_of
from bien.gateway.protocols.refusal import Refusal
from bien.gateway.protocols.sealed import seal, signature

encode = msgspec.json.encode


class MessageAnswer(InParts):
    """message_start, ping, then content_block_start, _delta … and _stop of one block after the other,
    message_delta, message_stop."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        style = ask.style
        assert isinstance(style, MessageStyle)
        self.id = id
        self._hide = style.hide_reasoning
        self._limit = ask.max_tokens
        self._edits: dict[str, Any] = (
            {"context_management": {"applied_edits": []}} if style.edits_context else {}
        )
        self._head: dict[str, Any] = {"id": id, "type": "message", "role": "assistant", "model": ask.model}
        self._parts = Parts(self)

    def opening(self, index: int, usage: Usage) -> bytes:
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = counts(usage)
        return _event("message_start", message=message) + _event("ping")

    def closing(
        self,
        index: int,
        finish: str,
        usage: Usage,
        speculation: Speculation | None = None,
        stop: str | None = None,
    ) -> bytes:
        out = self._parts.close()
        delta = {"stop_reason": self._reason(finish, usage, stop), "stop_sequence": stop}
        return out + _event("message_delta", delta=delta, usage=counts(usage), **self._edits)

    def end(self, usage: Usage, drafts: DraftCounts | None = None) -> bytes:
        return _event("message_stop")

    def failed(self, refusal: Refusal) -> bytes:
        return b"event: error\ndata: " + refusal.anthropic() + b"\n\n"

    def whole(
        self,
        choices: list[Choice],
        usage: Usage,
        speculation: Speculation | None = None,
        prompt_logprobs: bytes | None = None,
        drafts: DraftCounts | None = None,
    ) -> bytes:
        choice = choices[0]
        return encode(
            {
                **self._head,
                "content": [
                    self._block(part) for part in parts_of(choice) if part.complete or part.kind != "call"
                ],
                "stop_reason": self._reason(choice.finish, usage, choice.stop),
                "stop_sequence": choice.stop,
                "usage": counts(usage),
                **self._edits,
            }
        )

    def began(self, part: Part) -> bytes:
        return _event("content_block_start", index=part.index, content_block=_empty(part))

    def grew(self, part: Part, text: str) -> bytes:
        if part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": text}
        elif part.kind == "text":
            delta = {"type": "text_delta", "text": text}
        elif self._hide:
            return b""
        else:
            delta = {"type": "thinking_delta", "thinking": text}
        return _event("content_block_delta", index=part.index, delta=delta)

    def ended(self, part: Part) -> bytes:
        out = b""
        if part.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": self._sign(part)}
            out = _event("content_block_delta", index=part.index, delta=delta)
        return out + _event("content_block_stop", index=part.index)

    def _block(self, part: Part) -> dict[str, Any]:
        if part.kind == "call":
            return {**_empty(part), "input": msgspec.json.decode(part.text or "{}")}
        if part.kind == "text":
            return {**_empty(part), "text": part.text}
        return {**_empty(part), "thinking": "" if self._hide else part.text, "signature": self._sign(part)}

    def _sign(self, part: Part) -> str:
        return seal(part.text) if self._hide else signature(part.text)

    def _reason(self, finish: str, usage: Usage, stop: str | None) -> str:
        if finish == "length":
            short = self._limit is not None and usage.completion_tokens < self._limit
            return "model_context_window_exceeded" if short else "max_tokens"
        if stop is not None:
            return "stop_sequence"
        return "tool_use" if finish == "tool_calls" else "end_turn"


def counts(usage: Usage) -> dict[str, Any]:
    """Anthropic's convention: the prompt is the sum of its three counts. What is computed goes into the cache
    by itself, so nothing is counted as its creation."""
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens},
        "service_tier": "standard",
    }


def _empty(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    if part.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **fields}))
