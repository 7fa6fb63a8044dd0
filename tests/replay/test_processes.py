"""Workers that die, and when they are started again, on virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bien.core.clock import VirtualClock
from bien.core.errors import ResourceError
from bien.core.worker.client import WorkerClient
from bien.replay.processes import BACKOFF, CHECK, LONGEST, REACH, STARTS, STEADY, Processes

CLOCK = VirtualClock()
PAUSES = [0.0, *(min(BACKOFF * 2**n, LONGEST) for n in range(20))]


class Mortal:
    """A process that lives for `lives[0]` seconds; its next life is the next of them, an error that
    starting it raises, or without end."""

    def __init__(self, lives: list[float | Exception], starts: list[float], epoch: int = 1) -> None:
        self.start = SimpleNamespace(id="w0", epoch=epoch)
        self.lives = lives
        self.starts = starts
        self.ended = asyncio.Event()
        self.stopped = False
        if lives:
            asyncio.get_running_loop().call_later(cast(float, lives.pop(0)), self.ended.set)

    async def wait(self) -> str:
        await self.ended.wait()
        return "worker 'w0' is gone"

    async def respawn(self) -> Mortal:
        await self.stop()
        self.starts.append(CLOCK.time())
        if self.lives and isinstance(self.lives[0], Exception):
            raise cast(Exception, self.lives.pop(0))
        return Mortal(self.lives, self.starts, self.start.epoch + 1)

    async def stop(self, grace: float = 0.0) -> None:
        self.stopped = True
        self.ended.set()


class Client:
    def __init__(self, worker: Mortal) -> None:
        self.worker = worker
        self.closed = False
        self.cut = False

    @property
    def alive(self) -> bool:
        return not (self.closed or self.cut or self.worker.ended.is_set())

    async def close(self) -> None:
        self.closed = True


class Gateway:
    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.seen: list[Client] = []

    def join(self, client: WorkerClient) -> None:
        self.seen.append(cast(Any, client))
        if self.refusals:
            raise self.refusals.pop(0)


def watch(
    *lives: float | Exception, refusals: tuple[Exception, ...] = ()
) -> tuple[list[float], list[str], list[Client]]:
    """When it was started again, what was said last, and the clients that were offered to the gateway."""
    starts: list[float] = []
    said: list[str] = []
    gateway = Gateway(*refusals)

    async def connect(worker: Any) -> WorkerClient:
        return cast(WorkerClient, Client(worker))

    async def main() -> None:
        first = Mortal(list(lives), starts)
        processes = Processes([cast(Any, first)], connect, CLOCK)
        await processes.connect()
        processes.watch(gateway, lambda who, text, *_: said.append(text))
        await CLOCK.sleep(1000.0)
        await processes.stop()

    VirtualClock.run(main())
    return starts, said, gateway.seen


def test_deaths_in_a_row_are_followed_by_longer_and_longer_pauses() -> None:
    """Without an end: what killed it, a request perhaps, may be over."""
    starts, said, _ = watch(*[0.5] * 20)
    at, expected = 0.0, []
    for pause in PAUSES[:20]:
        at += 0.5 + pause
        expected.append(at)
    assert starts == pytest.approx(expected)
    assert said[-1] == "is back"


def test_a_worker_that_lived_for_long_is_started_again_at_once() -> None:
    starts, said, _ = watch(*[STEADY] * 20)
    assert starts == pytest.approx([STEADY * n for n in range(1, 21)])
    assert said[-1] == "is back"


def test_what_cannot_be_started_counts_however_long_it_lived_before() -> None:
    starts, said, _ = watch(100.0, *[OSError("no memory")] * 20)
    assert len(starts) == STARTS and starts[-1] == pytest.approx(100.0 + sum(PAUSES[:STARTS]))
    assert said[-1].endswith(f"OSError('no memory'); given up after {STARTS} attempts to start it again")


def test_any_error_is_a_failure_like_another() -> None:
    starts, said, seen = watch(1.0, ValueError("respawn"), 500.0, refusals=(KeyError("join"),))
    assert len(starts) == 3 and said[-1] == "is back"
    assert "cannot be started again: ValueError('respawn')" in said[1]
    assert "cannot be started again: KeyError('join')" in said[2]
    # The process that never joined has made room for the next one.
    assert [(c.closed, c.worker.stopped) for c in seen[:-1]] == [(True, True)]
    assert [c.worker.start.epoch for c in seen] == [2, 3]


@pytest.mark.parametrize("listens", [True, False])
def test_a_lost_connection_is_made_again_and_who_cannot_be_reached_is_started_again(listens: bool) -> None:
    gateway, starts = Gateway(), []
    made: list[Client] = []

    async def connect(worker: Any) -> WorkerClient:
        if made and worker is made[0].worker and not listens:
            raise OSError("nobody listens")
        made.append(Client(worker))
        return cast(WorkerClient, made[-1])

    async def main() -> None:
        first = Mortal([], starts)
        processes = Processes([cast(Any, first)], connect, CLOCK)
        await processes.connect()
        processes.watch(gateway, lambda *_: None)
        await CLOCK.sleep(100.5 * CHECK)
        made[0].cut = True
        await CLOCK.sleep(2 * CHECK)
        assert len(starts) == (0 if listens else 1)
        assert (gateway.seen == made[1:]) and len(made) == 2
        assert (made[1].worker is first) == listens
        await CLOCK.sleep(10 * CHECK)
        assert len(made) == 2
        await processes.stop()

    VirtualClock.run(main())


@pytest.mark.parametrize("seconds", [30.0, 500.0])
def test_one_that_hangs_joins_again_when_it_answers_and_is_ended_when_it_never_does(seconds: float) -> None:
    gateway, starts = Gateway(), []
    made: list[Client] = []

    async def connect(worker: Any) -> WorkerClient:
        if made and worker is made[0].worker and CLOCK.time() < 100.0 + seconds:
            await CLOCK.sleep(10.0)
            raise ResourceError("it did not answer in 10 seconds")
        made.append(Client(worker))
        return cast(WorkerClient, made[-1])

    async def main() -> None:
        first = Mortal([], starts)
        processes = Processes([cast(Any, first)], connect, CLOCK)
        await processes.connect()
        processes.watch(gateway, lambda *_: None)
        await CLOCK.sleep(100.0)
        made[0].cut = True
        await CLOCK.sleep(200.0)
        assert gateway.seen == made[1:] and len(made) == 2
        if seconds < REACH:
            assert made[1].worker is first and not starts and not first.stopped
        else:
            assert made[1].worker is not first and first.stopped
            assert 100.0 + REACH <= starts[0] <= 100.0 + REACH + 30.0
        await processes.stop()

    VirtualClock.run(main())
