"""The deployments of a validation, each with a calibration: given, or made now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bien.core.clock import WallClock
from bien.core.compose import Composition
from bien.core.costs.factors import read_calibration
from bien.core.errors import ResourceError, UserError
from bien.replay.calibrate.display import print_learnt
from bien.replay.calibrate.run import calibrate_own, write_calibration
from bien.replay.display import Display
from bien.replay.validate.engine import Subject


def parse_loads(text: str, runs: int) -> list[int]:
    """Increasing counts. UserError names what is none."""
    try:
        loads = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--concurrency is {text!r}; valid: counts like 1,2,4,8") from None
    if not loads or loads[0] < 1 or loads != sorted(set(loads)):
        raise UserError(f"--concurrency is {text!r}; valid: counts from 1 on, each above the last")
    if runs < 2:
        raise UserError(f"--runs is {runs}; valid: 2 or more, to see what runs differ by")
    return loads


def find_subjects(
    named: Sequence[tuple[str, Composition]],
    calibrations: Sequence[Path],
    machine: str,
    folder: Path,
    note: Callable[[str], None],
) -> list[Subject]:
    """In the order given; calibrations that are made now are left in `folder`."""
    if calibrations and len(calibrations) != len(named):
        raise UserError(
            f"{len(calibrations)} calibrations for {len(named)} deployments; valid: one for each, or none"
        )
    names = [Path(name).stem for name, _ in named]
    if len(set(names)) != len(names):
        raise UserError(f"two of the deployments {', '.join(names)} have one name; valid: different names")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"--out {folder}: {error.strerror or error}") from None
    for path in calibrations:
        read_calibration(path)  # before anything is started
    out = []
    for i, (name, (_, composition)) in enumerate(zip(names, named, strict=True)):
        path = calibrations[i] if calibrations else folder / f"{name}-calibration.json"
        if not calibrations:
            note(f"calibrating {name}")
            with Display(WallClock()) as display:
                learnt = calibrate_own(composition, machine, display.step)
            print_learnt(learnt)
            write_calibration(path, learnt)
        out.append(Subject(name, composition.deployment, path))
    return out
