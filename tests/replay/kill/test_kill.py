"""Workers that die by SIGKILL in the middle of everything: nobody is left waiting, nothing is wrong."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bien.core.worker.socket_client import SocketClient
from bien.gateway.stream import MAX_LOSSES
from bien.replay.run import new_loop
from tests.replay.kill.asking import Answer, Question, check, draw
from tests.replay.kill.points import ALWAYS, OF_A_REPLACEMENT, OF_A_REQUEST, Point, order
from tests.replay.kill.rig import Rig, rig
from tests.replay.kill.worker import BLOCK

TIMES = 20  # that each point of a request's life is tried in the full run; half of that for the others
LONG = 20_000  # tokens: its ids travel in parts
SMALL_POOL = 4096  # tokens
SEEN = (Point.STREAMING, Point.DECODING, Point.FINISHING)  # by the client of a stream: a part of it
Test = Callable[..., Coroutine[Any, Any, None]]


def served(test: Test) -> Callable[..., None]:
    """On the kind of event loop that servers run on."""

    def run(**arguments: Any) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test(**arguments))

    functools.update_wrapper(run, test)
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    del run.__wrapped__  # type: ignore[attr-defined]
    return run


WORKERS = pytest.mark.parametrize("workers", (1, 2))  # with one, requests wait for its replacement


@WORKERS
@served
async def test_a_worker_dies_at_every_point(tmp_path: Path, workers: int) -> None:
    async with rig(tmp_path / "rig", workers) as made:
        for point in Point:
            if point is not Point.LOADING:
                await once(made, point, f"{point.value} {workers}")


@WORKERS
@served
async def test_a_worker_dies_while_it_loads(tmp_path: Path, workers: int) -> None:
    await times(tmp_path, Point.LOADING, workers, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", Point, ids=lambda point: point.value)
@served
async def test_a_worker_dies_many_times(tmp_path: Path, point: Point) -> None:
    count = TIMES // 2 if point in OF_A_REQUEST else TIMES // 4
    await asyncio.gather(*(times(tmp_path, point, workers, count) for workers in (1, 2)))


@served
async def test_a_connection_that_breaks_is_made_again(tmp_path: Path) -> None:
    """To the gateway its worker has died, and comes back as it was."""
    rng = Random(1)
    async with rig(tmp_path / "rig", 1) as made:
        generation = made.gateway.infos[0].generation
        for deaths in (1, 2):
            questions = [draw(rng, tokens=(40, 100)) for _ in range(10)]
            tasks = [asyncio.create_task(made.ask(question)) for question in questions]
            await made.until("it works", lambda: any(load.stats.running for load in made.gateway.loads))
            (member,) = made.gateway._members.values()
            assert isinstance(member.client, SocketClient)
            member.client._drop()
            for question, answer in zip(questions, await asyncio.gather(*tasks), strict=True):
                check(question, answer, {"w0"})
            await made.whole(0)
            assert made.gateway.totals.deaths == deaths
            assert [info.generation for info in made.gateway.infos] == [generation]
            await made.check_index(questions)


async def times(folder: Path, point: Point, workers: int, count: int) -> None:
    # A prompt that must be loaded lies in a lower tier, because the pool is small.
    small: dict[str, Any] = {"kv_tokens": SMALL_POOL, "store": True} if point is Point.LOADING else {}
    async with rig(folder / f"rig{workers}", workers, **small) as made:
        for n in range(count):
            await once(made, point, f"{point.value} {workers} {n}")
        print(f"{point.value}, workers: {workers}: {made.summary}")


@pytest.mark.parametrize("point", (Point.RECEIVED, Point.FINISHING), ids=lambda p: p.value)
@served
async def test_what_kills_every_worker_is_given_up_and_takes_nobody_with_it(
    tmp_path: Path, point: Point
) -> None:
    rng = Random(point.value)
    async with rig(tmp_path / "rig", 2) as made:
        path = order(made.folder, point, f"{ALWAYS}x")
        others = [draw(rng) for _ in range(12)]
        tasks = [asyncio.create_task(made.ask(question)) for question in others]
        poison = await made.ask(draw(rng, stream=False, session=f"{ALWAYS}x"))
        answers = await asyncio.gather(*tasks)
        assert poison.status == 502 and poison.error is not None
        assert poison.error["code"] == "worker_died" and "3 workers had died" in poison.error["message"]
        path.unlink()
        await made.whole(MAX_LOSSES)
        for question, answer in zip(others, answers, strict=True):
            check(question, answer, {"w0", "w1"})
        await made.check_index(others)


@served
async def test_all_workers_die_at_once_again_and_again(tmp_path: Path) -> None:
    rng = Random(0)
    async with rig(tmp_path / "rig", 2) as made:
        for n in range(1, 4):
            questions = [draw(rng) for _ in range(12)]
            tasks = [asyncio.create_task(made.ask(question)) for question in questions]
            await made.until("they work", lambda: all(load.stats.running for load in made.gateway.loads))
            await asyncio.sleep(0.02 * rng.random())
            for worker in made.workers:
                os.kill(worker.pid, signal.SIGKILL)
            answers = await asyncio.gather(*tasks)
            await made.whole(2 * n)
            for question, answer in zip(questions, answers, strict=True):
                check(question, answer, {"w0", "w1"})
            await made.check_index(questions)


async def once(rig: Rig, point: Point, name: str) -> None:
    """`name` is the seed of what is asked for, too."""
    rng = Random(name)
    deaths, met, replaced = len(rig.died), rig.gateway.totals.deaths, rig.gateway.totals.replaced
    orders, marked = mark(rig, point, rng, name)
    if point is Point.LOADING:
        for worker in range(len(rig.workers)):
            await offload(rig, worker, marked.ids, rng)
    early = [draw(rng, tokens=(40, 200), stream=True) for _ in range(rng.randint(0, 3))]
    if point is Point.WAITING:  # all slots are taken
        slots = sum(info.slots for info in rig.gateway.infos)
        early = [draw(rng, tokens=(200, 300), most=40, stream=True) for _ in range(2 * slots)]
    late = [draw(rng) for _ in range(rng.randint(2, 6))]
    answers = [Answer() for _ in early]
    tasks = [asyncio.create_task(rig.ask(q, a)) for q, a in zip(early, answers, strict=True)]
    if point is Point.WAITING:
        each = slots // len(rig.workers)
        full = lambda: all(load.stats.running >= each for load in rig.gateway.loads)  # noqa: E731
        await rig.until("all slots are taken", full)
    else:
        await asyncio.gather(*(answer.begun.wait() for answer in answers))
    victim = asyncio.create_task(leave(rig, marked) if point is Point.ABORTING else rig.ask(marked))
    tasks += [asyncio.create_task(rig.ask(question)) for question in late]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*tasks)
        answer = await victim

    await rig.until(f"the point {point.value} is reached", lambda: not any(path.exists() for path in orders))
    await rig.whole(deaths + len(orders))
    # One that never joined was no loss to the gateway.
    met += len(orders) - (point in (Point.STARTING, Point.JOINING))
    assert rig.gateway.totals.deaths == met
    names = {name for name, _ in rig.died[deaths:]}
    for question, given in zip(early + late, answers, strict=True):
        check(question, given, names)
    if point is not Point.ABORTING:  # whose client is gone
        complete = check(marked, answer, names)
        if not marked.stream or point not in SEEN:
            assert complete, "its client had seen nothing"
            assert rig.gateway.totals.replaced > replaced
        elif point is not Point.STREAMING:  # where its client may have seen something
            assert not complete, "its client had seen a part"
    questions = [*early, *late, marked]
    await rig.check_index(questions, exact=point is not Point.LOADING)


def mark(rig: Rig, point: Point, rng: Random, session: str) -> tuple[list[Path], Question]:
    """Orders to die, and the request that brings them about."""
    if point in OF_A_REPLACEMENT:
        orders = [order(rig.folder, point), order(rig.folder, Point.SAMPLED, session)]
        return orders, draw(rng, session=session)
    orders = [order(rig.folder, point, session)]
    match point:
        case Point.HALF_SENT:
            ids = tuple(rng.choices(range(3, 50), k=LONG))
            return orders, draw(rng, prompt=ids, tokens=(4, 8), session=session)
        case Point.PREFILL | Point.LOADING:
            ids = tuple(rng.choices(range(3, 50), k=1000))
            return orders, draw(rng, prompt=ids, session=session)
        case Point.ABORTING:
            return orders, draw(rng, tokens=(400, 500), session=session)
        case Point.DECODING:
            ids = tuple(rng.choices(range(3, 50), k=100))  # so that there is something to draft
            return orders, draw(rng, prompt=ids, tokens=(40, 60), session=session)
    return orders, draw(rng, session=session)


async def leave(rig: Rig, question: Question) -> Answer:
    """A client that goes away in the middle."""
    answer = Answer()
    call = asyncio.create_task(rig.ask(question, answer))
    if question.stream:
        await answer.begun.wait()
    else:
        await rig.until("it is placed", lambda: question.session in rig.placed)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    return answer


async def offload(rig: Rig, worker: int, ids: list[int], rng: Random) -> None:
    """Let a worker compute a prompt, and then so much else that only its lower tier has it."""
    async with rig.direct(rig.workers[worker]) as (client, recorder):
        client.submit(1, rig.named(ids, 1))
        await recorder.finished(1)
        client.submit(2, rig.named(rng.choices(range(3, 50), k=SMALL_POOL - 2 * BLOCK), 1))
        await recorder.finished(2)
