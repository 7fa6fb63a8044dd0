"""KV events as vLLM and SGLang publish them, decoded: three forms of one message, msgpack each.

- arrays: `[ts, [["BlockStored", hashes, parent, ...], ...], rank]`, fields by position, late ones left out;
- maps in an array: `[ts, [{"type": "BlockStored", ...}, ...], rank]`;
- maps: `{"ts": ..., "events": [{"type": ...}, ...], "data_parallel_rank": ...}`.

The form has changed twice without a version number, and consumers that took it for another one indexed
nothing, silently. So a message is either understood in full or counted, and whatever it holds raises nothing
else: who asks again for what cannot be decoded would get it again.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

import msgspec

EngineHash = Union[int, bytes]  # whatever the engine calls a block: never computed here, only compared

# Fields by position, behind the tag. What a version does not know yet is absent at the end.
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_CLEARED = ("medium",)
# Of events that are arrays, by position behind the tag.
FIELDS = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": _CLEARED}
_shortener = reprlib.Repr()
_shortener.maxlevel, _shortener.maxstring, _shortener.maxother = 3, 60, 60
_RANKS = ("data_parallel_rank", "attn_dp_rank")


class UndecodableError(Exception):
    """A message that is none of the known forms."""


class Stored(NamedTuple):
    """Blocks, in the order of a chain, are in `medium` now."""

    hashes: list[EngineHash]
    parent: EngineHash | None
    tokens: list[int]  # of all blocks; empty where only names are told (some offloading tiers)
    adapter: bool  # a LoRA's
    salt: str | None  # where it is told apart from the other extra keys
    # Per block: what entered its hash beside tokens (salt, images), None: nothing. Lists so far; of other
    # forms only this is known, that such a block is not one of tokens alone.
    extra: list[Any] | None
    medium: str | None
    group: int
    kind: str | None  # of the group, where told
    window: int | None


class Removed(NamedTuple):
    hashes: list[EngineHash]
    medium: str | None
    group: int | None


class Cleared(NamedTuple):
    medium: str | None  # None: everywhere


Event = Union[Stored, Removed, Cleared]


class Message(NamedTuple):
    events: list[Event]
    rank: int | None  # the data-parallel rank, where told
    unknown: list[str]  # types of events that are none of ours, and forms of extra keys


def decode(payload: bytes) -> Message:
    """One message. UndecodableError: why it is none."""
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UndecodableError(f"no msgpack: {error}") from None
    except Exception as error:  # it nests too deeply, or is of a kind that nobody foresaw
        raise UndecodableError(f"no message: {short(error)}") from None
    try:
        return _message(raw)
    except UndecodableError:
        raise
    except Exception as error:
        raise UndecodableError(f"no known form: {short(error)}") from None


def short(value: object) -> str:
    """What a foreign value looks like, however large it is and however deep."""
    return f"{_shortener.repr(value):.60}"


def _message(raw: Any) -> Message:
    if isinstance(raw, Mapping):
        events, rank = raw.get("events"), next((raw[name] for name in _RANKS if name in raw), None)
    elif isinstance(raw, Sequence) and not isinstance(raw, (str, bytes)) and len(raw) >= 2:
        events, rank = raw[1], raw[2] if len(raw) > 2 else None
    else:
        raise UndecodableError(f"a {type(raw).__name__}, neither an array nor a map")
    if not isinstance(events, list):
        raise UndecodableError(f"its events are {type(events).__name__}, no array")
    if rank is not None and not isinstance(rank, int):
        raise UndecodableError(f"its rank is {rank!r}")
    found: list[Event] = []
    unknown: list[str] = []
    for event in events:
        tag, fields = _named(event)
        if tag in FIELDS:
            event = _event(tag, fields)
            found.append(event)
            if isinstance(event, Stored) and (strange := _strange(event.extra)):
                unknown.append(f"{tag} with extra_keys {strange}")
        else:
            unknown.append(f"{tag:.60}")
    return Message(found, rank, unknown)


def _named(event: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, Mapping):
        tag, fields = event.get("type"), event
    elif isinstance(event, list) and event:
        tag = event[0]
        fields = dict(zip(FIELDS.get(tag, ()) if isinstance(tag, str) else (), event[1:], strict=False))
    else:
        raise UndecodableError(f"an event is {short(event)}")
    if not isinstance(tag, str):
        raise UndecodableError(f"an event has no type: {short(event)}")
    return tag, fields


def _event(tag: str, fields: Mapping[str, Any]) -> Event:
    get = fields.get
    medium = _optional(tag, "medium", get("medium"), str)
    if tag == "AllBlocksCleared":
        return Cleared(medium)
    hashes = get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(h, (int, bytes)) for h in hashes):
        raise UndecodableError(f"{tag}: block_hashes are {short(hashes)}")
    group = _optional(tag, "group_idx", get("group_idx"), int)
    if tag == "BlockRemoved":
        return Removed(hashes, medium, group)
    parent, tokens, extra = get("parent_block_hash"), get("token_ids"), get("extra_keys")
    if parent is not None and not isinstance(parent, (int, bytes)):
        raise UndecodableError(f"{tag}: parent_block_hash is {short(parent)}")
    if not isinstance(tokens, list) or not all(isinstance(t, int) and 0 <= t < 1 << 32 for t in tokens):
        raise UndecodableError(f"{tag}: token_ids are {short(tokens)}")
    if extra is not None and not (isinstance(extra, list) and len(extra) == len(hashes)):
        raise UndecodableError(f"{tag}: extra_keys are {short(extra)} for {len(hashes)} blocks")
    if hashes and len(tokens) % len(hashes):
        raise UndecodableError(f"{tag}: {len(tokens)} token_ids for {len(hashes)} blocks")
    about = get("metadata")
    salt = get("cache_salt", about.get("cache_salt") if isinstance(about, Mapping) else None)
    return Stored(
        hashes,
        parent,
        tokens,
        get("lora_id") is not None or bool(get("lora_name")),
        _optional(tag, "cache_salt", salt, str),
        extra,
        medium,
        group or 0,
        _optional(tag, "kv_cache_spec_kind", get("kv_cache_spec_kind"), str),
        _optional(tag, "kv_cache_spec_sliding_window", get("kv_cache_spec_sliding_window"), int),
    )


def _strange(extra: list[Any] | None) -> str:
    """The first that is no list, "" when there is none."""
    return next((short(e) for e in extra or () if e is not None and not isinstance(e, (list, tuple))), "")


def _optional(tag: str, name: str, value: Any, kind: type) -> Any:
    if value is not None and not isinstance(value, kind):
        raise UndecodableError(f"{tag}: {name} is {short(value)}")
    return value
