"""`encode`: KV events as bytes, in each of the forms that engines have had, and in one that none has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from bien.gateway.remote.wire import FIELDS

Form = Literal["arrays", "maps", "whole maps", "strange"]
FORMS: tuple[Form, ...] = ("arrays", "maps", "whole maps")  # that consumers should understand


def encode(events: Sequence[Mapping[str, Any]], form: Form, ts: float = 0.0) -> bytes:
    if form == "arrays":
        batch: Any = [ts, [_array(event) for event in events], None]
    elif form == "maps":
        batch = [ts, list(events), None]
    elif form == "whole maps":
        batch = {"ts": ts, "events": list(events), "data_parallel_rank": None}
    else:  # a form of the future
        batch = {"version": 3, "ts": ts, "batches": [{"kind": e["type"], "body": dict(e)} for e in events]}
    return msgspec.msgpack.encode(batch)


def _array(event: Mapping[str, Any]) -> list[Any]:
    values = [event.get(name) for name in FIELDS[event["type"]]]
    while values and values[-1] is None:  # what is not given is left out at the end
        values.pop()
    return [event["type"], *values]
