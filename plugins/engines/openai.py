"""Any OpenAI-compatible server as a worker. Nothing is known of its cache: the index goes by what was sent
there, for a time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated

import msgspec

from bien.core.api import Context, Provider, UserError, hookimpl
from bien.gateway.api import Dialect, RemoteEngine, endpoints

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]


class OpenAIConfig(msgspec.Struct, forbid_unknown_fields=True):
    urls: tuple[str, ...]  # of servers that do the same, each a worker; without a path
    model: str | None = None  # its name there; None: the only one there is
    max_context: Tokens | None = None  # None: as the server says in /v1/models
    cache_tokens: Tokens | None = None  # that a server can keep cached; None: any number
    cache_seconds: Seconds = 300.0  # for which a prompt counts as cached after its last use
    token_ids: bool = False  # whether it takes `return_token_ids`; else its text is passed on
    extensions: bool = False  # whether it takes top_k, min_p, ... by vLLM's names
    poll_seconds: Seconds = 2.0  # between looks at its health
    look_seconds: Seconds = 5.0  # for a small answer: models, health, metrics
    silence_seconds: Seconds = 600.0  # without a word of an answer, until it counts as lost
    health: str = "/v1/models"  # what is looked at
    api_key: str = ""  # name of an environment variable that holds it


class OpenAIDialect(Dialect):
    def __init__(self, config: OpenAIConfig) -> None:
        self.health = config.health
        self.token_ids = config.token_ids
        self.extensions = config.extensions


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "engine",
            "openai",
            _build,
            OpenAIConfig,
            summary="any OpenAI-compatible server; the index goes by what was sent there",
        )
    ]


def _build(config: OpenAIConfig, ctx: Context) -> RemoteEngine:
    if config.api_key and config.api_key not in os.environ:
        raise UserError(f"api_key names the environment variable {config.api_key!r}, which is not set")
    places = endpoints(
        ctx,
        config.urls,
        served=config.model,
        max_context=config.max_context,
        capacity_tokens=config.cache_tokens or 0,
        history_seconds=config.cache_seconds,
        poll_seconds=config.poll_seconds,
        look_seconds=config.look_seconds,
        silence_seconds=config.silence_seconds,
        api_key=os.environ.get(config.api_key, "") if config.api_key else "",
    )
    return RemoteEngine(places, OpenAIDialect(config), ctx)
