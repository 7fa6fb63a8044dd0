"""What /v1/responses answers: a response object with its output items, whole or as OpenAI's events."""

from __future__ import annotations

from typing import Any

import msgspec

from bien.core.speculation.counts import DraftCounts
from bien.gateway.protocols.acceptance import Speculation
from bien.gateway.protocols.ask import Ask, Choice, Usage
from bien.gateway.protocols.parts import InParts, Part, Parts, parts_of
from bien.gateway.protocols.refusal import Refusal
from bien.gateway.protocols.responses import ResponseStyle
from bien.gateway.protocols.sealed import seal

encode = msgspec.json.encode
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ResponseAnswer(InParts):
    """response.created and in_progress; of each item output_item.added, its content, output_item.done; then
    response.completed, incomplete or failed with all of it. Every event has a number."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        style = ask.style
        assert isinstance(style, ResponseStyle)
        self.id = id
        self._style = style
        self._cut = False  # the limit of tokens has ended it
        self._number = 0
        self._parts = Parts(self)
        self._head: dict[str, Any] = {
            "id": id, "object": "response", "created_at": created, "model": ask.model, "error": None,
            "incomplete_details": None, **style.said,
        }  # fmt: skip

    def opening(self, index: int, usage: Usage) -> bytes:
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def closing(
        self,
        index: int,
        finish: str,
        usage: Usage,
        speculation: Speculation | None = None,
        stop: str | None = None,
    ) -> bytes:
        self._cut = finish == "length"
        return self._parts.close(cut=self._cut)

    def end(self, usage: Usage, drafts: DraftCounts | None = None) -> bytes:
        response = self._ended(self._parts.all, usage)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, refusal: Refusal) -> bytes:
        out = self._parts.close(cut=True)
        response = self._response("failed", self._items(self._parts.all), None)
        code = "invalid_prompt" if refusal.client_fault else "server_error"
        response["error"] = {"code": code, "message": refusal.message}
        return out + self._event("response.failed", response=response)

    def whole(
        self,
        choices: list[Choice],
        usage: Usage,
        speculation: Speculation | None = None,
        prompt_logprobs: bytes | None = None,
        drafts: DraftCounts | None = None,
    ) -> bytes:
        self._cut = choices[0].finish == "length"
        return encode(self._ended(parts_of(choices[0]), usage))

    def began(self, part: Part) -> bytes:
        out = self._event(
            "response.output_item.added", output_index=part.index, item=self._item(part, "in_progress", False)
        )
        if part.kind == "call":
            return out
        if part.kind == "reasoning" and self._style.summary:
            return out + self._of(part, "reasoning_summary_part.added", part=_content(part, "", True))
        return out + self._of(part, "content_part.added", part=_content(part, "", False))

    def grew(self, part: Part, text: str) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        return self._of(part, f"{self._content_name(part)}.delta", delta=text, **more)

    def ended(self, part: Part) -> bytes:
        name, text = self._content_name(part), part.text
        if part.kind == "call":
            out = b"" if text else self.grew(part, "{}")
            out += self._of(part, f"{name}.done", arguments=text or "{}", name=part.name)
        elif part.kind == "reasoning" and self._style.summary:
            out = self._of(part, f"{name}.done", text=text)
            out += self._of(part, "reasoning_summary_part.done", part=_content(part, text, True))
        else:
            more: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
            out = self._of(part, f"{name}.done", text=text, **more)
            out += self._of(part, "content_part.done", part=_content(part, text, False))
        item = self._item(part, _status(part), True)
        return out + self._event("response.output_item.done", output_index=part.index, item=item)

    def _content_name(self, part: Part) -> str:
        if part.kind == "call":
            return "function_call_arguments"
        if part.kind == "text":
            return "output_text"
        return "reasoning_summary_text" if self._style.summary else "reasoning_text"

    def _of(self, part: Part, kind: str, /, **fields: Any) -> bytes:
        where: dict[str, Any] = {"item_id": self._item_id(part), "output_index": part.index}
        if part.kind != "call":
            summary = part.kind == "reasoning" and self._style.summary
            where["summary_index" if summary else "content_index"] = 0
        return self._event(f"response.{kind}", **where, **fields)

    def _item(self, part: Part, status: str, filled: bool) -> dict[str, Any]:
        """`filled`: with what it holds."""
        item: dict[str, Any] = {"id": self._item_id(part)}
        text = part.text if filled else ""
        if part.kind == "call":
            arguments = (text or "{}") if filled else ""
            call = {"call_id": part.id, "name": part.name, "arguments": arguments}
            return {**item, "type": "function_call", **call, "status": status}
        if part.kind == "text":
            content = [_content(part, text, False)] if filled else []
            return {**item, "type": "message", "role": "assistant", "content": content, "status": status}
        summary = self._style.summary
        item |= {"type": "reasoning", "summary": [_content(part, text, True)] if filled and summary else []}
        if not summary:
            item["content"] = [_content(part, text, False)] if filled else []
        if self._style.sealed:
            item["encrypted_content"] = seal(text) if filled else None
        return {**item, "status": status}

    def _items(self, parts: list[Part]) -> list[dict[str, Any]]:
        return [self._item(part, _status(part), True) for part in parts]

    def _item_id(self, part: Part) -> str:
        return f"{_PREFIXES[part.kind]}_{self.id.partition('_')[2]}{part.index:02d}"

    def _ended(self, parts: list[Part], usage: Usage) -> dict[str, Any]:
        response = self._response("incomplete" if self._cut else "completed", self._items(parts), usage)
        if self._cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        return {**self._head, "status": status, "output": output, "usage": usage and counts(usage)}

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def counts(usage: Usage) -> dict[str, Any]:
    """Cached tokens are among those of the input."""
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _content(part: Part, text: str, summary: bool) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "summary_text" if summary else "reasoning_text", "text": text}


def _status(part: Part) -> str:
    return "completed" if part.complete else "incomplete"
