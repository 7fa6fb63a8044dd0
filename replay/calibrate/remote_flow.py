"""Runs probes against a server, and looks at its metrics while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from bien.core.clock import Clock
from bien.core.errors import BienError, UserError
from bien.core.request import BlockRuns
from bien.replay.calibrate.metrics import ServerState, read_state
from bien.replay.calibrate.probes import Batch
from bien.replay.calibrate.remote_plan import WINDOW, Lone, Together
from bien.replay.record import TurnRecord
from bien.replay.target import Target, TurnRequest

LOOK = 0.004  # seconds between looks at what has come
SETTLE = 3.0  # seconds that a server gets to count what it has answered
APART = 2  # tokens of each sequence between a look at the metrics and what is measured
_OTHER = 1 << 24  # virtual ids between prompts
_ANSWERS = 1 << 40  # those of answers
Running = asyncio.Task[TurnRecord]


class Server(Target, Protocol):
    """A target whose metrics can be read."""

    async def metrics(self) -> str:
        """Its page; empty if it has none."""
        ...


class Look(msgspec.Struct):
    """At the metrics."""

    asked: float
    came: float
    page: str

    @property
    def state(self) -> ServerState | None:
        return read_state(self.page)


class Flow(msgspec.Struct):
    """One probe. `window`: looks between which all sequences decoded and nothing else ran, as far as the
    client saw; `until`: when something else began, or everything had ended."""

    records: list[TurnRecord]
    newcomers: list[TurnRecord]
    before: Look
    after: Look
    window: tuple[Look, Look] | None = None
    since: float = -1.0  # what came before this was disturbed by a look
    until: float = -1.0

    @property
    def all(self) -> list[TurnRecord]:
        return [*self.records, *self.newcomers]


class Prober:
    def __init__(self, server: Server, clock: Clock, scope: str) -> None:
        """`scope`: names content that no earlier run has sent to this server."""
        self._server, self._clock, self._scope = server, clock, scope
        self._sent = 0

    async def look(self) -> Look:
        asked = self._clock.time()
        page = await self._server.metrics()
        return Look(asked, self._clock.time(), page)

    async def alone(self, prompt: BlockRuns, answer: int, content: str) -> Flow:
        """One request, nothing beside it."""
        before = await self.look()
        record = await self._generate(prompt, answer, content)
        return Flow([record], [], before, await self._settled(before, [record]), until=record.ended)

    async def lone(self, lone: Lone, number: int) -> list[tuple[Flow, int]]:
        """Its prompts one after the other, with how many tokens of each were sent before."""
        content = f"lone-{number}"
        found = [(await self.alone(BlockRuns.of([(0, lone.prompt)]), 1, content), 0)]
        for i, more in enumerate(lone.more, 1):
            prompt = BlockRuns.of([(0, lone.prompt), (i * _OTHER, more)])
            found.append((await self.alone(prompt, 1, content), lone.prompt))
        return found

    async def together(self, together: Together, number: int) -> Flow:
        """A batch: begun at once, measured once all of it decodes, then disturbed by newcomers."""
        before = await self.look()
        lengths = [_length(together.batch, i, number) for i in range(together.batch.sessions)]
        flow = Flow([TurnRecord(f"{number}-{i}", 0, 0) for i in range(len(lengths))], [], before, before)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self._generate(
                            BlockRuns.of([(0, n)]), together.answer, f"batch-{number}-{i}", flow.records[i]
                        )
                    )
                    for i, n in enumerate(lengths)
                ]
                await self._disturb(flow, tasks, together.newcomers, number)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if flow.until < 0:
            flow.until = min(r.last for r in flow.records)
        flow.after = await self._settled(before, flow.all)
        return flow

    async def _disturb(
        self, flow: Flow, tasks: Sequence[Running], newcomers: Sequence[int], number: int
    ) -> None:
        if not await self._until(tasks, flow.records, APART):
            return
        first = await self.look()
        if first.page:  # to write it may have held the streams up
            if not await self._until(tasks, flow.records, APART):
                return
            flow.since = self._clock.time()
        if not await self._until(tasks, flow.records, WINDOW):
            return
        flow.until = self._clock.time()
        flow.window = (first, await self.look())
        for i, tokens in enumerate(newcomers):
            if not await self._until(tasks, flow.records, APART):
                return
            prompt = BlockRuns.of([(0, tokens)])
            flow.newcomers.append(await self._generate(prompt, 1, f"new-{number}-{i}"))

    async def _until(self, tasks: Sequence[Running], records: Sequence[TurnRecord], more: int) -> bool:
        """All sequences got so many more tokens. False: one ended first."""
        wanted = [r.got + more for r in records]
        while any(r.got < n for r, n in zip(records, wanted, strict=True)):
            if any(t.done() for t in tasks):
                return False
            await self._clock.sleep(LOOK)
        return True

    async def _generate(
        self, prompt: BlockRuns, answer: int, content: str, record: TurnRecord | None = None
    ) -> TurnRecord:
        self._sent += 1
        record = record or TurnRecord(content, 0, 0)
        record.prompt_tokens, record.asked, record.id = len(prompt), answer, f"calibrate-{self._sent}"
        record.sent = self._clock.time()
        scope = f"{self._scope}-{content}"
        output = BlockRuns.of([(_ANSWERS, answer)])
        await self._server.generate(TurnRequest(record.id, scope, scope, "", prompt, output), record)
        record.ended = self._clock.time()
        if record.error:
            raise BienError(f"a probe of {len(prompt)} tokens failed: {record.error}")
        if record.got != answer:
            raise UserError(
                f"the server ended an answer after {record.got} tokens, {answer} were asked for: it must "
                "obey max_tokens and ignore_eos",
                field="url",
            )
        return record

    async def _settled(self, before: Look, records: Sequence[TurnRecord]) -> Look:
        """Once the server has counted `records`, or should have."""
        until = self._clock.time() + SETTLE
        then = before.state
        while True:
            look = await self.look()
            now = look.state
            if then is None or now is None or self._clock.time() > until:
                return look
            ended = None if now.requests is None else now.requests - (then.requests or 0)
            if (ended is None or ended >= len(records)) and not (now.live and now.running):
                return look
            await self._clock.sleep(0.05)


def _length(batch: Batch, i: int, number: int) -> int:
    # Lengths differ, so that each sequence's own counts.
    return max(1, round(batch.prompt * (0.7 + 0.6 * ((0.618 * (i + number)) % 1)))) if i else batch.prompt
