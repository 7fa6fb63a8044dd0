"""`bien serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from bien.replay.commands.replay import DEFAULT_DEPLOYMENT


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("serve")(serve)


def serve(
    deployment: Annotated[
        str, typer.Argument(help="A deployment.toml, or the name of a built-in deployment.")
    ] = DEFAULT_DEPLOYMENT,
    host: Annotated[str | None, typer.Option(help="Instead of the deployment's.")] = None,
    port: Annotated[int | None, typer.Option(help="Instead of the deployment's; 0: any free one.")] = None,
    redis: Annotated[
        str | None,
        typer.Option(help="KV index in this Redis: a URL, or `embedded` for a private server."),
    ] = None,
    attach: Annotated[
        bool,
        typer.Option("--attach", help="Start no workers: serve with those of `bien worker`, found in Redis."),
    ] = False,
) -> None:
    """Serve a deployment behind an OpenAI-compatible API until interrupted."""
    import msgspec

    from bien.replay.commands.deployment import composed
    from bien.replay.redis_option import with_redis
    from bien.replay.serving import run_server

    chosen = with_redis(composed(deployment).deployment, redis)
    gateway = chosen.gateway
    if host is not None:
        gateway = msgspec.structs.replace(gateway, host=host)
    if port is not None:
        gateway = msgspec.structs.replace(gateway, port=port)
    raise typer.Exit(run_server(msgspec.structs.replace(chosen, gateway=gateway), attach))
