"""Workers that are found by their leases, on virtual time."""

from __future__ import annotations

import pytest

from bien.core.clock import VirtualClock
from bien.core.errors import DeploymentError, ResourceError
from bien.core.worker.client import WorkerClient
from bien.core.worker.published import Lease
from bien.gateway.core import Gateway
from bien.gateway.finder import BACKOFF, Finder
from bien.gateway.testing.fake_worker import FakeWorker, fake_info
from tests.gateway.conftest import MakeGateway
from tests.gateway.durable import StoredIndex
from tests.gateway.test_core import virtual

CLOCK = VirtualClock()


class Fleet:
    """Workers that hold leases, and who can be reached."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.deaf: set[str] = set()
        self.tries: list[str] = []
        self.index = StoredIndex(CLOCK)

    def start(self, id: str, **info: object) -> FakeWorker:
        worker = self.workers[id] = FakeWorker(CLOCK, info=fake_info(id, **info))
        self.index.alive[id] = Lease(worker.info, "host", 1, (0,))
        return worker

    async def connect(self, lease: Lease) -> WorkerClient:
        self.tries.append(lease.info.id)
        await CLOCK.sleep(0.01)
        if lease.info.id in self.deaf:
            raise ResourceError(f"worker {lease.info.id} is deaf")
        return self.workers[lease.info.id]

    def finder(self) -> Finder:
        return Finder(self.index, self.connect, CLOCK, lambda info: info.model == "fake")


def ids(gateway: Gateway) -> list[str]:
    return sorted(info.id for info in gateway.infos)


@virtual
async def test_workers_come_and_return(make_gateway: MakeGateway) -> None:
    fleet = Fleet()
    fleet.start("a")
    fleet.start("foreign", model="another")
    finder = fleet.finder()
    gateway = make_gateway(*await finder.first(5.0), index=fleet.index)
    finder.watch(gateway)
    assert ids(gateway) == ["a"]
    fleet.start("b")
    await CLOCK.sleep(2.0)
    assert ids(gateway) == ["a", "b"]
    fleet.workers["a"].die()
    del fleet.index.alive["a"]
    await CLOCK.sleep(2.0)
    assert ids(gateway) == ["b"]
    fleet.start("a", generation="another life")
    await CLOCK.sleep(2.0)
    assert ids(gateway) == ["a", "b"]
    assert fleet.tries == ["a", "b", "a"], "nobody is connected to twice"
    await finder.close()
    await gateway.close()


@virtual
async def test_a_new_life_takes_the_place_of_one_that_nobody_has_seen_die(make_gateway: MakeGateway) -> None:
    fleet = Fleet()
    old = fleet.start("a")
    finder = fleet.finder()
    gateway = make_gateway(*await finder.first(5.0), index=fleet.index)
    finder.watch(gateway)
    fleet.start("a", generation="another life")
    await CLOCK.sleep(2.0)
    assert [info.generation for info in gateway.infos] == ["another life"]
    assert old.closed
    await finder.close()
    await gateway.close()


@virtual
async def test_one_that_cannot_be_reached_is_tried_more_and_more_seldom(make_gateway: MakeGateway) -> None:
    fleet = Fleet()
    fleet.start("a")
    fleet.start("deaf")
    fleet.deaf.add("deaf")
    finder = fleet.finder()
    gateway = make_gateway(*await finder.first(5.0), index=fleet.index)
    finder.watch(gateway)
    await CLOCK.sleep(300.0)
    assert 5 < fleet.tries.count("deaf") < 20
    fleet.deaf.clear()
    await CLOCK.sleep(2 * BACKOFF)
    assert ids(gateway) == ["a", "deaf"]
    await finder.close()
    await gateway.close()


@virtual
async def test_one_that_does_not_fit_is_let_go(make_gateway: MakeGateway) -> None:
    fleet = Fleet()
    fleet.start("a")
    finder = fleet.finder()
    gateway = make_gateway(*await finder.first(5.0), index=fleet.index)
    finder.watch(gateway)
    odd = fleet.start("odd", block_tokens=8)
    with pytest.raises(DeploymentError):
        gateway.join(odd)
    await CLOCK.sleep(2.0)
    assert ids(gateway) == ["a"] and odd.closed
    await finder.close()
    await gateway.close()


@virtual
async def test_nobody_there_is_an_error_that_says_why(make_gateway: MakeGateway) -> None:
    fleet = Fleet()
    with pytest.raises(ResourceError, match="within 3 seconds: none of this deployment holds a lease"):
        await fleet.finder().first(3.0)
    fleet.start("a")
    fleet.deaf.add("a")
    with pytest.raises(ResourceError, match="within 3 seconds: worker a is deaf"):
        await fleet.finder().first(3.0)
    fleet.index.alive.clear()
    fleet.index.ill = "it is away"
    with pytest.raises(ResourceError, match="it is away"):
        await fleet.finder().first(3.0)
    assert CLOCK.time() == pytest.approx(9.0)


@virtual
async def test_the_first_one_is_waited_for(make_gateway: MakeGateway) -> None:
    import asyncio

    fleet = Fleet()
    asyncio.get_running_loop().call_later(2.0, fleet.start, "a")
    assert [client.info.id for client in await fleet.finder().first(5.0)] == ["a"]
    assert 2.0 < CLOCK.time() < 3.0


@virtual
async def test_what_one_lease_leads_to_stops_nobody_else(make_gateway: MakeGateway) -> None:
    """Faults of our own at an address that nobody foresaw; who never answers; who is somebody else."""
    fleet = Fleet()
    fleet.start("a")
    for id in ("odd", "mute", "evil"):
        fleet.start(id)
    fleet.index.alive["evil"] = Lease(fake_info("evil"), "host of a", 1, (0,))
    connect = fleet.connect

    async def reach(lease: Lease) -> WorkerClient:
        match lease.info.id:
            case "odd":
                raise UnicodeError("label too long")
            case "mute":
                await CLOCK.sleep(10.0)
                raise ResourceError("no answer")
            case "evil":
                return fleet.workers["b"]
        return await connect(lease)

    fleet.workers["b"] = FakeWorker(CLOCK, info=fake_info("b"))
    finder = Finder(fleet.index, reach, CLOCK)
    gateway = make_gateway(*await finder.first(5.0), index=fleet.index)
    assert ids(gateway) == ["a"] and CLOCK.time() < 2.0
    finder.watch(gateway)
    fleet.start("c")
    await CLOCK.sleep(2.5)
    assert ids(gateway) == ["a", "c"]
    assert fleet.workers["b"].closed, "it is not the one that the lease names"
    await finder.close()
    await gateway.close()


@virtual
async def test_one_that_answers_late_joins_at_a_later_look(make_gateway: MakeGateway) -> None:
    fleet = Fleet()
    fleet.start("a")
    fleet.start("late")
    connect = fleet.connect

    async def reach(lease: Lease) -> WorkerClient:
        client = await connect(lease)
        await CLOCK.sleep(3.0 if lease.info.id == "late" else 0.0)
        return client

    finder = Finder(fleet.index, reach, CLOCK)
    gateway = make_gateway(*await finder.first(5.0), index=fleet.index)
    finder.watch(gateway)
    await CLOCK.sleep(6.0)
    assert ids(gateway) == ["a", "late"] and fleet.tries == ["a", "late"]
    fleet.start("later")
    await finder.close()
    await gateway.close()
