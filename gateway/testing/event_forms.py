"""KV events as bytes, in each of the forms that engines have had, and what vLLM's own encoders made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from bien.gateway.remote.wire import FIELDS

Form = Literal["arrays", "maps", "whole maps"]
FORMS: tuple[Form, ...] = ("arrays", "maps", "whole maps")


@cache
def recorded(form: Form) -> tuple[bytes, ...]:
    """One small history in blocks of 4 tokens, as vLLM's publisher framed it, a message per entry: three
    blocks of the tokens 100 to 111; a fourth, and behind the second a branch of 500 to 507; 100 to 107 with a
    salt; 900 to 903 with an adapter; the fourth and the branch's second are gone; 300 to 303, all is cleared,
    100 to 103."""
    found = json.loads(Path(__file__).with_name("recorded_events.json").read_text())
    return tuple(bytes.fromhex(message) for message in found[form]["messages"])


def encode_events(
    events: Sequence[Mapping[str, Any]], form: Form, ts: float = 0.0, rank: int | None = None
) -> bytes:
    """Events as maps with a "type" and the fields' names of gateway/remote/wire.py."""
    if form == "arrays":
        batch: Any = [ts, [_array(event) for event in events], rank]
    elif form == "maps":
        batch = [ts, list(events), rank]
    else:
        batch = {"ts": ts, "events": list(events), "data_parallel_rank": rank}
    return msgspec.msgpack.encode(batch)


def _array(event: Mapping[str, Any]) -> list[Any]:
    values = [event.get(name) for name in FIELDS[event["type"]]]
    while values and values[-1] is None:  # what is not given is left out at the end
        values.pop()
    return [event["type"], *values]
