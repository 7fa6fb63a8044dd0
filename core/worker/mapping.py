"""What every transport shares: (client, rid) <-> engine id, and engine reports -> frames per client."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bien.core.errors import BienError, UserError
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.report import SequenceOutput, StepReport
from bien.core.request import GenerateRequest
from bien.core.worker.messages import Output, Snapshot, StepFrame, WorkerStats


class RequestMap:
    """The unfinished requests of all clients of one worker. Engine ids are unique for ever."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], str] = {}
        self._owners: dict[str, tuple[int, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, client: int, rid: int, request: GenerateRequest) -> GenerateRequest:
        """The request as the engine gets it: with an id that no other request has had.

        UserError when the rid is in use. To the client one error of a rid is the end of all that went by
        it: the caller aborts the older request, too.
        """
        if (client, rid) in self._ids:
            raise duplicate(rid)
        self._count += 1
        id = f"{request.id}#{self._count}"
        self._ids[client, rid] = id
        self._owners[id] = (client, rid)
        return msgspec.structs.replace(request, id=id)

    def owner(self, id: str) -> tuple[int, int] | None:
        """Client and rid of an engine id; None when it was aborted."""
        return self._owners.get(id)

    def remove(self, client: int, rid: int) -> str | None:
        """Forget a request; its engine id, None when unknown. Later outputs of it go nowhere."""
        id = self._ids.pop((client, rid), None)
        if id is not None:
            del self._owners[id]
        return id

    def drop(self, client: int) -> list[str]:
        """Forget a client's requests; their engine ids."""
        mine = [rid for owner, rid in self._ids if owner == client]
        return [id for rid in mine if (id := self.remove(client, rid)) is not None]

    def outputs(self, outputs: Iterable[SequenceOutput]) -> dict[int, list[Output]]:
        """Outputs by client. Finished requests are forgotten."""
        found: dict[int, list[Output]] = {}
        for output in outputs:
            owner = self._owners.get(output.id)
            if owner is None:
                continue
            client, rid = owner
            if output.finish is not None:
                self.remove(client, rid)
            found.setdefault(client, []).append(_output(rid, output))
        return found


class FrameMaker:
    """Numbers a worker's event batches and builds one frame per client and report."""

    def __init__(self, worker: str, generation: str, dp_rank: int = 0) -> None:
        self.seq = 0  # number of the newest batch
        self.batch: EventBatch | None = None  # of the newest report, if it had events
        self._worker = worker
        self._generation = generation
        self._dp_rank = dp_rank

    def frames(
        self,
        report: StepReport,
        stats: WorkerStats,
        clients: Iterable[int],
        requests: RequestMap,
        time: float = 0.0,
    ) -> dict[int, StepFrame]:
        """Every client gets events and load; outputs go to their owners only."""
        self.batch = self._batch(report.events)
        outputs = requests.outputs(report.outputs)
        return {client: self._frame(outputs.get(client, []), stats, time) for client in clients}

    def snapshot(self, events: list[KVEvent]) -> Snapshot:
        """`events` must hold what the batches numbered so far have led to, no more and no less."""
        return Snapshot(self._generation, self.seq, events, self._dp_rank)

    def mark(self) -> EventBatch:
        """An empty batch: who started from what is stored sees by its number whether anything is missing."""
        return self._numbered([])

    def _frame(self, outputs: list[Output], stats: WorkerStats, time: float) -> StepFrame:
        return StepFrame(outputs, self.batch, stats, time, self._dp_rank)

    def _batch(self, events: list[KVEvent]) -> EventBatch | None:
        return self._numbered(events) if events else None

    def _numbered(self, events: list[KVEvent]) -> EventBatch:
        self.seq += 1
        return EventBatch(self._worker, self._dp_rank, self._generation, self.seq, events)


def duplicate(rid: int) -> UserError:
    return UserError(f"rid {rid} is in use by a request that has not ended; both end here", field="rid")


def error_output(rid: int, error: BaseException) -> Output:
    """The last output of a request that failed."""
    if not isinstance(error, BienError):
        text = f"{type(error).__name__}: {error}"
        return Output(rid, finish="error", error=text, error_code=BienError.code)
    field = error.field if isinstance(error, UserError) else None
    return Output(rid, finish="error", error=str(error), error_code=error.code, error_field=field or "")


def _output(rid: int, output: SequenceOutput) -> Output:
    return Output(
        rid=rid,
        count=output.count,
        tokens=output.tokens,
        finish=output.finish,
        cached=output.cached,
        error=output.error,
        error_code=output.error_code,
        drafted=output.drafted,
        accepted=output.accepted,
        rounds=output.rounds,
        drafts=output.drafts,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
    )
