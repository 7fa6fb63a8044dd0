"""`bien deployment check FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bien.core.compose import Composition, Part, compose
from bien.core.cores import available_cores, share_threads
from bien.core.deployment import PoolSpec, load_deployment
from bien.core.errors import DeploymentError, ModelError, PluginError
from bien.core.plugins import PluginManager
from bien.core.sizes import megabytes
from bien.core.worker.memory import check_memory
from bien.core.worker.resources import memory_warnings
from bien.replay.redis_option import without_credentials

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
    """Read the file, find its plugins, decode their parameters, and check that this machine has the memory
    and the cores for it; start nothing, fetch nothing."""
    composition = composed(file)
    for line in [*describe(composition), *resources(composition)]:
        typer.echo(line)


def resources(composition: Composition) -> list[str]:
    """What the deployment takes of this machine. ResourceError with the same numbers where that is too
    much. A model that is not here cannot be counted, which is said."""
    if not composition.pools:
        return ["this machine carries the gateway only"]
    cores = available_cores()
    threads, warnings = share_threads(composition.deployment.pool, composition.deployment.host, cores)
    pools = zip(composition.pools, threads, strict=True)
    shares = "; ".join(f"pool {pool.spec.name!r}: {pool.spec.engines} x {n}" for pool, n in pools)
    lines = [f"threads: {shares}; this process may use {cores} cores"]
    try:
        plan = check_memory(composition, composition.model)
    except ModelError as error:
        lines.append(f"memory is not checked: {error}")
    else:
        lines += plan.lines()
        warnings += memory_warnings(plan)
    return lines + [f"warning: {text}" for text in warnings]


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
        engines = f", {spec.dp_ranks} engines" if spec.dp_ranks > 1 else ""
        lines.append(
            f"pool {spec.name}: {spec.count} x {spec.role} on {spec.devices} {spec.device}{engines}, "
            f"{spec.slots} slots, {_kv(spec)}"
        )
        lines += [_part(kind, part) for kind, part in pool.parts.items()]
    for name, part in composition.remote:
        lines += [f"pool {name}: others' servers", _part("engine", part)]
    return lines


def _kv(spec: PoolSpec) -> str:
    if spec.kv_memory is not None:
        return f"KV of {megabytes(spec.kv_memory)}"
    if spec.kv_tokens is None:
        return "KV as it fits"
    return f"KV for {spec.kv_tokens} tokens"


def _part(kind: str, part: Part) -> str:
    values = {name: without_credentials(getattr(part.config, name)) for name in part.config.__struct_fields__}
    values = {name: value for name, value in values.items() if value is not msgspec.UNSET}
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"  {kind}: {part.provider.name}{f' ({shown})' if shown else ''}"
