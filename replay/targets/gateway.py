"""A target in the same process: a `Gateway`, prompts as runs, nothing materialised. For simulation."""

from __future__ import annotations

import msgspec

from bien.core.errors import BienError, OverloadError
from bien.core.request import GenerateRequest, SamplingParams
from bien.gateway.core import Gateway
from bien.replay.record import TurnRecord
from bien.replay.target import TargetInfo, TurnRequest
from bien.traces.materialize import scoped


class Way(msgspec.Struct, frozen=True):
    """Seconds that requests are on their way outside of engines: parsed, tokenised, written."""

    request: float = 0.0
    token: float = 0.0  # of the prompt

    def seconds(self, prompt_tokens: int) -> float:
        return self.request + self.token * prompt_tokens


class GatewayTarget:
    """Times are those of the gateway's clock. Does not own the gateway."""

    def __init__(self, gateway: Gateway, info: TargetInfo, way: Way | None = None) -> None:
        """`way`: before the gateway sees a request. All of it: what follows it comes as late as that."""
        self.info = info
        self._way = way or Way()
        self._gateway = gateway

    async def generate(self, request: TurnRequest, record: TurnRecord) -> None:
        work = GenerateRequest(
            id=request.id,
            prompt=scoped(request.prompt, request.scope),
            sampling=SamplingParams(max_tokens=len(request.output), temperature=0.0, ignore_eos=True),
            tenant=request.tenant,
            session=request.session,
            # Hashes of generated blocks must be those that the next prompt has: output ids are its ids.
            forced=request.output,
        )
        clock = self._gateway.clock
        record.sent = clock.time()
        if (way := self._way.seconds(len(request.prompt))) > 0:
            await clock.sleep(way)
        try:
            async with self._gateway.generate(work) as stream:
                stream.late = True  # a task switch costs more than all else that an output does
                async for output in stream:
                    if output.count:
                        _note(record, output.count, output.times, stream.came)
                    if output.finish is not None:
                        record.drafted = output.drafted
                        record.accepted = output.accepted
                        record.rounds = output.rounds
                        record.drafts = output.drafts
                record.cached = stream.cached
                record.predicted = stream.decision.predicted_cached
                record.worker = stream.worker
        except BienError as error:
            record.error = f"{error.code}: {error}"
            record.overloaded = isinstance(error, OverloadError)

    async def close(self) -> None:
        pass


def _note(record: TurnRecord, count: int, times: tuple[float, float] | None, now: float) -> None:
    """A jump of a simulation stands for `count` tokens, evenly spread over its times."""
    if times is None or count == 1:
        record.chunk(now, count)
    else:
        record.chunk(times[0], 1)
        record.chunk(times[1], count - 1)
