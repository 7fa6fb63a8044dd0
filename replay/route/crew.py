"""Simulates variants side by side: in processes that hold the trace, or in this one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from bien.core.errors import BienError, ResourceError, error_kinds
from bien.core.plugins import PluginManager
from bien.replay.route.stack import Bench
from bien.replay.route.variant import Seen, Variant
from bien.replay.route.wire import LENGTH, Done, FromChild, Progress, Task, Trace, frame
from bien.replay.signals import cancelling
from bien.traces.model import Session

OnTurns = Callable[[Variant, int], None]  # how many turns of it have ended


class Crew(Protocol):
    def run(self, variants: Sequence[Variant], on_turns: OnTurns) -> list[Seen]:
        """All of them, in order. BienError: one of them cannot be simulated."""
        ...

    def close(self) -> None: ...


class Alone:
    """One after the other, here."""

    def __init__(self, sessions: Sequence[Session], manager: PluginManager) -> None:
        self._bench = Bench(sessions, manager)

    def run(self, variants: Sequence[Variant], on_turns: OnTurns) -> list[Seen]:
        return [self._bench.run(v, lambda turns, v=v: on_turns(v, turns)) for v in variants]  # type: ignore[misc]

    def close(self) -> None:
        pass


class Processes:
    """`count` children, which live until `close`: each gets the trace once."""

    def __init__(self, sessions: Sequence[Session], count: int) -> None:
        self._count = count
        self._trace = frame(Trace(list(sessions)))
        self._runner = asyncio.Runner()
        self._children: list[asyncio.subprocess.Process] = []

    def run(self, variants: Sequence[Variant], on_turns: OnTurns) -> list[Seen]:
        try:
            return self._runner.run(self._run(variants, on_turns))
        except asyncio.CancelledError:  # by a signal
            raise KeyboardInterrupt from None

    async def _run(self, variants: Sequence[Variant], on_turns: OnTurns) -> list[Seen]:
        task = asyncio.current_task()
        assert task is not None
        todo = list(enumerate(variants))[::-1]
        found: dict[int, Seen] = {}

        async def work(child: asyncio.subprocess.Process | None) -> None:
            child = child or await self._start()
            while todo:
                number, variant = todo.pop()
                found[number] = await _ask(child, variant, on_turns)

        try:
            with cancelling(task):
                async with asyncio.TaskGroup() as group:
                    for child in self._children:
                        group.create_task(work(child))
                    for _ in range(len(self._children), min(self._count, len(variants))):
                        group.create_task(work(None))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [found[number] for number in range(len(variants))]

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bien.replay.route.child", stdin=pipe, stdout=pipe
        )
        self._children.append(child)
        assert child.stdin is not None
        child.stdin.write(self._trace)
        return child

    def close(self) -> None:
        """End the children, whatever they do."""
        self._runner.run(self._stop())
        self._runner.close()

    async def _stop(self) -> None:
        for child in self._children:
            if child.returncode is None:
                child.kill()
            await child.wait()


async def _ask(child: asyncio.subprocess.Process, variant: Variant, on_turns: OnTurns) -> Seen:
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(frame(Task(variant)))
        await child.stdin.drain()
        while True:
            (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
            message = _decoder.decode(await child.stdout.readexactly(length))
            if isinstance(message, Done):
                return message.seen
            if isinstance(message, Progress):
                on_turns(variant, message.turns)
                continue
            kind = error_kinds().get(message.code, BienError)
            raise kind(f"simulating {variant.name!r}: {message.text}")
    except (asyncio.IncompleteReadError, ConnectionError):
        code = await child.wait()
        raise ResourceError(
            f"the process that simulated {variant.name!r} ended with code {code}; "
            "fewer --jobs take less memory"
        ) from None


_decoder = msgspec.msgpack.Decoder(FromChild)
