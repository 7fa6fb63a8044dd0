"""Workers that may be gone: no target until they answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bien.core.clock import VirtualClock
from bien.core.errors import OverloadError, WorkerDiedError
from bien.core.worker.client import Answering, WorkerClient
from bien.core.worker.published import Lease
from bien.gateway.finder import Finder
from bien.gateway.index import LeasedIndex
from bien.gateway.testing.fake_worker import FakeWorker
from bien.plugins.routers.round_robin import RoundRobin
from tests.gateway.conftest import MakeGateway
from tests.gateway.durable import StoredIndex
from tests.gateway.test_core import collect, request, virtual

CLOCK = VirtualClock()


class Asked(FakeWorker):
    """Answers when it is told to."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked = 0

    async def ping(self) -> None:
        self.asked += 1
        await asyncio.shield(self.answer)

    def die(self, reason: str = "it was killed") -> None:
        super().die(reason)
        self.answer.set_exception(WorkerDiedError(reason))


@virtual
async def test_nothing_is_placed_there_until_it_answers(make_gateway: MakeGateway) -> None:
    hung, other = Asked(CLOCK, "w0"), Asked(CLOCK, "w1")
    gateway = make_gateway(hung, other, router=RoundRobin())
    for n in range(4):
        await collect(gateway, request(first=1 + 100 * n))
    assert isinstance(hung, Answering) and hung.submitted and other.submitted
    gateway.doubt("w0")
    gateway.doubt("w0")
    assert [info.id for info in gateway.infos] == ["w1"] and len(gateway.connected) == 2
    before = len(hung.submitted)
    for n in range(4):
        await collect(gateway, request(first=1 + 100 * n))
    assert len(hung.submitted) == before and hung.asked == 1
    hung.answer.set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(gateway.infos) == 2
    for n in range(4):
        await collect(gateway, request(first=1 + 100 * n))
    assert len(hung.submitted) > before
    await gateway.close()


@virtual
async def test_requests_wait_for_the_answer_where_there_is_no_other(make_gateway: MakeGateway) -> None:
    hung = Asked(CLOCK)
    gateway = make_gateway(hung, worker_wait=5.0)
    gateway.doubt("w0")
    assert not gateway.ready
    waiting = asyncio.ensure_future(collect(gateway, request()))
    await CLOCK.sleep(4.0)
    assert not waiting.done() and not hung.submitted
    hung.answer.set_result(None)
    assert (await waiting)[-1].finish == "length"
    hung.answer = asyncio.get_running_loop().create_future()
    gateway.doubt("w0")
    with pytest.raises(OverloadError):
        await collect(gateway, request())
    await gateway.close()


@virtual
async def test_one_that_does_not_answer_dies_as_ever(make_gateway: MakeGateway) -> None:
    hung, other = Asked(CLOCK, "w0", auto=False), Asked(CLOCK, "w1")
    gateway = make_gateway(hung)
    waiting = asyncio.ensure_future(collect(gateway, request()))
    await CLOCK.sleep(1.0)
    gateway.join(other)
    gateway.doubt("w0")
    await CLOCK.sleep(10.0)
    assert not waiting.done(), "it may go on"
    hung.die("it has not answered")
    assert (await waiting)[-1].finish == "length" and len(other.submitted) == 1
    assert gateway.totals.replaced == 1 and [load.worker for load in gateway.loads] == ["w1"]
    await gateway.close()


@virtual
async def test_who_cannot_be_asked_is_not_doubted(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(FakeWorker(CLOCK))
    gateway.doubt("w0")
    gateway.doubt("unknown")
    assert gateway.ready
    await gateway.close()


@virtual
async def test_an_index_that_sees_a_lease_end_says_so(make_gateway: MakeGateway) -> None:
    class Leased(StoredIndex):
        lease_lost: Any = None

    index, worker = Leased(CLOCK), Asked(CLOCK)
    assert isinstance(index, LeasedIndex)
    gateway = make_gateway(worker, index=index)
    index.alive["w0"] = Lease(worker.info, "host", 1, (0,))
    tried: list[str] = []

    async def connect(lease: Lease) -> WorkerClient:
        tried.append(lease.info.id)
        return worker

    finder = Finder(index, connect, CLOCK)
    finder.watch(gateway)
    index.lease_lost("w0")
    assert not gateway.ready
    await CLOCK.sleep(5.0)
    assert worker.asked == 1 and not tried, "who is doubted has joined all the same"
    await finder.close()
    await gateway.close()
