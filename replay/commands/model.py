"""`bien model inspect`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bien.core.architectures.fields import ITEM_BYTES
from bien.core.architectures.inspect import describe
from bien.core.architectures.registry import read_architecture

BLOCK_TOKENS = 64

Model = Annotated[str, typer.Argument(help="A known name (see `bien model list`), or a model folder.")]
Dtype = Annotated[str, typer.Option(help=f"Of weights and cache: {', '.join(ITEM_BYTES)}.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def register(app: typer.Typer) -> None:
    """Add the `model` group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="What models weigh, cache and compute.")
    group.command("list")(list_models)
    group.command("inspect")(inspect_model)
    app.add_typer(group, name="model")


def list_models(json: Json = False) -> None:
    """List the models that are known by name."""
    from bien.core.architectures.registry import known_models

    if json:
        typer.echo(msgspec.json.encode(known_models()))
        return
    for name in known_models():
        typer.echo(name)


def inspect_model(model: Model, dtype: Dtype = "bfloat16", json: Json = False) -> None:
    """Read a model's config and say what it weighs, caches per token and computes, and which installed parts
    can run it; loads no weights."""
    from bien.core.plugins import PluginManager
    from bien.core.supported import supported

    architecture = read_architecture(model, BLOCK_TOKENS, dtype)
    about = describe(architecture, dtype)
    about["supported"] = supported(architecture, BLOCK_TOKENS, PluginManager.load())
    if json:
        typer.echo(msgspec.json.encode(about))
    else:
        _show(about)


def _show(about: dict[str, Any]) -> None:
    console, sizes = Console(highlight=False), about["parameters"]
    console.print(Text(f"{about['model']}: {about['architecture']}, {about['layers']} layers"), end="")
    console.print(Text(f", {about['hidden_size']:,} wide, vocabulary {about['vocab_size']:,}"), end="")
    console.print(Text(f", context {about['max_context']:,}"))
    console.print(
        f"parameters   {_billions(sizes['total'])}, active per token {_billions(sizes['active'])} "
        f"({_billions(sizes['active_without_embedding'])} without the embedding)"
    )
    weights = Table("weights", "", box=None, pad_edge=False)
    for role, size in about["weight_bytes"].items():
        weights.add_row(role, _bytes(size))
    console.print(weights)
    groups = Table(
        "KV group", "kind", "layers", "bytes/token", "bytes/sequence", "dtype", box=None, pad_edge=False
    )
    for g in about["groups"]:
        groups.add_row(
            Text(g["name"]),
            g["kind"],
            f"{g['layers']}",
            "" if g["window"] else f"{g['bytes_per_token'] // g['stride']:,}",
            f"{g['constant_bytes']:,}" if g["constant_bytes"] else "",
            g["dtype"],
        )
    console.print(groups)
    console.print(
        f"KV           {about['kv_bytes_per_token']:,} bytes per token, {_bytes(about['kv_constant_bytes'])} "
        "per sequence whatever its length"
    )
    console.print(f"FLOPs/token  {about['flops']['linear'] / 1e9:,.2f} G in products with weights")
    for context, count in about["flops"]["per_token"].items():
        console.print(f"             {count / 1e9:,.2f} G at a context of {int(context):,}")
    _show_supported(console, about["supported"])
    if about["unread_fields"]:
        console.print(Text(f"not read     {', '.join(about['unread_fields'])}"))


def _show_supported(console: Console, supported: dict[str, Any]) -> None:
    console.print("runs with")
    table = Table(box=None, pad_edge=False, show_header=False)
    for kind, names in supported.items():
        if kind == "refused":
            continue
        if isinstance(names, dict):
            names = [f"{name} ({', '.join(map(str, devices))} devices)" for name, devices in names.items()]
        table.add_row(kind, Text(", ".join(names) or "none"))
    for name, cause in supported["refused"].items():
        table.add_row("not", Text(f"{name}: {cause}"))
    console.print(table)


def _billions(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _bytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
