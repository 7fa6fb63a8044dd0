"""The command line `bien`. Its commands live in `bien.replay.commands` and import when they run."""

from __future__ import annotations

import importlib
import signal
import sys

import typer

from bien.core.errors import BienError, ResourceError
from bien.replay.entry import INTERRUPTED

COMMANDS = (
    *("replay", "simulate", "calibrate", "compare", "report", "serve", "worker"),
    *("plugins", "deployment", "model", "route", "validate"),
)


def make_app() -> typer.Typer:
    """All commands. Each module has `register(app)`."""
    app = typer.Typer(
        name="bien",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Compose an inference stack out of plugins, drive coding agents' traffic through it, "
        "get its efficient frontier.",
    )
    app.callback(invoke_without_command=True)(_root)
    for name in COMMANDS:
        importlib.import_module(f"bien.replay.commands.{name}").register(app)
    return app


def main() -> None:
    """Entry point. A BienError becomes one paragraph on stderr and its exit code; 130 after Ctrl-C, however
    often."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        # What happens is decided; Python's own end would be cut off by one more, and the exit code with it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run() -> None:
    try:
        make_app()()
    except BienError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except MemoryError as error:
        print(
            f"error: not enough memory: {str(error) or 'the system refused some'}; "
            "lower count, kv_tokens or slots of the deployment's pools, or --concurrency",
            file=sys.stderr,
        )
        sys.exit(ResourceError.exit_code)


def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from bien.core import __version__

        typer.echo(__version__)
        raise typer.Exit


if __name__ == "__main__":
    main()
