"""What engines with KV events have in common: their parameters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import msgspec

from bien.core.api import Context, UserError
from bien.gateway.api import Dialect, RemoteEngine, endpoints

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class EventsConfig(msgspec.Struct, forbid_unknown_fields=True):
    urls: tuple[str, ...]  # of servers that do the same, each a worker; without a path
    events: tuple[str, ...] | str = ()  # addresses of their publishers, one per URL; none: as engine "openai"
    replay: tuple[str, ...] | str = ()  # where each is asked for earlier events
    topic: str = ""  # with which what is published begins
    dp_ranks: Ranks = 1  # of each server; each is a worker of its own, its ports follow those given
    groups: tuple[str, ...] = ("full",)  # KV groups of the model, in the engine's order; or "window:TOKENS"
    salt: bool = True  # keep tenants apart inside the engine
    model: str | None = None  # its name there; None: the only one there is
    max_context: Tokens | None = None  # None: as the server says in /v1/models
    cache_seconds: Seconds = 300.0  # without events: for which a prompt counts as cached
    grace_seconds: Seconds = 10.0  # until missing or undecodable events are an alarm
    poll_seconds: Seconds = 1.0  # between looks at health and load
    look_seconds: Seconds = 5.0  # for a small answer: models, health, metrics
    silence_seconds: Seconds = 600.0  # without a word of an answer, until it counts as lost
    api_key: str = ""  # name of an environment variable that holds it


def engine(config: EventsConfig, dialect: Dialect, ctx: Context) -> RemoteEngine:
    """UserError: parameters do not fit together. ResourceError: a library is missing."""
    if config.api_key and config.api_key not in os.environ:
        raise UserError(f"api_key names the environment variable {config.api_key!r}, which is not set")
    places = endpoints(
        ctx,
        config.urls,
        events=_several(config.events),
        replay=_several(config.replay),
        ranks=config.dp_ranks,
        served=config.model,
        topic=config.topic,
        groups=config.groups,
        salt=config.salt,
        max_context=config.max_context,
        history_seconds=config.cache_seconds,
        grace_seconds=config.grace_seconds,
        poll_seconds=config.poll_seconds,
        look_seconds=config.look_seconds,
        silence_seconds=config.silence_seconds,
        api_key=os.environ.get(config.api_key, "") if config.api_key else "",
    )
    return RemoteEngine(places, dialect, ctx)


def _several(addresses: tuple[str, ...] | str) -> Sequence[str]:
    return (addresses,) if isinstance(addresses, str) else addresses
