"""`bien deployment check FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bien.core.compose import Composition, Part, compose
from bien.core.deployment import load_deployment
from bien.core.errors import DeploymentError, PluginError
from bien.core.plugins import PluginManager

EXAMPLES = Path(__file__).parent.parent / "examples"
"""Folder of the built-in deployments."""

File = Annotated[str, typer.Argument(help="A deployment.toml, or the name of a built-in deployment.")]


def register(app: typer.Typer) -> None:
    """Add the `deployment` group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Deployment files.")
    group.callback()(lambda: None)  # keeps `check` a subcommand while it is the only one
    group.command("check")(check_deployment)
    app.add_typer(group, name="deployment")


def check_deployment(file: File) -> None:
    """Read the file, find its plugins, decode their parameters; start nothing."""
    for line in describe(composed(file)):
        typer.echo(line)


def composed(file: str) -> Composition:
    """Read the file or built-in deployment and find its plugins; start nothing. Errors of both name it."""
    deployment = load_deployment(file, [EXAMPLES])
    try:
        return compose(deployment, PluginManager.load())
    except (DeploymentError, PluginError) as error:
        if error.field is None:  # the installed plugins are at fault, whatever the file says
            raise
        raise type(error)(f"{file}: {error}", field=error.field) from None


def describe(composition: Composition) -> list[str]:
    """What a composition is made of, one line per part."""
    model = composition.model
    lines = [f"model {model.name}, {model.dtype}, blocks of {model.block_tokens} tokens", "gateway"]
    lines += [_part(kind, part) for kind, part in composition.gateway.items()]
    for pool in composition.pools:
        spec = pool.spec
        lines.append(
            f"pool {spec.name}: {spec.count} x {spec.role} on {spec.devices} {spec.device}, "
            f"{spec.slots} slots, KV for {spec.kv_tokens} tokens"
        )
        lines += [_part(kind, part) for kind, part in pool.parts.items()]
    return lines


def _part(kind: str, part: Part) -> str:
    values = {name: getattr(part.config, name) for name in part.config.__struct_fields__}
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"  {kind}: {part.provider.name}{f' ({shown})' if shown else ''}"
