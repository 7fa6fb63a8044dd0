"""The driver: session trees on a clock, end-to-start gaps, recorded turns fed back.

Closed loop: lanes, each of which takes the next tree when its own has ended. Open loop: trees start when the
trace says so, however many are running.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import zip_longest

import msgspec

from bien.core.clock import Clock
from bien.core.request import BlockRuns
from bien.replay.advance import advance
from bien.replay.cache_account import CacheAccount
from bien.replay.options import ReplayOptions
from bien.replay.record import TurnRecord
from bien.replay.tally import Corpus, Tally
from bien.replay.target import Target, TurnRequest
from bien.traces.model import Session, Stream, Turn
from bien.traces.scale import scale_session

WARM_OUTPUT = 1 << 61  # virtual id of the token that a warming request makes: nobody's else


class JobRecord(msgspec.Struct, gc=False):
    """A session tree: from its first turn's plan to the end of its last stream; -1 if it was cut off."""

    session: str
    start: float
    end: float = -1.0
    failed: bool = False


class Driver:
    """One run. Everything it measures stays readable when the run is cancelled half-way."""

    def __init__(
        self,
        target: Target,
        clock: Clock,
        sessions: Iterator[Session],
        options: ReplayOptions,
        account: CacheAccount,
    ) -> None:
        self.target = target
        self.clock = clock
        self.options = options.check()
        self.account = account
        self.tally = Tally()
        self.corpus = Corpus(account.block_tokens, options.exponent)
        self.records: list[TurnRecord] = []  # in order of sending
        self.jobs: list[JobRecord] = []
        self.started = -1.0
        self.ended = -1.0
        # Every lane has ended a first turn .. a lane finds no session; open loop: any turn .. the last start.
        self.steady = (-1.0, -1.0)
        self._sessions = sessions
        self._dry = False
        self._begun: set[str] = set()  # sessions with a turn that ended, until every lane has had one

    async def run(self) -> None:
        """Replay all sessions. Cancelling it ends the turns in flight.

        Raises:
            TraceError: the trace is damaged; the turns until then are in `records`.
        """
        sessions = await self._under_way() if self.options.advance and not self.options.open_loop else ()
        self.started = self.clock.time()
        try:
            async with asyncio.timeout(self.options.duration), asyncio.TaskGroup() as group:
                if self.options.open_loop:
                    await self._arrivals(group)
                else:
                    for _, session in zip_longest(range(self.options.concurrency), sessions):
                        group.create_task(self._lane(session))
        except TimeoutError:
            pass  # the time asked for is over
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.ended = self.clock.time()
            self.account.settle()

    async def _under_way(self) -> list[Session]:
        """The first session of each lane from somewhere in it, its prompt until there in the cache: requests
        that are no turns of the run."""
        assert self.options.advance is not None
        rng = random.Random(self.options.seed)
        taken = [s for _ in range(self.options.concurrency) if (s := self._next()) is not None]
        found = [advance(session, rng.uniform(*self.options.advance)) for session in taken]
        async with asyncio.TaskGroup() as group:
            for session, warm in ((a.session, a.warm) for a in found if a.warm):
                group.create_task(self._warm(session, warm))
        self.account.restart()
        return [a.session for a in found]

    async def _warm(self, session: Session, prompt: BlockRuns) -> None:
        output = BlockRuns.of([(WARM_OUTPUT, 1)])
        request = TurnRequest(f"{session.id}/warm", session.id, session.scope, session.tenant, prompt, output)
        record = TurnRecord(session.id, 0, -1, prompt_tokens=len(prompt), asked=1, id=request.id)
        self.account.sent(session.tenant, session.scope, prompt, output, record)
        await self.target.generate(request, record)
        record.ended = self.clock.time()

    async def _lane(self, session: Session | None) -> None:
        if session is not None:
            await self._job(session)
        while (session := self._next()) is not None:
            await self._job(session)

    async def _arrivals(self, group: asyncio.TaskGroup) -> None:
        origin, last = self.started, None  # the clock when the trace's time was 0, once it is known
        while (session := self._next()) is not None:
            start = last if session.start is None else session.start
            if start is not None:
                # Of several traces, one after the other, each counts from its own beginning.
                if last is None or start < last:
                    origin = max(origin, self.clock.time()) - start * self.options.time_scale
                last = start
                if (wait := origin + start * self.options.time_scale - self.clock.time()) > 0:
                    await self.clock.sleep(wait)
            group.create_task(self._job(session))

    async def _job(self, session: Session) -> None:
        job = _Job(self, session)
        self.jobs.append(job.record)
        await job.run()
        if session.scope == session.id:
            self.account.forget(session.tenant, session.scope)

    def _next(self) -> Session | None:
        limit = self.options.sessions
        while not self._dry and (limit is None or self.tally.sessions_started < limit):
            session = next(self._sessions, None)
            if session is None:
                break
            scaled = scale_session(session, self.options.exponent)
            window = self.target.info.max_context
            fits = window is None or scaled.longest <= window
            self.corpus.read(session, fits)
            if not fits:
                self.tally.sessions_skipped += 1
                continue
            self.corpus.take(scaled)
            self.tally.sessions_started += 1
            return scaled
        if not self._dry:
            self._dry = True
            self.steady = (self.steady[0], self.clock.time())
        return None

    async def turn(
        self, session: Session, stream: Stream, index: int, planned: float, ready: float = -1.0
    ) -> TurnRecord:
        """Send one turn and see it to its end. `ready` is when what it follows had ended."""
        turn = stream.turns[index]
        record = TurnRecord(
            session.id,
            stream.id,
            index,
            planned=planned,
            prompt_tokens=turn.input_tokens,
            asked=turn.output_tokens,
            id=f"{session.id}/{stream.id}/{index}",
            ready=ready,
            parent=stream.parent,
            label=stream.label,
        )
        request = TurnRequest(record.id, session.id, session.scope, session.tenant, turn.input, turn.output)
        record.sent = self.clock.time()
        self.records.append(record)
        self.account.sent(session.tenant, session.scope, turn.input, turn.output, record)
        await self.target.generate(request, record)
        record.ended = self.clock.time()
        self._count(record)
        return record

    def _count(self, record: TurnRecord) -> None:
        tally = self.tally
        tally.turns += 1
        if record.error:
            tally.errors += 1
        else:
            tally.prompt_tokens += record.prompt_tokens
            tally.cached_tokens += max(0, record.cached)
            tally.output_tokens += record.got
        self.account.settle()
        if self.steady[0] < 0 and not self._dry:
            self._begun.add(record.session)
            if self.options.open_loop or len(self._begun) >= self.options.concurrency:
                self.steady = (record.ended, -1.0)


class _Job:
    """One session tree. A failed turn ends it: turns in flight go on, none is sent any more."""

    def __init__(self, driver: Driver, session: Session) -> None:
        self._driver = driver
        self._session = session
        self._children: dict[tuple[int, int], list[Stream]] = {}
        self._ends: dict[int, asyncio.Future[float]] = {}  # streams that run or ran
        self.record = JobRecord(session.id, driver.clock.time())
        for stream in session.streams:
            if stream.parent is not None and stream.spawned_after is not None:
                self._children.setdefault((stream.parent, stream.spawned_after), []).append(stream)

    async def run(self) -> None:
        tally, streams = self._driver.tally, self._session.streams
        if len(streams) == 1 and streams[0].parent is None:
            await self._stream(None, streams[0], self.record.start)
        else:
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    if stream.parent is None or stream.spawned_after is None:
                        self._spawn(group, stream, self.record.start)
        self.record.end = self._driver.clock.time()
        if self.record.failed:
            tally.sessions_failed += 1
        else:
            tally.sessions_completed += 1

    def _spawn(self, group: asyncio.TaskGroup, stream: Stream, at: float) -> None:
        self._ends[stream.id] = asyncio.get_running_loop().create_future()
        group.create_task(self._stream(group, stream, at))

    async def _stream(self, group: asyncio.TaskGroup | None, stream: Stream, ready: float) -> None:
        clock = self._driver.clock
        try:
            for index, turn in enumerate(stream.turns):
                ready = max(ready, await self._joined(stream, index, turn))
                planned = ready + self._driver.options.gap(turn.gap)
                if (wait := planned - clock.time()) > 0:
                    await clock.sleep(wait)
                if self.record.failed:
                    return
                record = await self._driver.turn(self._session, stream, index, planned, ready)
                ready = record.ended
                if record.error:
                    self.record.failed = True
                    return
                if group is not None:
                    for child in self._children.get((stream.id, index), ()):
                        self._spawn(group, child, ready)
        finally:
            end = self._ends.get(stream.id)
            if end is not None and not end.done():  # a cancelled parent took it along
                end.set_result(ready)

    async def _joined(self, stream: Stream, index: int, turn: Turn) -> float:
        """Wait for the sub-agents that this turn joins; when the last of them ended."""
        end = -1.0
        for child in self._session.streams:
            joins = child.joined_before == index or child.id in turn.joins
            # A child that was never spawned cannot be waited for; nor can a stream that is no child.
            if child.parent == stream.id and joins and child.id in self._ends:
                end = max(end, await self._ends[child.id])
        return end
