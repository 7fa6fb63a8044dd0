"""The fields that both completion endpoints share, and how strictly they are read.

A field that would change the result and is not served is refused with the values that are; a field that
cannot change it is accepted; a field that nobody knows is refused, with the nearest one that somebody does.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

from bien.core.errors import UserError, nearest
from bien.core.request import TokenIds
from bien.gateway.checks import LEAST_REPETITION, MAX_LOGPROBS

MAX_CHOICES = 128  # OpenAI's
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_BIASED = 1024
MAX_SESSION_LENGTH = 256
MAX_SALT_LENGTH = 1024
MAX_PRIORITY = 100  # classes are worth seconds of waiting: who could ask for more would never wait
MAX_INT = (1 << 31) - 1


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted: padding against traffic analysis is not added


class PredictedPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class PredictedOutput(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["content"]
    content: str | list[PredictedPart]


class Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`Any` fields are either in `ONLY` or have no effect on the result."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None  # token id, as JSON's keys are text: -100 to 100
    presence_penalty: float | None = None  # -2 to 2, for tokens of the output
    frequency_penalty: float | None = None  # -2 to 2, for each time in the output
    prediction: PredictedOutput | None = None  # the output expected: it is drafted, and never forced
    # extensions shared with other engines
    min_p: float | None = None  # 0 to 1
    repetition_penalty: float | None = None  # 0.01 to 2, for tokens of prompt and output
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None  # before these no EOS and no stop token is drawn
    priority: int | None = None  # -100 to 100, the smaller the more urgent
    cache_salt: str | None = None  # what is cached is found under the same salt of the same tenant only
    # extensions of bien
    session_id: str | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None  # 0 to 20 alternatives per token of the prompt; not in streams
    speculate: bool | None = None  # false: no drafts are verified for this request
    max_draft_tokens: int | None = None  # verified at a time; 0: none
    speculation_metrics: bool | None = None  # the answer has vLLM's metrics.speculative_decoding
    n: int | None = None  # 1 to 128 choices
    best_of: int | None = None  # n: the best of more is not looked for
    # served with these values only (see ONLY)
    length_penalty: Any = None
    response_format: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    # without effect on the result
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    cache_prompt: Any = None  # llama.cpp's; the cache never changes a text


ONLY: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}

F = TypeVar("F", bound=msgspec.Struct)
_PATH = re.compile(r" - at `\$\.?(.*?)`$")
_UNKNOWN = re.compile(r"unknown field `(.*)`")
_MISSING = re.compile(r"missing required field `(.*)`")


def decode(body: bytes, kind: type[F], only: dict[str, tuple[Any, ...]]) -> F:
    """The body as `kind`, fields in `only` checked. UserError naming the field."""
    try:
        fields = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"the body is not valid JSON: {error}") from error
    for name, valid in only.items():
        value = getattr(fields, name)
        if value is not None and not any(_same(value, v) for v in valid):
            raise UserError(
                f"{name}={_show(value)} is not served; valid: {', '.join(_show(v) for v in (*valid, None))}",
                field=name,
            )
    return fields


def common(fields: Fields, least_tokens: int = 1) -> dict[str, Any]:
    """Checked keyword arguments of `Ask` out of the shared fields. `least_tokens`: of `max_tokens`."""
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise UserError("stream_options needs stream=true; valid: leave it out", field="stream_options")
    max_tokens = _max_tokens(fields, least_tokens)
    out: dict[str, Any] = {
        "model": fields.model,
        "max_tokens": max_tokens,
        "temperature": between("temperature", fields.temperature, 0, 2, 1.0),
        "top_p": between("top_p", fields.top_p, 0, 1, 1.0, above=True),
        "top_k": max(0, at_least("top_k", fields.top_k, -1, 0)),
        "min_p": between("min_p", fields.min_p, 0, 1, 0.0),
        "presence_penalty": between("presence_penalty", fields.presence_penalty, -2, 2, 0.0),
        "frequency_penalty": between("frequency_penalty", fields.frequency_penalty, -2, 2, 0.0),
        "repetition_penalty": between(
            "repetition_penalty", fields.repetition_penalty, LEAST_REPETITION, 2, 1.0
        ),
        "logit_bias": _bias(fields.logit_bias or {}),
        "seed": None if fields.seed is None else fields.seed & ((1 << 63) - 1),
        "stops": stop_strings("stop", fields.stop),
        "stop_token_ids": _ids("stop_token_ids", fields.stop_token_ids),
        "ignore_eos": bool(fields.ignore_eos),
        "min_tokens": at_least("min_tokens", fields.min_tokens, 0, 0),
        "stream": bool(fields.stream),
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.continuous_usage_stats),
        "return_token_ids": bool(fields.return_token_ids),
        "session": fields.session_id or "",
        "priority": _priority(fields.priority),
        "salt": _salt(fields.cache_salt),
        "n": _choices(fields),
        "prompt_logprobs": _prompt_logprobs(fields),
        "speculate": fields.speculate is not False,
        "max_drafts": _max_drafts(fields.max_draft_tokens),
        "prediction": _prediction(fields.prediction),
        "speculation_metrics": bool(fields.speculation_metrics),
    }
    if max_tokens is not None and out["min_tokens"] > max_tokens:
        raise UserError(
            f"min_tokens={fields.min_tokens} exceeds max_tokens={max_tokens}; valid: 0..{max_tokens}",
            field="min_tokens",
        )
    if len(out["session"]) > MAX_SESSION_LENGTH:
        raise UserError(
            f"session_id has {len(out['session'])} characters; valid: at most {MAX_SESSION_LENGTH}",
            field="session_id",
        )
    return out


def top_count(name: str, value: int, most: int) -> int:
    """How many alternatives per token; UserError outside 0..most."""
    if not 0 <= value <= most:
        raise UserError(f"{name}={value}; valid: 0 to {most}", field=name)
    return value


def token_ids(name: str, ids: Iterable[int]) -> TokenIds:
    """Packed ids; UserError unless each fits into 32 bits. The vocabulary is checked with the prompt."""
    try:
        return TokenIds.of(ids)
    except (OverflowError, TypeError) as error:
        bad = next((i for i in ids if not 0 <= i < 1 << 32), None)
        raise UserError(f"{name} holds {bad}; valid: token ids, 0 or more", field=name) from error


def token_ids_b64(name: str, text: str) -> TokenIds:
    """Ids from base64 of uint32 little-endian."""
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(
            f"{name} is not base64: {error}; valid: base64 of uint32-LE ids", field=name
        ) from error
    if len(packed) % 4:
        raise UserError(
            f"{name} decodes to {len(packed)} bytes; valid: a multiple of 4 (uint32-LE ids)", field=name
        )
    return TokenIds(packed)


def _refusal(message: str, kind: type[msgspec.Struct]) -> UserError:
    path = _PATH.search(message)
    where = path[1] if path else ""
    text = message[: path.start()] if path else message
    if unknown := _UNKNOWN.search(text):
        known = _known(kind, where)
        name = f"{where}.{unknown[1]}" if where else unknown[1]
        return UserError(f"unknown field {name!r}; {nearest(unknown[1], known)}", field=name)
    if missing := _MISSING.search(text):
        name = f"{where}.{missing[1]}" if where else missing[1]
        return UserError(f"field {name!r} is required and missing", field=name)
    return UserError(f"{where or 'the body'}: {text}", field=where or None)


def _known(kind: type[msgspec.Struct], where: str) -> Iterable[str]:
    """Field names of the struct that `where` ("messages[...]", "stream_options") leads to."""
    name = where.split("[")[0].split(".")[0]
    if not name:
        return kind.__struct_fields__
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    found = next(f.type for f in info.fields if f.name == name)
    structs = [t for t in _walk(found) if isinstance(t, msgspec.inspect.StructType)]
    return [f.encode_name for s in structs for f in s.fields]


def _walk(kind: msgspec.inspect.Type) -> Iterable[msgspec.inspect.Type]:
    yield kind
    if isinstance(kind, msgspec.inspect.UnionType):
        for t in kind.types:
            yield from _walk(t)
    elif isinstance(kind, msgspec.inspect.ListType):
        yield from _walk(kind.item_type)


def _same(value: Any, valid: Any) -> bool:
    return bool(value == valid) and isinstance(value, bool) == isinstance(valid, bool)


def _show(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _choices(fields: Fields) -> int:
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MAX_CHOICES:
        raise UserError(f"n={n}; valid: 1 to {MAX_CHOICES}", field="n")
    if fields.best_of is not None and fields.best_of != n:
        raise UserError(
            f"best_of={fields.best_of} is not served; valid: {n} (what n is), null", field="best_of"
        )
    return n


def _prompt_logprobs(fields: Fields) -> int | None:
    if fields.prompt_logprobs is None:
        return None
    if fields.stream:
        raise UserError(
            "prompt_logprobs needs stream=false; valid: null in a stream", field="prompt_logprobs"
        )
    return top_count("prompt_logprobs", fields.prompt_logprobs, MAX_LOGPROBS)


def _max_tokens(fields: Fields, least: int) -> int | None:
    given = {
        name: value
        for name in ("max_tokens", "max_completion_tokens")
        if (value := getattr(fields, name)) is not None
    }
    for name, value in given.items():
        at_least(name, value, least, least)
    if len(set(given.values())) > 1:
        raise UserError(
            f"max_tokens={fields.max_tokens} and max_completion_tokens={fields.max_completion_tokens} "
            "contradict each other; valid: one of them",
            field="max_completion_tokens",
        )
    return next(iter(given.values()), None)


def at_least(name: str, value: int | None, low: int, default: int) -> int:
    """`value`, or `default` for None. UserError below `low`, or beyond 32 bits."""
    if value is None:
        return default
    if not low <= value <= MAX_INT:
        raise UserError(f"{name}={value}; valid: {low} to {MAX_INT}", field=name)
    return value


def _max_drafts(value: int | None) -> int | None:
    return None if value is None else at_least("max_draft_tokens", value, 0, 0)


def _prediction(value: PredictedOutput | None) -> str:
    if value is None:
        return ""
    content = value.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _priority(value: int | None) -> int:
    if value is None:
        return 0
    if not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise UserError(
            f"priority={value}; valid: -{MAX_PRIORITY} to {MAX_PRIORITY}, the smaller the more urgent",
            field="priority",
        )
    return value


def _salt(value: str | None) -> str:
    if value is None:
        return ""
    if not 1 <= len(value) <= MAX_SALT_LENGTH:
        raise UserError(
            f"cache_salt has {len(value)} characters; valid: 1 to {MAX_SALT_LENGTH}, or null",
            field="cache_salt",
        )
    return value


def between(
    name: str, value: float | None, low: float, high: float, default: float, *, above: bool = False
) -> float:
    """`value`, or `default` for None. UserError outside `low` to `high`; with `above`, at `low` too."""
    if value is None:
        return default
    if not low <= value <= high or (above and value == low):
        raise UserError(
            f"{name}={value:g}; valid: {'above' if above else 'from'} {low} to {high}", field=name
        )
    return value


def stop_strings(name: str, stop: str | list[str] | None) -> tuple[str, ...]:
    """UserError naming `name` for too many, or for one that is empty or too long."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise UserError(f"{name} holds {len(stops)} strings; valid: at most {MAX_STOPS}", field=name)
    for s in stops:
        if not 1 <= len(s) <= MAX_STOP_LENGTH:
            raise UserError(
                f"{name} holds a string of {len(s)} characters; valid: 1 to {MAX_STOP_LENGTH}", field=name
            )
    return stops


def _bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_BIASED:
        raise UserError(f"logit_bias holds {len(bias)} ids; valid: at most {MAX_BIASED}", field="logit_bias")
    out: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) >= 1 << 32:
            raise UserError(
                f"logit_bias holds the key {_show(key)}; valid: token ids, 0 or more", field="logit_bias"
            )
        out[int(key)] = between(f"logit_bias.{key}", value, -100, 100, 0.0)
    return tuple(sorted(out.items()))


def _ids(name: str, ids: list[int] | None) -> tuple[int, ...]:
    if ids and len(ids) > MAX_STOP_TOKEN_IDS:
        raise UserError(f"{name} holds {len(ids)} ids; valid: at most {MAX_STOP_TOKEN_IDS}", field=name)
    for i in ids or ():
        if not 0 <= i < 1 << 32:
            raise UserError(f"{name} holds {i}; valid: token ids, 0 or more", field=name)
    return tuple(ids or ())
