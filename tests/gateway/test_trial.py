"""Requests that kill the workers they meet, and those that happen to be there, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.clock import VirtualClock
from bien.core.errors import OverloadError, WorkerDiedError
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.gateway.core import Gateway
from bien.gateway.stream import MAX_LOSSES
from bien.gateway.testing.fake_worker import FakeWorker, fake_info

MakeGateway = Callable[..., Gateway]
CLOCK = VirtualClock()
STEP = 0.01
REBIRTH = 0.5  # seconds until a dead worker's replacement joins


class Mortal(FakeWorker):
    """Dies after so many tokens of a request whose session is a number of tokens."""

    def emit(self, rid: int, *args: object, **more: object) -> None:
        session = next(r.session for n, r in reversed(self.submitted) if n == rid)
        self._made[rid] = self._made.get(rid, -1) + 1
        if session and self._made[rid] >= int(session):
            self.die("it was poisoned")
            return
        super().emit(rid, *args, **more)  # type: ignore[arg-type]

    def attach(self, listener: object) -> None:
        self._made: dict[int, int] = {}
        super().attach(listener)  # type: ignore[arg-type]


class Fleet:
    """Replaces the workers of a gateway when they die."""

    def __init__(self, make_gateway: MakeGateway, count: int, **more: object) -> None:
        self.made = 0
        self.gateway = make_gateway(*(self._worker(i) for i in range(count)), **more)

    def _worker(self, index: int) -> FakeWorker:
        self.made += 1
        info = fake_info(f"w{index}", generation=f"w{index}.{self.made}")
        worker = Mortal(CLOCK, info=info, step_seconds=STEP, prefill_seconds=0.001)
        dies = worker.die

        def die(reason: str = "it was killed") -> None:
            if worker.alive:
                dies(reason)
                asyncio.get_running_loop().call_later(REBIRTH, self._join, index)

        worker.die = die  # type: ignore[method-assign]
        return worker

    def _join(self, index: int) -> None:
        self.gateway.join(self._worker(index))


def request(n: int, tokens: int = 20, poison: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        f"r{n}",
        TokenIds.of([n, *range(10)]),
        SamplingParams(max_tokens=tokens, seed=n),
        session="" if poison is None else str(poison),
    )


async def whole(gateway: Gateway, work: GenerateRequest) -> bytes:
    """An answer whose client sees nothing before its end."""
    made: list[bytes] = []
    async with gateway.generate(work, None, made.clear) as stream:
        async for output in stream:
            made.append(output.tokens)
    return b"".join(made)


def test_who_can_forget_what_he_was_given_is_given_all_again(make_gateway: MakeGateway) -> None:
    async def main() -> None:
        fleet = Fleet(make_gateway, 1)
        expected = await whole(fleet.gateway, request(1))
        assert len(expected) == 4 * 20
        task = asyncio.create_task(whole(fleet.gateway, request(1)))
        await CLOCK.sleep(10 * STEP)
        (member,) = fleet.gateway._members.values()
        (stream,) = member.streams.values()
        assert 0 < stream.output_tokens < 20
        member.client.die()  # type: ignore[attr-defined]
        assert await task == expected
        assert fleet.gateway.totals.finished == {"length": 2}
        assert fleet.gateway.totals.replaced == 1
        assert fleet.gateway.inflight == 0

    VirtualClock.run(main())


def test_who_is_placed_again_keeps_his_age(make_gateway: MakeGateway) -> None:
    ages: list[float] = []

    async def main() -> None:
        fleet = Fleet(make_gateway, 1)
        task = asyncio.create_task(whole(fleet.gateway, request(1)))
        for _ in range(2):
            await CLOCK.sleep(10 * STEP)
            (member,) = fleet.gateway._members.values()
            ages.extend(r.age for _, r in member.client.submitted)  # type: ignore[attr-defined]
            member.client.die()  # type: ignore[attr-defined]
            await CLOCK.sleep(REBIRTH)
        await task

    VirtualClock.run(main())
    assert ages == pytest.approx([0.0, 10 * STEP + REBIRTH])


KILLERS = st.tuples(st.integers(1, 3), st.lists(st.integers(0, 15), min_size=1, max_size=1)) | st.tuples(
    st.just(1), st.lists(st.integers(0, 15), min_size=2, max_size=2)
)


@settings(max_examples=40)
@given(killers=KILLERS, innocents=st.integers(1, 12))
def test_a_request_that_kills_its_workers_takes_nobody_with_it(
    killers: tuple[int, list[int]], innocents: int
) -> None:
    """Number of workers, and after how many tokens each poison works."""
    workers, poisons = killers
    from tests.gateway.conftest import make_gateway

    async def main() -> None:
        fleet = Fleet(make_gateway.__wrapped__(), workers)  # type: ignore[attr-defined]
        works = [request(n) for n in range(innocents)]
        expected = await asyncio.gather(*(whole(fleet.gateway, work) for work in works))
        bad = [request(100 + n, poison=after) for n, after in enumerate(poisons)]
        results = await asyncio.gather(
            *(whole(fleet.gateway, work) for work in [*bad, *works]), return_exceptions=True
        )
        for result in results[: len(bad)]:
            assert isinstance(result, WorkerDiedError)
            assert f"{MAX_LOSSES} workers had died" in str(result)
        assert results[len(bad) :] == list(expected)
        assert fleet.gateway.totals.deaths <= MAX_LOSSES * len(bad)
        assert not fleet.gateway._trial._lock.locked()
        await CLOCK.sleep(REBIRTH)
        assert len(fleet.gateway.infos) == workers
        assert fleet.gateway.inflight == 0

    VirtualClock.run(main())


def test_no_turn_is_spent_on_waiting_for_a_worker(make_gateway: MakeGateway) -> None:
    """With the last worker gone for good, all give up at the same time."""

    async def main() -> None:
        workers = [Mortal(CLOCK, f"w{i}", step_seconds=STEP, prefill_seconds=1.0) for i in range(3)]
        gateway = make_gateway(workers[0], worker_wait=5.0)
        tasks = [asyncio.create_task(whole(gateway, request(n))) for n in range(4)]
        for old, new in zip(workers, [*workers[1:], None], strict=True):
            await CLOCK.sleep(0.5)
            old.die()
            if new is not None:
                gateway.join(new)
        died = CLOCK.time()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [WorkerDiedError] + [OverloadError] * 3  # one was on trial
        assert CLOCK.time() == pytest.approx(died + 5.0)
        assert gateway.inflight == 0

    VirtualClock.run(main())


def test_who_leaves_while_on_trial_or_waiting_for_it_leaves_the_way_free(make_gateway: MakeGateway) -> None:
    async def main() -> None:
        fleet = Fleet(make_gateway, 1)
        tasks = [asyncio.create_task(whole(fleet.gateway, request(n, 1000))) for n in range(3)]
        for _ in range(2):
            await CLOCK.sleep(10 * STEP)
            next(iter(fleet.gateway._members.values())).client.die()  # type: ignore[attr-defined]
            await CLOCK.sleep(REBIRTH)
        await CLOCK.sleep(STEP)
        assert sum(load.inflight for load in fleet.gateway.loads) == 1
        tasks[0].cancel()
        tasks[1].cancel()
        assert len(await tasks[2]) == 4 * 1000
        assert fleet.gateway.totals.finished == {"abort": 2, "length": 1}
        assert fleet.gateway.inflight == 0

    VirtualClock.run(main())


def test_a_client_that_another_one_replaces_is_closed(make_gateway: MakeGateway) -> None:
    async def main() -> None:
        old = FakeWorker(CLOCK, auto=False)
        gateway = make_gateway(old)
        gateway.join(FakeWorker(CLOCK, info=fake_info("w0", generation="w0.2")))
        await gateway.close()
        assert old.closed
        assert gateway.totals.deaths == 1

    VirtualClock.run(main())
