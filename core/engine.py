"""The engine: a synchronous state machine. `submit`, `abort`, `begin() -> plan`, `finish(result)`."""

from __future__ import annotations

from dataclasses import dataclass, field

from bien.core.kv.events import KVEvent
from bien.core.plan import ExecutorPlan, StepResult
from bien.core.request import GenerateRequest
from bien.core.worker.messages import WorkerStats


@dataclass(slots=True)
class SequenceOutput:
    """What one request gained in a step."""

    id: str
    count: int
    tokens: bytes  # uint32-LE ids, empty in simulation
    finish: str | None = None
    cached: int = -1  # set on the first output
    drafted: int = 0  # totals, set on the last output
    accepted: int = 0
    rounds: int = 0
    error: str = ""


@dataclass(slots=True)
class StepReport:
    """What a step changed, for gateways and index."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    events: list[KVEvent] = field(default_factory=list)


class Engine:
    """No I/O, no thread, no waiting. SKELETON: signatures only for now."""

    def submit(self, request: GenerateRequest) -> None:
        """Accept a request. UserError / ContextLengthError when it can never run; duplicate ids too."""
        raise NotImplementedError

    def abort(self, id: str) -> None:
        """Drop a request; unknown or finished ids are ignored. No output follows."""
        raise NotImplementedError

    def begin(self) -> ExecutorPlan | None:
        """Plan a step. None: nothing to compute now (idle, or all wait for loads or steps in flight)."""
        raise NotImplementedError

    def finish(self, result: StepResult) -> StepReport:
        """Commit the oldest step in flight."""
        raise NotImplementedError

    def fail(self, step: int, error: BaseException) -> StepReport:
        """The oldest step in flight failed: end its sequences with finish "error", free everything."""
        raise NotImplementedError

    def flush(self) -> StepReport:
        """Outputs and events that arose outside a step (errors at admission, aborts, loads)."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished (False: the driver may wait for its inbox)."""
        raise NotImplementedError

    @property
    def loading(self) -> bool:
        """Whether a transfer runs: with `begin()` None, poll again in about a millisecond."""
        raise NotImplementedError

    def stats(self) -> WorkerStats:
        raise NotImplementedError

    def snapshot(self) -> list[KVEvent]:
        """All cached blocks as "stored" events."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + cached + pinned = total in every pool."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
