"""Reservations among gateways, on a real server."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from bien.core.clock import WallClock
from bien.core.deployment import GatewaySpec
from bien.core.providers import Context
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.worker.published import Keys
from bien.gateway.core import Gateway
from bien.gateway.routing import Decision, Router, RouteRequest, Target, cached_tokens
from bien.gateway.sharing import Bid, Reservations, Sharing
from bien.gateway.stream import Stream
from bien.gateway.testing.durable import until
from bien.gateway.testing.fake_worker import FakeWorker, fake_info
from bien.gateway.testing.index import make_info
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.indexes.redis import RedisConfig, reserve
from bien.plugins.indexes.redis.book import WRONG, Book, us
from bien.plugins.indexes.redis.index import RedisIndex
from bien.plugins.routers.kv_aware import KVAwareConfig, KVAwareRouter
from bien.plugins.routers.round_robin import RoundRobin
from tests.redis_process import RedisProcess, redis_process
from tests.redis_servers import cluster

FAST = {"lease_seconds": 0.6, "poll_seconds": 0.005, "flush_seconds": 0.001, "timeout_seconds": 1.0}
LONG, ABOUT = 1e5, 3e3  # ms of work, and how much of it may be done while a test looks
SLOW = KVAwareConfig(ms_per_prefill_token=50.0)  # what is reserved lasts longer than a test looks
PLACES = [("a", 0), ("b", 0), ("c", 1)]


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisProcess]:
    with redis_process() as server:
        yield server


@pytest.fixture
def server(shared: RedisProcess) -> RedisProcess:
    with shared.client as client:
        client.flushall()
    return shared


@pytest.fixture
async def opened() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def index(url: str, opened: AsyncExitStack | None = None, **parameters: object) -> RedisIndex:
    """Of one gateway, which knows workers of fingerprint `fp`."""
    config = RedisConfig(url, **{"reserve_seconds": 1.0, **FAST, **parameters})  # type: ignore[arg-type]
    made = RedisIndex(config, Context(clock=WallClock()))
    await made.start()
    made.join(make_info("a"))
    if opened is not None:
        opened.push_async_callback(made.stop)
    return made


async def two(url: str, opened: AsyncExitStack, **parameters: object) -> tuple[RedisIndex, RedisIndex]:
    one, other = await index(url, opened, **parameters), await index(url, opened, **parameters)
    await until(lambda: one.shared("fp") and other.shared("fp"))
    return one, other


def about(waits: Sequence[float], *expected: float) -> bool:
    """Ms; what is reserved wears off, and servers and gateways read their clocks one after the other."""
    return list(waits) == pytest.approx(expected, abs=ABOUT)


async def told(*of: RedisIndex, fp: str = "fp") -> None:
    """Others know what they have reserved."""
    books = [its.reserver._books[fp] for its in of]
    await until(lambda: not any(book.untold() or book.busy for book in books))


def bids(*costs: float, work: float = 100.0) -> list[Bid]:
    return [Bid(cost, 0.0, work) for cost in costs]


async def test_one_gateway_alone_asks_for_nothing(server: RedisProcess, opened: AsyncExitStack) -> None:
    one = await index(server.url, opened)
    assert isinstance(one, Reservations)
    await until(lambda: "fp" in one.reserver._books and one.reserver._books["fp"].meet_at > 0)
    assert not one.shared("fp") and not one.shared("another")
    other = await index(server.url, opened)
    await until(lambda: one.shared("fp") and other.shared("fp"))
    await other.stop()
    await until(lambda: not one.shared("fp"), "it has said goodbye")
    quiet = await index(server.url, opened, reservations=False)
    await WallClock().sleep(0.4)
    assert not one.shared("fp") and not quiet.shared("fp")


async def test_each_sees_what_the_other_has_reserved(server: RedisProcess, opened: AsyncExitStack) -> None:
    one, other = await two(server.url, opened)
    first = await one.reserve("fp", PLACES, bids(0.0, 5e3, 9e3, work=LONG))
    assert first is not None and first.at == 0 and about(first.waits, 0.0, 0.0, 0.0)
    second = await other.reserve("fp", PLACES, bids(0.0, 5e3, 9e3, work=LONG))
    assert second is not None and second.at == 1 and about(second.waits, LONG, 0.0, 0.0)
    third = await one.reserve("fp", PLACES, bids(0.0, 5e3, 9e3, work=LONG))
    assert third is not None and third.at == 2 and about(third.waits, LONG, LONG, 0.0)
    first.release()
    again = await one.reserve("fp", PLACES, bids(0.0, 5e3, 9e3, work=LONG))
    assert again is not None and again.at == 0 and about(again.waits, 0.0, LONG, LONG)
    third.move(1, 9e4)
    for reserved in (second, again):
        reserved.release()
    await told(one, other)
    last = await other.reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=LONG))
    assert last is not None and about(last.waits, 0.0, 9e4, 0.0) and last.at != 1


async def test_what_was_reserved_wears_off_as_the_worker_gets_on(
    server: RedisProcess, opened: AsyncExitStack
) -> None:
    """Without a word from whoever made it, and without a first token."""
    one, other = await two(server.url, opened)
    held = await other.reserve("fp", PLACES, bids(0.0, 9.0, 9.0, work=400.0))
    assert held is not None and held.at == 0
    with server.client as client:
        written = client.hgetall(other.reserver._books["fp"].own)
        seen = []
        while not seen or seen[-1] > 0.0:
            reserved = await one.reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=200.0))
            assert reserved is not None
            seen.append(reserved.waits[0])
            reserved.move(2, 0.0)
            reserved.release()
            await WallClock().sleep(0.02)
        assert client.hgetall(other.reserver._books["fp"].own) == written
    assert seen[0] > 200.0 and seen == sorted(seen, reverse=True) and len(set(seen)) > 3
    assert other.reserver._books["fp"].loads == {"a/0": 400_000}
    held.release()


async def test_what_this_gateway_knows_of_the_queue_counts_when_it_is_more(
    server: RedisProcess, opened: AsyncExitStack
) -> None:
    one, other = await two(server.url, opened)
    held = await other.reserve("fp", PLACES[:1], bids(0.0, work=LONG))
    assert held is not None
    await told(other)  # nobody was asked
    for wait, at in ((LONG - 1e4, 0), (LONG + 1e4, 0), (LONG + 3e4, 1)):
        offered = [Bid(0.0, wait, 3e4), Bid(LONG + 2e4, 0.0, 3e4)]
        asked = one.reserver.asked
        reserved = await one.reserve("fp", PLACES[:2], offered)
        assert reserved is not None and reserved.at == at, wait
        reserved.release()
        assert one.reserver.asked == asked + (wait > LONG), "else no request like it could change anything"


async def test_equal_bids_are_not_always_the_first(server: RedisProcess, opened: AsyncExitStack) -> None:
    one, _ = await two(server.url, opened)
    found = set()
    for _ in range(60):
        reserved = await one.reserve("fp", PLACES, bids(5.0, 5.0, 5.0))
        assert reserved is not None
        found.add(reserved.at)
        reserved.release()
    assert found == {0, 1, 2}


async def test_of_many_bids_the_cheap_ones_are_sent(server: RedisProcess, opened: AsyncExitStack) -> None:
    one, _ = await two(server.url, opened)
    rng = random.Random(3)
    costs = [float(n) for n in range(200)]
    rng.shuffle(costs)
    places = [(f"w{n}", 0) for n in range(200)]
    for expected in range(5):
        reserved = await one.reserve("fp", places, bids(*costs, work=LONG))
        assert reserved is not None and costs[reserved.at] == expected


async def test_what_a_dead_gateway_had_reserved_ends_with_its_lease(
    server: RedisProcess, opened: AsyncExitStack
) -> None:
    one, other = await two(server.url, opened)
    assert await other.reserve("fp", PLACES, bids(0.0, 50.0, 50.0, work=LONG)) is not None
    assert other._task is not None
    other._task.cancel()  # it does nothing any more, and says nothing
    for task in other.reserver._tasks:
        task.cancel()
    seen = await one.reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=LONG))
    assert seen is not None and about(seen.waits, LONG, 0.0, 0.0)
    seen.release()
    await until(lambda: not one.shared("fp"))
    with server.client as client:
        await until(lambda: client.exists(Keys("bien", "fp").load(other.reserver._id)) == 0)
    again = await two(server.url, opened)
    reserved = await again[0].reserve("fp", PLACES, bids(0.0, 1.0, 1.0))
    assert reserved is not None and about(reserved.waits, 0.0, 0.0, 0.0)


async def test_what_redis_forgets_is_written_again(server: RedisProcess, opened: AsyncExitStack) -> None:
    one, other = await two(server.url, opened)
    held = [await one.reserve("fp", PLACES[:1], bids(0.0, work=LONG)) for _ in range(3)]
    await told(one)
    with server.client as client:
        client.flushall()
        for reserved in held[:2]:
            assert reserved is not None
            reserved.release()
        key = Keys("bien", "fp").load(one.reserver._id)
        await until(
            lambda: client.hgetall(key) == {b"a/0": str(one.reserver._books["fp"].until["a/0"]).encode()}
        )
        assert client.pttl(key) > 0
    await until(lambda: other.shared("fp"))
    seen = await other.reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=LONG))
    assert seen is not None and about(seen.waits, LONG, 0.0, 0.0)


async def test_a_server_that_hangs_costs_one_moment(opened: AsyncExitStack) -> None:
    """Then there are none until it answers; what it did in the meantime is undone."""
    with redis_process() as own:
        one, other = await two(own.url, opened, reserve_seconds=0.02, timeout_seconds=30.0)
        own.freeze()
        assert one.shared("fp")
        assert await one.reserve("fp", PLACES, bids(0.0, 5.0, 5.0, work=LONG)) is None
        assert not one.shared("fp"), "nobody else waits"
        own.thaw()
        await until(lambda: not one.reserver._tasks)
        await until(lambda: one.shared("fp"), "it goes on by itself")
        assert one.reserver._books["fp"].loads == {}
        await told(one)
        seen = None
        while seen is None:
            seen = await other.reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=LONG))
        assert about(seen.waits, 0.0, 0.0, 0.0)
        assert one.reserver.missed == 1
        own.stop()
        assert await other.reserve("fp", PLACES, bids(0.0, 5.0, 5.0)) is None
        await until(lambda: not other.shared("fp"))


async def test_who_gives_up_leaves_nothing_reserved(server: RedisProcess, opened: AsyncExitStack) -> None:
    one, other = await two(server.url, opened)
    for pause in range(12):
        task = asyncio.create_task(one.reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=LONG)))
        for _ in range(pause):
            await asyncio.sleep(0)
        task.cancel()
        (made,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(made, BaseException) and made is not None:
            made.release()
    await until(lambda: not one.reserver._tasks)
    assert one.reserver._books["fp"].loads == one.reserver._books["fp"].until == {}
    seen = await other.reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=LONG))
    assert seen is not None and about(seen.waits, 0.0, 0.0, 0.0)


async def test_random_reservations_add_up(server: RedisProcess, opened: AsyncExitStack) -> None:
    """Whatever is made, contested, moved and released at once: what the server holds is what is held."""
    rng = random.Random(5)
    gateways = await two(server.url, opened)
    held: list[list[float]] = []  # of each: [place, work]

    async def life(gateway: RedisIndex) -> None:
        await asyncio.sleep(rng.random() * 0.05)
        reserved = await gateway.reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=LONG * rng.randint(1, 9)))
        assert reserved is not None
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.3:
            reserved.move(rng.randrange(3), LONG)
        if rng.random() < 0.7:
            reserved.release()
        else:
            held.append([reserved.at, reserved._work / 1000])  # type: ignore[attr-defined]

    await asyncio.gather(*(life(rng.choice(gateways)) for _ in range(300)))
    expected = [sum(work for at, work in held if at == place) for place in range(3)]
    await told(*gateways)
    with server.client as client:
        for gateway in gateways:
            book = gateway.reserver._books["fp"]
            stored = {k.decode(): int(v) for k, v in client.hgetall(book.own).items()}
            assert stored == book.told
            for place in PLACES:
                name = f"{place[0]}/{place[1]}"
                left = (stored[name] - book.now) / 1000
                assert (
                    left == pytest.approx(book.loads.get(name, 0) / 1000, abs=ABOUT) or left <= WRONG / 1000
                )
    assert sum(g.reserver.asked for g in gateways) > 250 and sum(g.reserver.contested for g in gateways) > 0
    seen = await gateways[0].reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=LONG))
    assert seen is not None and about(seen.waits, *expected)


async def test_it_works_in_a_cluster(opened: AsyncExitStack) -> None:
    with cluster() as servers:
        async with AsyncExitStack() as inner:
            one, other = await two(servers.url, inner)
            assert await one.reserve("fp", PLACES, bids(0.0, 50.0, 90.0, work=LONG)) is not None
            second = await other.reserve("fp", PLACES, bids(0.0, 50.0, 90.0, work=LONG))
            assert second is not None and second.at == 1


# Through gateways.


def gateway(of: RedisIndex | MemoryIndex, router: Router, workers: list[FakeWorker]) -> Gateway:
    return Gateway(workers, router, of, WallClock(), GatewaySpec())


def request(n: int) -> GenerateRequest:
    prompt = TokenIds.of(random.Random(n).randrange(1000) for _ in range(400))
    return GenerateRequest(f"r{n}", prompt, SamplingParams(max_tokens=4, ignore_eos=True), session=f"s{n}")


async def bursts(server: RedisProcess, opened: AsyncExitStack, reservations: bool) -> list[Counter[str]]:
    """Placements of rounds in which four gateways route two requests each at once to eight idle workers."""
    gateways, indexes = [], []
    for _ in range(4):
        config = RedisConfig(server.url, reservations=reservations, reserve_seconds=1.0, **FAST)  # type: ignore[arg-type]
        its = RedisIndex(config, Context(clock=WallClock()))
        await its.start()
        indexes.append(its)
        workers = [FakeWorker(WallClock(), info=fake_info(f"w{n}"), auto=False) for n in range(8)]
        gateways.append(gateway(its, KVAwareRouter(SLOW, random.Random()), workers))
        opened.push_async_callback(gateways[-1].close)

    def met(its: RedisIndex) -> bool:
        return its.shared("fake") and len(its.reserver._books["fake"].others) == 3

    await until(lambda: not reservations or all(map(met, indexes)))
    rounds = []
    for n in range(6):
        async with AsyncExitStack() as requests:
            streams = await asyncio.gather(
                *(
                    requests.enter_async_context(g.generate(request(100 * n + 10 * i + k)))
                    for i, g in enumerate(gateways)
                    for k in range(2)
                )
            )
            rounds.append(Counter(stream.worker for stream in streams))
        await until(lambda: all(i.shared("fake") or not reservations for i in indexes))
        await told(*(i for i in indexes if reservations), fp="fake")
    return rounds


async def test_gateways_that_route_at_once_do_not_herd(server: RedisProcess, opened: AsyncExitStack) -> None:
    alone = await bursts(server, opened, False)
    assert sum(max(r.values()) > 1 for r in alone) >= 4, "by chance they nearly always meet"
    together = await bursts(server, opened, True)
    assert all(max(r.values()) == 1 for r in together), together


async def test_a_reservation_lives_from_placement_to_the_first_token_or_the_end(
    server: RedisProcess, opened: AsyncExitStack
) -> None:
    its = await index(server.url)
    its.leave("a")
    await index(server.url, opened)
    workers = [FakeWorker(WallClock(), info=fake_info(f"w{n}", fp="fp"), auto=False) for n in range(2)]
    made = gateway(its, KVAwareRouter(KVAwareConfig(), random.Random(0)), workers)
    opened.push_async_callback(made.close)
    await until(lambda: its.shared("fp"))
    loads = its.reserver._books["fp"].loads

    async def placed(n: int) -> tuple[Stream, AsyncExitStack]:
        stack = AsyncExitStack()
        while True:  # while gateways meet they place alone
            stream = await stack.enter_async_context(made.generate(request(n)))
            if stream.reserved is not None:
                break
            await stack.aclose()
        assert "reserved_ms" in stream.decision.reasons and sum(loads.values()) > 0
        return stream, stack

    def worker(stream: Stream) -> FakeWorker:
        return next(w for w in workers if w.info.id == stream.worker)

    stream, stack = await placed(1)
    rid = worker(stream).submitted[-1][0]
    worker(stream).emit(rid, 1, cached=0)
    assert loads == {} and stream.reserved is None, "its first token"
    await stack.aclose()
    stream, stack = await placed(2)
    await stack.aclose()
    assert loads == {}, "its consumer is gone"
    stream, stack = await placed(3)
    first, dead = stream.reserved, worker(stream)
    reading = asyncio.ensure_future(anext(stream))
    dead.die("killed")
    await until(lambda: stream.placements == 2)
    assert stream.reserved is not first
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stack.aclose()
    assert loads == {}, "its worker is dead"


async def test_a_worker_that_dies_while_it_is_being_reserved(
    server: RedisProcess, opened: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = await index(server.url)
    its.leave("a")
    await index(server.url, opened)
    workers = [FakeWorker(WallClock(), info=fake_info(f"w{n}", fp="fp"), auto=False) for n in range(3)]
    made = gateway(its, KVAwareRouter(KVAwareConfig(), random.Random(0)), workers)
    opened.push_async_callback(made.close)
    await until(lambda: its.shared("fp"))
    reserve = its.reserve

    async def slow(*arguments: object) -> object:
        reserved = await reserve(*arguments)  # type: ignore[arg-type]
        if reserved is not None:
            workers[reserved.at].die("killed")
        return reserved

    monkeypatch.setattr(its, "reserve", slow)
    async with made.generate(request(1)) as stream:
        assert stream.worker in {w.info.id for w in workers if w.alive}
        assert stream.reserved is None and its.reserver._books["fp"].loads == {}
        assert sum(w.alive for w in workers) in (2, 3)


class Follower:
    """Wants to be where its prefix is, whatever waits there."""

    def bids(self, request: RouteRequest, targets: Sequence[Target]) -> list[Bid]:
        return [Bid(1e6 - target.overlap, 0.0, 1.0) for target in targets]

    def take(self, request: RouteRequest, targets: Sequence[Target], at: int) -> Decision:
        return Decision(at, cached_tokens(request, targets[at]))

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        return self.take(request, targets, max(range(len(targets)), key=lambda i: targets[i].overlap))

    def observe(self, decision: Decision, outcome: object) -> None: ...

    def report(self, worker: str, stats: object) -> None: ...

    def close(self) -> None: ...


async def test_what_is_learned_while_a_reservation_is_made_counts(
    server: RedisProcess, opened: AsyncExitStack
) -> None:
    """Siblings with one new prompt, at once: the first to be placed makes it known where the prefix is."""
    its = await index(server.url)
    its.leave("a")
    await index(server.url, opened)
    workers = [FakeWorker(WallClock(), info=fake_info(f"w{n}", fp="fp"), auto=False) for n in range(8)]
    made = gateway(its, Follower(), workers)
    opened.push_async_callback(made.close)
    for n in range(5):
        await until(lambda: its.shared("fp"))
        async with AsyncExitStack() as requests:
            streams = await asyncio.gather(
                *(requests.enter_async_context(made.generate(request(n))) for _ in range(6))
            )
            assert len({stream.worker for stream in streams}) == 1
            loads = its.reserver._books["fp"].loads
            assert set(loads) <= {f"{streams[0].worker}/0"}, "and what was reserved elsewhere has moved"
        assert loads == {}
    assert its.reserver.made > 0


def test_where_there_is_nothing_to_share_nothing_waits() -> None:
    router = KVAwareRouter(KVAwareConfig(), random.Random())
    assert Sharing.of(MemoryIndex(WallClock()), router) is None
    made = RedisIndex(RedisConfig(), Context(clock=WallClock()))
    assert Sharing.of(made, RoundRobin()) is None
    sharing = Sharing.of(made, router)
    assert sharing is not None and not sharing.wanted([make_info("a"), make_info("b")])


async def test_answers_that_are_slow_are_waited_for(
    server: RedisProcess, opened: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that is busy is no reason to go where all others go."""
    one, _ = await two(server.url, opened, reserve_seconds=0.001)
    one.reserver.patience.trip = 0.0
    put, come = one.reserver._put, asyncio.Event()

    async def late(*arguments: Any) -> Any:
        answer = await put(*arguments)
        await come.wait()
        return answer

    monkeypatch.setattr(one.reserver, "_put", late)
    assert await one.reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=LONG)) is None
    assert one.reserver.missed == 1
    await WallClock().sleep(0.05)
    come.set()
    await until(lambda: not one.reserver._tasks)
    assert one.reserver.patience.of(LONG) > 0.04, "it has learned from the one that came too late"
    assert one.reserver.patience.of(1.0) == 0.001
    one.reserver.patience.took(60.0)
    come.clear()
    asyncio.get_running_loop().call_later(0.02, come.set)
    await until(lambda: one.shared("fp"))
    made = await one.reserve("fp", PLACES, bids(0.0, 0.0, 0.0, work=LONG))
    assert made is not None and one.reserver.missed == 1


async def test_what_is_reserved_while_gateways_meet_is_not_removed_with_what_is_past(
    server: RedisProcess, opened: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = await two(server.url, opened)
    monkeypatch.setattr(reserve, "TELL_SECONDS", 1e3)  # nobody sets it right afterwards
    book, go, run_script = one.reserver._books["fp"], asyncio.Event(), reserve.run_script
    book.told["a/0"] = 1

    async def held(client: Any, text: str, *arguments: Any) -> Any:
        if text == reserve.MEET:
            await go.wait()
        return await run_script(client, text, *arguments)

    monkeypatch.setattr(reserve, "run_script", held)
    book.meet_at = 0.0
    await until(lambda: book.busy)
    reserving = asyncio.create_task(one.reserve("fp", PLACES[:1] * 2, bids(0.0, 0.0, work=LONG)))
    await WallClock().sleep(0.05)
    go.set()
    assert await reserving is not None
    with server.client as client:
        assert int(client.hget(book.own, "a/0") or 0) > 1


def test_what_redis_holds_is_known_though_clocks_turn_out_to_be_others() -> None:
    """And though a command has failed, of which nobody knows whether it was done: else what was released
    stays there for as long as it would have lasted."""
    now = 1000.0
    book = Book(Keys("bien", "fp"), "g", lambda: now)
    book.set_clock(int(1e9) - 400_000, 999.0)  # the first answer was long on its way: a bad reading
    book.add("a/0", us(LONG))
    book.told = dict(book.until)
    book.set_clock(int(1e9), 999.998)
    assert set(book.untold()) == {"a/0"}, "its time is another one now"
    book.remove("a/0", us(LONG))
    assert book.untold() == {"a/0": 0} and not book.quiet
    book.told = {"b/0": 1}
    book.unsure(["a/0"])
    assert book.untold() == {"a/0": 0, "b/0": 0} and not book.quiet
    book.told.update(book.untold())
    assert book.quiet
