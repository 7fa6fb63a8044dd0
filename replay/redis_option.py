"""`--redis URL|embedded`, and the private server that `embedded` asks for."""

from __future__ import annotations

import dataclasses
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from bien.core.compose import Composition
from bien.core.deployment import Deployment, Selection
from bien.core.errors import DeploymentError, UserError
from bien.core.worker.redis_url import check_redis_url, masked
from bien.replay.redis_server import RedisServer

INDEX = "redis"  # the plugin that the option selects
EMBEDDED = "embedded"  # in place of a URL


def with_redis(deployment: Deployment, url: str | None) -> Deployment:
    """The deployment with the index `redis` at this URL; its other parameters stay where it has them
    already. None: the deployment as it is. UserError for a URL of no Redis."""
    if url is None:
        return deployment
    if url != EMBEDDED:
        try:
            check_redis_url(url)
        except UserError as error:
            raise UserError(f"--redis: {error}, or {EMBEDDED}") from None
    gateway = deployment.gateway
    kept = gateway.kv_index.parameters if gateway.kv_index.use == INDEX else {}
    chosen = Selection(INDEX, {**kept, "url": url})
    return msgspec.structs.replace(deployment, gateway=msgspec.structs.replace(gateway, kv_index=chosen))


def refuse_embedded(composition: Composition) -> None:
    """For workers and gateways that are started apart: DeploymentError where the index asks for a private
    server, in which they would not meet."""
    if _wants_server(composition):
        raise DeploymentError(
            f"an {EMBEDDED} Redis belongs to one stack: workers and gateways that are started apart "
            "would not find each other in it; give a URL",
            field="gateway.kv_index.url",
        )


async def with_server(composition: Composition, opened: AsyncExitStack) -> Composition:
    """With the URL of a private server where the index asks for one; `opened` stops it."""
    if not _wants_server(composition):
        return composition
    part = composition.gateway["kv_index"]
    server = await RedisServer.start()
    opened.push_async_callback(server.stop)
    config = msgspec.structs.replace(part.config, url=server.url)
    gateway = {**composition.gateway, "kv_index": dataclasses.replace(part, config=config)}
    return dataclasses.replace(composition, gateway=gateway)


def _wants_server(composition: Composition) -> bool:
    part = composition.gateway["kv_index"]
    return part.provider.name == INDEX and getattr(part.config, "url", "") == EMBEDDED


def without_credentials(value: Any) -> Any:
    """Nested tables whose texts hold no credentials of URLs."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {key: without_credentials(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_credentials(item) for item in value]
    return value
