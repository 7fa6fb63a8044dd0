"""`WorkerClient`: how a gateway talks to a worker, over a socket or in process."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from bien.core.request import GenerateRequest
from bien.core.worker.messages import Snapshot, StepFrame, WorkerInfo


class WorkerListener(Protocol):
    """The gateway's side. Called on the event loop, in order."""

    def on_frame(self, worker: WorkerClient, frame: StepFrame) -> None:
        """Outputs, KV events and load of one step."""
        ...

    def on_death(self, worker: WorkerClient, reason: str) -> None:
        """The worker is gone; no further frame comes. Called once; not after `close`."""
        ...


class WorkerClient(Protocol):
    """One connection to one worker; `rid` numbers are chosen by the gateway and unique per client."""

    info: WorkerInfo

    @property
    def alive(self) -> bool: ...

    def attach(self, listener: WorkerListener) -> None:
        """Set the one listener; before any submit."""
        ...

    def submit(self, rid: int, request: GenerateRequest) -> None:
        """Queue a request. Never blocks; errors come as an Output with `finish="error"`. A rid in use:
        that error ends both requests. A dead or closed client ignores it."""
        ...

    def abort(self, rid: int) -> None:
        """Stop a request; its KV is free within one step. No further output follows. Unknown: ignored."""
        ...

    async def snapshot(self, dp_rank: int = 0) -> Snapshot:
        """All cached blocks of one engine, for an index that starts or lost its place."""
        ...

    def catch_up(self) -> None:
        """Simulation: account for steps whose time has passed, so that load and index are as of now."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Answering(Protocol):
    """A client that can ask its worker whether it is still there, whatever it computes."""

    async def ping(self) -> None:
        """Returns with the answer. WorkerDiedError: there is none any more."""
        ...
