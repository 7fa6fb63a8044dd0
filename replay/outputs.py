"""What a run will write, checked before it starts: nothing it reads, nothing twice, all of it writable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bien.core.errors import TraceError, UserError
from bien.core.plugins import PluginManager
from bien.replay.files import check_folder, kept, same_file, spare
from bien.replay.traces import open_paths, sample_path
from bien.replay.turns_file import turns_path

Output = tuple[Path, str]  # and what it is


def outputs_of(json: Path, report: Path | None = None) -> list[Output]:
    """Of one run. A device or pipe gets no turns, which lie beside a file. UserError for a report of what
    cannot be read again."""
    made = [(json, "result")]
    if kept(json):
        made.append((turns_path(json), "turns"))
    elif report is not None:
        raise UserError(f"--report is drawn from the result, and {json} keeps none; valid: a file as --json")
    if report is not None:
        made.append((report, "report"))
    return made


def check_outputs(
    outputs: Sequence[Output], traces: Sequence[Path], manager: PluginManager, deployment: str | None = None
) -> None:
    """UserError when one is a trace or the deployment that is read, or another one of them; ResourceError
    when one cannot be written."""
    check_spared(outputs, traces, manager, deployment)
    for path, what in outputs:
        check_folder(path, what)


def check_spared(
    outputs: Sequence[Output], traces: Sequence[Path], manager: PluginManager, deployment: str | None = None
) -> None:
    """The first half of it."""
    read = _traces([path for path, _ in outputs], list(traces) or [sample_path()], manager)
    if deployment is not None and Path(deployment).is_file():
        read.append(Path(deployment))
    for number, (path, what) in enumerate(outputs):
        spare(path, read, what)
        for other, name in outputs[:number]:
            if kept(path) and same_file(path, other):
                raise UserError(f"{path} is where the {name} goes; valid: another place for the {what}")


def _traces(outputs: Sequence[Path], traces: Sequence[Path], manager: PluginManager) -> list[Path]:
    # In a folder of traces results may lie as well: what counts is what an output would overwrite.
    folders = [path.resolve() for path in traces if path.is_dir()]
    read = [path for path in traces if not path.is_dir()]
    for path in outputs:
        real = path.resolve()
        if any(real.is_relative_to(folder) for folder in folders) and _is_trace(real, manager):
            read.append(path)
    return read


def _is_trace(path: Path, manager: PluginManager) -> bool:
    if not path.is_file():
        return False
    try:
        open_paths([path], manager).close()
    except TraceError:
        return False
    return True
