"""/tokenize and /detokenize, in vLLM's form: a prompt's ids, of a text or of a conversation, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from bien.core.errors import UserError
from bien.core.request import TokenIds
from bien.gateway.protocols import chat
from bien.gateway.protocols.ask import Ask
from bien.gateway.protocols.fields import decode, token_ids


class TokenizeFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of a conversation `messages` and what a chat's prompt depends on; of a text `prompt`."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    return_token_strs: bool | None = None
    # served with these values only
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class DetokenizeFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


@dataclass(slots=True)
class Tokenize:
    ask: Ask
    spelled: bool  # the answer has the tokens as text, too


_ONLY: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}


def read_tokenize(body: bytes, model: str) -> Tokenize:
    """`model`: where the body names none. UserError naming the field that is wrong."""
    fields = decode(body, TokenizeFields, _ONLY)
    if (fields.prompt is None) == (fields.messages is None):
        which = "neither" if fields.prompt is None else "both"
        raise UserError(f"{which} of prompt and messages given; valid: exactly one", field="prompt")
    spelled = bool(fields.return_token_strs)
    if fields.prompt is None:
        _only_special(fields.add_special_tokens, False)
        shared = ("messages", "tools", "chat_template_kwargs")
        given = {name: value for name in shared if (value := getattr(fields, name)) is not None}
        return Tokenize(chat.read(msgspec.json.encode({"model": fields.model or model, **given})), spelled)
    _only_special(fields.add_special_tokens, True)
    for name in ("tools", "chat_template_kwargs"):
        if getattr(fields, name) is not None:
            raise UserError(f"{name} needs messages; valid: null with a prompt", field=name)
    return Tokenize(Ask(fields.model or model, fields.prompt, None), spelled)


def read_detokenize(body: bytes, model: str) -> Ask:
    """As `read_tokenize`."""
    fields = decode(body, DetokenizeFields, {})
    return Ask(fields.model or model, token_ids("tokens", fields.tokens), None)


def tokenized(
    asked: Tokenize, ids: TokenIds, max_context: int, piece: Callable[[int], tuple[str, bytes]]
) -> bytes:
    """The body of the answer. `piece`: a token as text and as bytes."""
    found = ids.ids().tolist()
    out = {"count": len(found), "max_model_len": max_context, "tokens": found}
    out["token_strs"] = [piece(id)[0] for id in found] if asked.spelled else None
    return msgspec.json.encode(out)


def _only_special(value: bool | None, valid: bool) -> None:
    if value is not None and value is not valid:
        raise UserError(
            f"add_special_tokens={msgspec.json.encode(value).decode()} is not served; valid: "
            f"{'true' if valid else 'false'}, null, as for what is generated",
            field="add_special_tokens",
        )
