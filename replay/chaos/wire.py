"""`encode`: KV events as bytes, in each of the forms that engines have had, and in one that none has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

import msgspec

from bien.gateway.testing.event_forms import FORMS, encode_events
from bien.gateway.testing.event_forms import Form as KnownForm

Form = Union[KnownForm, Literal["strange"]]
__all__ = ["FORMS", "Form", "encode"]


def encode(events: Sequence[Mapping[str, Any]], form: Form, ts: float = 0.0) -> bytes:
    if form != "strange":
        return encode_events(events, form, ts)
    # A form of the future.
    batches = [{"kind": event["type"], "body": dict(event)} for event in events]
    return msgspec.msgpack.encode({"version": 3, "ts": ts, "batches": batches})
