"""`StepLog`: what each step of an engine computed and how long it took, as JSON lines, for calibration."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import msgspec

from bien.core.costs.observed import Step, StepRecord
from bien.core.errors import ResourceError
from bien.core.plan import ExecutorPlan

FLUSH = 64  # steps between writes


class StepLog:
    """Used by an engine's thread only. A step takes from the look for its plan, or from the end of the step
    before it where that is later, to its own end: reports to gateways, and what the host does between two
    steps, are in it."""

    def __init__(self, path: Path) -> None:
        """ResourceError: the file cannot be written."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ResourceError(f"step_log {path}: {error.strerror or error}") from None
        self._open: dict[int, tuple[float, ExecutorPlan]] = {}
        self._ended = 0.0
        self._lines: list[str] = []

    def began(self, at: float, plan: ExecutorPlan) -> None:
        """`at`: seconds of the thread's clock when the engine was asked for the plan."""
        self._open[plan.step] = (at, plan)

    def ended(self, at: float, step: int) -> None:
        found = self._open.pop(step, None)
        if found is None:
            return  # it failed
        began, plan = found
        work = Step(tuple(plan.starts.tolist()), tuple(plan.counts.tolist()), int(plan.samples.sum()))
        record = StepRecord(at, at - max(began, self._ended), work)
        self._ended = at
        self._lines.append(msgspec.json.encode(record).decode() + "\n")
        if len(self._lines) >= FLUSH:
            self.flush()

    def failed(self, step: int) -> None:
        self._open.pop(step, None)

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._file.writelines(lines)
        self._file.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()
