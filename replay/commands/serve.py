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
) -> None:
    """Serve a deployment behind an OpenAI-compatible API until interrupted."""
    import msgspec

    from bien.replay.commands.deployment import composed
    from bien.replay.serving import run_server

    chosen = composed(deployment).deployment
    gateway = chosen.gateway
    if host is not None:
        gateway = msgspec.structs.replace(gateway, host=host)
    if port is not None:
        gateway = msgspec.structs.replace(gateway, port=port)
    raise typer.Exit(run_server(msgspec.structs.replace(chosen, gateway=gateway)))
