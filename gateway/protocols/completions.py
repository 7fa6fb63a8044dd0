"""/v1/completions: a prompt as text or token ids.

Beside OpenAI's fields: `prompt_token_ids_b64` (instead of `prompt`) and `trace_decode_token_ids[_b64]`
carry ids as base64 of uint32-LE, which costs a hundredth of a JSON list; `trace_decode_token_ids` are a
recorded continuation that replaces the sampled tokens; `return_token_ids` adds `token_ids` to choices, and
at the end `bien` with the totals of speculation (ask.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from bien.core.errors import UserError
from bien.core.request import TokenIds
from bien.gateway.protocols.ask import Ask, Speculation, Usage
from bien.gateway.protocols.events import Events, encode, encode_ids, extension
from bien.gateway.protocols.fields import ONLY, Fields, common, decode, token_ids, token_ids_b64, top_count
from bien.gateway.protocols.scores import Score, completion_logprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_TOP = 5  # OpenAI's


class CompletionFields(Fields, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    prompt_token_ids_b64: str | None = None
    trace_decode_token_ids: list[int] | None = None
    trace_decode_token_ids_b64: str | None = None
    logprobs: bool | int | None = None  # 0 to 5 alternatives per token; true means nothing here
    echo: Any = None
    suffix: Any = None
    add_special_tokens: Any = None


_ONLY = {**ONLY, "echo": (False,), "suffix": ("",), "add_special_tokens": (True,)}


def read(body: bytes) -> Ask:
    """UserError naming the field that is wrong."""
    fields = decode(body, CompletionFields, _ONLY)
    prompt = _prompt(fields)
    forced = _forced(fields)
    ask = Ask(prompt=prompt, forced=forced, logprobs=_logprobs(fields), **common(fields))
    if ask.max_tokens is None:
        ask.max_tokens = len(forced) if forced else DEFAULT_MAX_TOKENS
    return ask


class CompletionAnswer:
    """Writes text_completion objects."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        self.id = id
        self._head = {"id": id, "object": "text_completion", "created": created, "model": ask.model}
        self._events = Events(ask, self._head, b'"text":', b"", b'"text":""', completion_logprobs)

    def opening(self) -> bytes:
        return b""

    def piece(
        self,
        text: str,
        token_ids: bytes | None,
        usage: Usage | None,
        scores: list[Score] | None = None,
    ) -> bytes:
        return self._events.piece(text, token_ids, usage, scores)

    def closing(self, finish: str, usage: Usage, speculation: Speculation | None = None) -> bytes:
        return self._events.closing(finish, usage, speculation)

    def whole(
        self,
        text: str,
        token_ids: bytes | None,
        finish: str,
        usage: Usage,
        speculation: Speculation | None = None,
        scores: list[Score] | None = None,
    ) -> bytes:
        logprobs = None if scores is None else msgspec.Raw(completion_logprobs(scores))
        ids = b"" if token_ids is None else b',"token_ids":' + encode_ids(token_ids)
        choice = encode({"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish})[:-1]
        end = (b'}],"usage":', encode(usage), extension(speculation), b"}")
        return b"".join((encode(self._head)[:-1], b',"choices":[', choice, ids, *end))


def _logprobs(fields: CompletionFields) -> int | None:
    value = fields.logprobs
    if value is None or value is False:
        return None
    if value is True:
        raise UserError(f"logprobs=true; valid: 0 to {MAX_TOP}, false, null", field="logprobs")
    return top_count("logprobs", value, MAX_TOP)


def _prompt(fields: CompletionFields) -> str | TokenIds:
    prompt, packed = fields.prompt, fields.prompt_token_ids_b64
    if (prompt is None) == (packed is None):
        raise UserError(
            f"{'neither' if prompt is None else 'both'} of prompt and prompt_token_ids_b64 given; "
            "valid: exactly one",
            field="prompt",
        )
    if packed is not None:
        return token_ids_b64("prompt_token_ids_b64", packed)
    assert prompt is not None
    if isinstance(prompt, str):
        return prompt
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return token_ids("prompt", prompt)  # type: ignore[arg-type]
    if len(prompt) != 1:
        what = "a mixed list" if len(kinds) > 1 else f"{len(prompt)} prompts"
        raise UserError(
            f"prompt holds {what}; valid: one string, one list of token ids, or a list of one of these",
            field="prompt",
        )
    only = prompt[0]
    return only if isinstance(only, str) else token_ids("prompt", only)  # type: ignore[arg-type]


def _forced(fields: CompletionFields) -> TokenIds | None:
    ids, packed = fields.trace_decode_token_ids, fields.trace_decode_token_ids_b64
    if ids is not None and packed is not None:
        raise UserError(
            "trace_decode_token_ids and trace_decode_token_ids_b64 are both given; valid: one of them",
            field="trace_decode_token_ids",
        )
    if packed is not None:
        return token_ids_b64("trace_decode_token_ids_b64", packed) if packed else None
    return token_ids("trace_decode_token_ids", ids) if ids else None
