"""A client whose `submit` raises: whatever a placement had booked, it is as if it had never been."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from bien.core.clock import VirtualClock
from bien.core.deployment import GatewaySpec
from bien.core.errors import UserError
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.gateway.core import Gateway
from bien.gateway.sharing import Bid
from bien.gateway.testing.fake_worker import FakeWorker
from bien.gateway.verify.options import VerifyOptions
from bien.gateway.verify.standing import Mode
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.routers.kv_aware import KVAwareConfig, KVAwareRouter
from tests.gateway.test_core import request

CLOCK = VirtualClock()


class Refuses(FakeWorker):
    """Raises what it is told to; `late`: after it has sent the request."""

    error: BaseException | None = None
    late = False

    def submit(self, rid: int, request: GenerateRequest) -> None:
        if self.error is not None and not self.late:
            raise self.error
        super().submit(rid, request)
        if self.error is not None:
            raise self.error


class Dies(Refuses):
    """And is gone before it raises."""

    def submit(self, rid: int, request: GenerateRequest) -> None:
        if self.error is not None:
            self.die()
        super().submit(rid, request)


class Claim:
    def __init__(self, store: Store, at: int, waits: list[float]) -> None:
        self.at, self.waits, self.store = at, waits, store

    def move(self, at: int, work: float) -> None:
        self.at = at

    def release(self) -> None:
        self.store.held -= 1


class Store(MemoryIndex):
    """With reservations, which it counts."""

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.held = 0
        self.made = 0

    def shared(self, fp: str) -> bool:
        return True

    async def reserve(self, fp: str, places: Any, bids: list[Bid]) -> Claim:
        self.held += 1
        self.made += 1
        return Claim(self, 0, [0.0] * len(bids))


def make(workers: list[Refuses], index: MemoryIndex) -> Gateway:
    router = KVAwareRouter(KVAwareConfig(), random.Random(1))
    spec = GatewaySpec(max_inflight=64, secret="s")
    options = VerifyOptions(canary=False, probe=False)
    return Gateway(workers, router, index, CLOCK, spec, rng=random.Random(2), verify=options, worker_wait=1.0)


def state(gateway: Gateway, hashes: bytes) -> dict[str, Any]:
    """All that a placement changes, but for what the router has learned."""
    members = gateway._members
    places = [(id, 0) for id in members]
    verifier = gateway.verifier
    assert verifier is not None
    return {
        "loads": [(load.worker, load.inflight) for load in gateway.loads],
        "ahead": [[(r.inflight, r.unreported, len(r.fresh)) for r in m.ranks] for m in members.values()],
        "streams": [len(m.streams) for m in members.values()],
        "overlaps": gateway._index.overlaps(hashes, places),
        "placements": dict(gateway.totals.placements),
        "inflight": gateway.inflight,
        "sent": {id: s.tap.sent.told() for id, s in verifier.standings.items()},
        "routed": {id: r.depth(hashes, CLOCK.time()) for id, r in verifier._routed.items()},
        "homes": dict(verifier._homes._homes),
    }


ERRORS = [ValueError("x"), UserError("y", field="z"), MemoryError(), SystemExit(3), asyncio.CancelledError()]


@pytest.mark.parametrize("fallen", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_nothing_is_left_of_what_a_client_refuses(error: BaseException, late: bool, fallen: bool) -> None:
    async def main() -> None:
        workers, index = [Refuses(CLOCK, f"w{i}", auto=False) for i in range(2)], Store()
        gateway = make(workers, index)
        await gateway.warm(1.0)
        if fallen:
            assert gateway.verifier is not None
            gateway.verifier._change(gateway.verifier.standings["w0"], Mode.APPROXIMATE, CLOCK.time())
        async with gateway.generate(request(40, session="s")) as good:  # not all is empty before
            work = request(60, first=200, session="s")
            probe = msgspec.structs.replace(work)
            assert gateway._chains is not None
            gateway._chains.name(probe)
            before, held = state(gateway, probe.hashes), index.held
            for worker in workers:
                worker.error, worker.late = error, late
            for _ in range(3):
                with pytest.raises(type(error)):
                    async with gateway.generate(msgspec.structs.replace(work)):
                        pass
            assert state(gateway, probe.hashes) == before
            assert index.held == held and index.made > 1
            sent = [(w, rid) for w in workers for rid, _ in w.submitted if (w.info.id, rid) != here(good)]
            assert all(rid in worker.aborted for worker, rid in sent) and bool(sent) == late
        await gateway.close()

    VirtualClock.run(main())


def here(stream: Any) -> tuple[str, int]:
    return stream.worker, stream.rid


def test_nor_when_it_is_placed_again() -> None:
    async def main() -> None:
        workers, index = [Refuses(CLOCK, f"w{i}", auto=False) for i in range(3)], Store()
        gateway = make(workers, index)
        await gateway.warm(1.0)
        async with gateway.generate(request(40)) as stream:
            for worker in workers:
                worker.error = ValueError("no")
            next(w for w in workers if w.info.id == stream.worker).die()
            before = state(gateway, stream.route.hashes)
            with pytest.raises(ValueError, match="no"):
                await anext(stream)
        assert state(gateway, b"") == before | {"overlaps": [0, 0], "inflight": 0}
        assert gateway.totals.finished == {"error": 1} and not index.held
        await gateway.close()

    VirtualClock.run(main())


def test_nor_of_a_client_that_dies_of_it() -> None:
    async def main() -> None:
        worker, index = Dies(CLOCK), Store()
        gateway = make([worker], index)
        worker.error = ValueError("no")
        with pytest.raises(ValueError, match="no"):
            async with gateway.generate(request()):
                pass
        assert gateway.loads == [] and gateway.totals.placements == {} and gateway.inflight == 0
        await gateway.close()

    VirtualClock.run(main())


def test_an_abort_that_fails_books_nothing_either() -> None:
    class Stubborn(FakeWorker):
        def abort(self, rid: int) -> None:
            raise OSError("broken")

    async def main() -> None:
        gateway = make([Stubborn(CLOCK, auto=False)], Store())  # type: ignore[list-item]
        async with gateway.generate(
            GenerateRequest("r", TokenIds.of(range(9)), SamplingParams(max_tokens=2))
        ):
            assert gateway.loads[0].inflight == 1
        assert gateway.loads[0].inflight == 0 and gateway.inflight == 0 and gateway.totals.faults == 1
        await gateway.close()

    VirtualClock.run(main())
