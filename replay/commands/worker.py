"""`bien worker`."""

from __future__ import annotations

from typing import Annotated

import typer

from bien.replay.commands.replay import DEFAULT_DEPLOYMENT


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("worker")(worker)


def worker(
    deployment: Annotated[
        str, typer.Argument(help="A deployment.toml, or the name of a built-in deployment.")
    ] = DEFAULT_DEPLOYMENT,
    redis: Annotated[str | None, typer.Option(help="URL of the Redis where gateways look for them.")] = None,
    host: Annotated[
        str, typer.Option(help="Address of this machine where they listen, and gateways reach them.")
    ] = "127.0.0.1",
) -> None:
    """Run a deployment's workers without a gateway: `bien serve --attach` with the same deployment, anywhere,
    finds them in Redis. Gateways may come, go and die; caches stay, and so does what is known of them."""
    from bien.replay.commands.deployment import composed
    from bien.replay.redis_option import with_redis
    from bien.replay.worker_server import run_workers

    raise typer.Exit(run_workers(with_redis(composed(deployment).deployment, redis), host))
