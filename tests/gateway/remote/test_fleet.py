"""A fleet goes on trying, whatever connecting raises."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bien.core.clock import VirtualClock
from bien.core.errors import DeploymentError, ResourceError, UserError
from bien.gateway.remote.fleet import RemoteFleet


class Client:
    def __init__(self):
        self.alive, self.closed = True, False

    async def close(self):
        self.alive, self.closed = False, True


class Engine:
    """Fails at its connections as it is told to; what it makes lives so long."""

    def __init__(self, clock, *failures, ids=("v-0",)):
        self.ids, self.failures, self.tries, self.made = ids, list(failures), [], []
        self.clock = clock

    async def connect(self, id):
        self.tries.append(self.clock.time())
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure
        self.made.append(Client())
        return self.made[-1]

    async def close(self):
        pass


class Gateway:
    def __init__(self, *failures):
        self.joined, self.failures = [], list(failures)

    def join(self, client):
        if self.failures:
            raise self.failures.pop(0)
        self.joined.append(client)


def gaps(times):
    return [round(b - a, 3) for a, b in pairwise(times)]


ANY = [
    ResourceError("away"),
    ValueError("cannot convert float NaN to integer"),
    RecursionError(),
    OSError("x"),
]


def test_any_failure_is_tried_again_with_a_growing_pause():
    async def main():
        clock = VirtualClock()
        engine, gateway = Engine(clock, *ANY, KeyError("k")), Gateway()
        fleet = RemoteFleet([engine], clock)
        fleet.watch(gateway)
        await clock.sleep(60)
        assert gateway.joined == engine.made and len(engine.made) == 1
        assert gaps(engine.tries) == [0.5, 1.0, 2.0, 4.0, 8.0]
        await fleet.close()

    VirtualClock.run(main())


def test_a_client_that_dies_at_once_is_made_less_and_less_often():
    async def main():
        clock = VirtualClock()
        engine, gateway = Engine(clock), Gateway()
        fleet = RemoteFleet([engine], clock)
        fleet.watch(gateway)
        for _ in range(200):
            await clock.sleep(0.5)
            for client in engine.made:
                client.alive = False
        assert len(engine.tries) < 16 and gaps(engine.tries)[-1] >= 15
        assert all(client.closed for client in engine.made[:-1])
        await clock.sleep(40)
        engine.made[-1].alive = False  # after it has lived for long
        before = len(engine.made)
        await clock.sleep(1.1)
        assert len(engine.made) == before + 1
        await fleet.close()

    VirtualClock.run(main())


def test_a_client_that_the_gateway_does_not_take_is_closed_and_tried_again():
    async def main():
        clock = VirtualClock()
        engine, gateway = Engine(clock), Gateway(DeploymentError("other blocks"), KeyError("x"))
        fleet = RemoteFleet([engine], clock)
        fleet.watch(gateway)
        await clock.sleep(5)
        assert [client.closed for client in engine.made] == [True, True, False]
        assert gateway.joined == engine.made[2:]
        await fleet.close()

    VirtualClock.run(main())


def test_at_the_start_one_that_fails_in_an_unknown_way_does_not_stop_the_others():
    async def main():
        clock = VirtualClock()
        engine, said = Engine(clock, ValueError("odd"), None, ids=("v-0", "v-1")), []
        fleet = RemoteFleet([engine], clock)
        assert await fleet.connect(lambda *words: said.append(words)) == engine.made
        assert [id for id, _ in said] == ["v-0"] and "odd" in said[0][1]
        with pytest.raises(ResourceError, match="odd"):
            await RemoteFleet([Engine(clock, ValueError("odd"))], clock).connect(lambda *words: None)
        with pytest.raises(UserError, match="never"):
            await RemoteFleet([Engine(clock, UserError("never"), None)], clock).connect(lambda *words: None)
        await fleet.close()

    VirtualClock.run(main())
