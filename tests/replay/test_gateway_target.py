from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bien.core.clock import VirtualClock
from bien.core.deployment import Deployment, PoolSpec, Selection
from bien.core.errors import ContextLengthError, OverloadError
from bien.core.plugins import PluginManager
from bien.core.request import BlockRuns, GenerateRequest
from bien.core.speculation.counts import DraftCounts, SourceCounts
from bien.core.worker.messages import Output
from bien.gateway.routing import Decision
from bien.replay.options import ReplayOptions
from bien.replay.record import TurnRecord
from bien.replay.simulation import SimulationPlan, simulate
from bien.replay.target import TargetInfo, TurnRequest
from bien.replay.targets.gateway import GatewayTarget
from bien.traces.model import Session, TraceMeta
from bien.traces.native import write_native
from tests.replay.fakes import session


class Scripted:
    """A gateway that plays one script."""

    def __init__(self, script: Sequence[Output | Exception]) -> None:
        self.clock = VirtualClock()
        self.request: GenerateRequest
        self._script = script
        self.cached, self.worker, self.decision = 32, "w1", Decision(0, 48)

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Any]:
        self.request = request
        yield self

    async def __aiter__(self) -> AsyncIterator[Output]:
        for step in self._script:
            await self.clock.sleep(1.0)
            if isinstance(step, Exception):
                raise step
            self.came = self.clock.time()
            yield step


def play(*script: Output | Exception) -> tuple[TurnRecord, GenerateRequest]:
    async def main() -> tuple[TurnRecord, GenerateRequest]:
        gateway = Scripted(script)
        record = TurnRecord("s", 0, 0)
        request = TurnRequest("s/0/0", "s", "scope", "t", BlockRuns.of([(5, 60)]), BlockRuns.of([(65, 9)]))
        await GatewayTarget(gateway, TargetInfo()).generate(request, record)  # type: ignore[arg-type]
        return record, gateway.request

    return VirtualClock.run(main())


def test_outputs_become_the_record() -> None:
    counts = DraftCounts({"own": SourceCounts(2, 6, 4)})
    last = Output(0, 5, finish="length", accepted=4, rounds=2, drafts=counts)
    record, request = play(Output(0, 1), Output(0, 3), last)
    assert record.drafts == counts
    assert (record.first, record.last, record.got, record.first_count) == (1.0, 3.0, 9, 1)
    assert (record.cached, record.predicted, record.worker) == (32, 48, "w1")
    assert (record.accepted, record.rounds) == (4, 2)
    assert len(request.prompt) == 60 and request.sampling.max_tokens == 9 and request.sampling.ignore_eos
    assert request.forced == BlockRuns.of([(65, 9)])
    assert (request.tenant, request.session) == ("t", "s")


def test_a_jump_is_a_first_token_and_the_rest() -> None:
    record, _ = play(Output(0, 9, finish="length", times=(0.25, 0.75)))
    assert (record.first, record.first_count, record.last) == (0.25, 1, 0.75)
    assert record.tpot == 0.5 / 8


def test_errors_end_the_turn_not_the_run() -> None:
    record, _ = play(Output(0, 1), ContextLengthError("too long"))
    assert record.error == "context_length_exceeded: too long" and record.got == 1
    assert play(OverloadError("full"))[0].overloaded


def test_equal_ids_of_two_scopes_share_nothing(tmp_path: Path) -> None:
    """Weka traces count blocks from one in every session."""

    def hit(*sessions: Session) -> float | None:
        path = tmp_path / "t.bien.jsonl"
        write_native(path, TraceMeta("native", 16), sessions)
        deployment = Deployment(pool=(PoolSpec(executor=Selection("simulated")),))
        plan = SimulationPlan((path,), ReplayOptions(concurrency=1), deployment)
        result = simulate(plan, PluginManager.load()).result
        assert result.validity.valid, result.validity.reasons
        assert result.cache.loss is not None and result.cache.loss.capacity == 0
        return result.cache.achieved

    one, two = (session(n, (0, 80, 4), (1, 12, 1)) for n in "ab")
    # Of 80 and 96 tokens, the second turn finds 83 // 16 blocks.
    assert hit(one, two) == 2 * 80 / (2 * 176)
    one.scope = two.scope = "shared"
    assert hit(one, two) == (80 + 64 + 80) / (2 * 176)
