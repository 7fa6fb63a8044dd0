"""`bien plugins list` and `bien plugins check`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bien.core.errors import PluginError
from bien.core.plugins import PluginManager
from bien.replay.say import as_is

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def register(app: typer.Typer) -> None:
    """Add the `plugins` group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="What is installed, and whether it can be used.")
    group.command("list")(list_plugins)
    group.command("check")(check_plugins)
    app.add_typer(group, name="plugins")


def list_plugins(json: Json = False) -> None:
    """List every provider that a deployment can select."""
    rows = _rows(PluginManager.load())
    if json:
        typer.echo(msgspec.json.encode(rows))
        return
    table = Table("kind", "name", "from", "summary", box=None)
    for row in rows:
        cells = (row["kind"], row["name"], f"{row['distribution']} {row['version']}", row["summary"])
        table.add_row(*map(as_is, cells))
    Console().print(table)


def check_plugins(json: Json = False) -> None:
    """Load every installed plugin; exit 1 when one cannot be used or two provide the same thing."""
    try:
        manager = PluginManager.load()
        faults = [p.text for p in manager.problems] + manager.duplicates()
    except PluginError as error:  # nothing can be loaded, as with two entry points of one name
        manager, faults = PluginManager(), [str(error)]
    if json:
        report = {"plugins": manager.loaded, "providers": len(manager.installed), "problems": faults}
        typer.echo(msgspec.json.encode({**report, "left_out": manager.left_out}))
    else:
        for text in faults:
            typer.echo(f"problem: {text}")
        typer.echo(
            f"{len(manager.loaded)} plugins with {len(manager.installed)} providers, {len(faults)} problems"
        )
    if faults:
        raise typer.Exit(1)


def _rows(manager: PluginManager) -> list[dict[str, Any]]:
    rows = [
        {
            "kind": i.provider.kind,
            "name": i.provider.name,
            "distribution": i.ref.distribution,
            "version": i.ref.version,
            "entry_point": i.ref.entry_point,
            "module": i.ref.module,
            "parameters": list(i.provider.config_type.__struct_fields__),
            "summary": i.provider.summary,
        }
        for i in manager.installed
    ]
    return sorted(rows, key=lambda row: (row["kind"], row["name"]))
