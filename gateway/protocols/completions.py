"""/v1/completions: a prompt as text or token ids.

Beside OpenAI's fields: `prompt_token_ids_b64` (instead of `prompt`) and `trace_decode_token_ids[_b64]`
carry ids as base64 of uint32-LE, which costs a hundredth of a JSON list; `trace_decode_token_ids` are a
recorded continuation that replaces the sampled tokens; `return_token_ids` adds `token_ids` to choices, and
at the end `bien` with the totals of speculation (acceptance.py). With `echo` the prompt is part of `text` and
`logprobs`, and not of `token_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bien.core.errors import UserError
from bien.core.request import TokenIds
from bien.core.speculation.counts import DraftCounts
from bien.gateway.parsing.events import Event
from bien.gateway.protocols.acceptance import Speculation
from bien.gateway.protocols.ask import Ask, Choice, Usage
from bien.gateway.protocols.events import Events, encode, extension, ids_field, whole
from bien.gateway.protocols.fields import ONLY, Fields, common, decode, token_ids, token_ids_b64, top_count
from bien.gateway.protocols.refusal import Refusal
from bien.gateway.protocols.scores import Score, completion_logprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_TOP = 5  # OpenAI's


class CompletionFields(Fields, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    prompt_token_ids_b64: str | None = None
    trace_decode_token_ids: list[int] | None = None
    trace_decode_token_ids_b64: str | None = None
    logprobs: bool | int | None = None  # 0 to 5 alternatives per token; true means nothing here
    echo: bool | None = None  # the answer begins with the prompt; max_tokens may then be 0
    suffix: Any = None
    add_special_tokens: Any = None


_ONLY = {**ONLY, "suffix": ("",), "add_special_tokens": (True,)}


def read(body: bytes) -> Ask:
    """UserError naming the field that is wrong."""
    fields = decode(body, CompletionFields, _ONLY)
    prompt = _prompt(fields)
    forced = _forced(fields)
    echo = bool(fields.echo)
    shared = common(fields, least_tokens=0 if echo else 1)
    ask = Ask(prompt=prompt, forced=forced, logprobs=_logprobs(fields), echo=echo, **shared)
    if ask.max_tokens is None:
        ask.max_tokens = len(forced) if forced else DEFAULT_MAX_TOKENS
    return ask


class CompletionAnswer:
    """Writes text_completion objects."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        self.id = id
        self._head = {"id": id, "object": "text_completion", "created": created, "model": ask.model}
        self._events = Events(ask, self._head, b'"text":', b"", b'"text":""', completion_logprobs)

    def opening(self, index: int, usage: Usage) -> bytes:
        return b""

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
        raise AssertionError("completions are not parsed")

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
        written = [_choice(i, choice, prompt) for i, choice in enumerate(choices)]
        return whole(self._head, written, usage, extension(speculation) + self._events.metrics(drafts))


def _choice(index: int, choice: Choice, prompt: bytes) -> bytes:
    logprobs = None if choice.scores is None else msgspec.Raw(completion_logprobs(choice.scores))
    body = {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}
    return encode(body)[:-1] + ids_field(choice.token_ids) + prompt + b"}"


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
