from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from bien.core.clock import Clock, WallClock
from bien.core.errors import BienError, ResourceError, UserError
from bien.core.kv.events import KVEvent
from bien.core.providers import Context
from bien.core.worker.messages import Snapshot
from bien.core.worker.published import Keys, write_snapshot
from bien.gateway.index import DurableIndex, KVIndex
from bien.gateway.testing.durable import DurableSuite, History, PublishingWorker, until
from bien.gateway.testing.index import IndexSuite, make_chain, make_info
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.indexes.redis import RedisConfig, bien_providers
from bien.plugins.indexes.redis.index import RedisIndex
from tests.redis_process import RedisProcess, redis_process

FAST = {"lease_seconds": 0.6, "poll_seconds": 0.005, "flush_seconds": 0.001, "timeout_seconds": 1.0}


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisProcess]:
    with redis_process() as server:
        yield server


@pytest.fixture
def server(shared: RedisProcess) -> RedisProcess:
    with shared.client as client:
        client.flushall()
    return shared


def make(url: str, **parameters: object) -> RedisIndex:
    config = RedisConfig(url, **{**FAST, **parameters})  # type: ignore[arg-type]
    return RedisIndex(config, Context(clock=WallClock()))


class TestMirror(IndexSuite):
    """Fed by frames it is the memory index, whether there is a Redis or not."""

    def build(self, clock: Clock) -> KVIndex:
        return RedisIndex(RedisConfig("redis://127.0.0.1:1/0"), Context(clock=clock))


class TestStore(DurableSuite):
    @pytest.fixture(autouse=True)
    def _server(self, server: RedisProcess) -> None:
        self.url = server.url

    def build(self, clock: Clock) -> DurableIndex:
        return RedisIndex(RedisConfig(self.url, **FAST), Context(clock=clock))  # type: ignore[arg-type]


async def started(url: str, **parameters: object) -> RedisIndex:
    index = make(url, **parameters)
    await index.start()
    return index


async def end(index: RedisIndex, *workers: PublishingWorker) -> None:
    for worker in workers:
        await worker.close()
    await index.stop()
    index.close()


def usable(index: KVIndex, blocks: list[bytes], worker: str = "w") -> int:
    return index.overlaps(b"".join(blocks), [(worker, 0)])[0]


def stored(blocks: list[bytes], parent: bytes = b"") -> KVEvent:
    return KVEvent("stored", parent=parent, hashes=b"".join(blocks))


def test_the_provider_builds_it() -> None:
    (provider,) = bien_providers()
    assert (provider.kind, provider.name) == ("kv_index", "redis")
    made = provider.factory(RedisConfig(), Context(clock=WallClock()))
    assert isinstance(made, DurableIndex)
    with pytest.raises(UserError, match="'embedded', and nothing has started a server"):
        provider.factory(RedisConfig("embedded"), Context(clock=WallClock()))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:6379", r"valid: redis, redis\+cluster, redis\+sentinel, rediss"),
        ("127.0.0.1:6379", "valid: redis"),
        ("rdis://me:hidden@host/0", "did you mean 'redis'"),
        ("redis://me:hidden@host:six/0", "no URL of a Redis"),
        ("redis://", "names no host"),
        ("redis://me:hidden@host/zero", "'/zero' is not the number of a database"),
        ("unix://", "names no socket"),
        ("redis://host/0?pasword=hidden", "parameter 'pasword'.*did you mean 'password'"),
    ],
)
def test_a_url_that_is_wrong_says_so_without_its_credentials(url: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as told:
        make(url)
    assert "hidden" not in str(told.value)


@pytest.mark.parametrize("seed", [3, 4])
async def test_streams_and_frames_say_the_same(server: RedisProcess, seed: int) -> None:
    """Random histories of several workers at once, with lost batches, new lives and lost leases: an index
    that sees Redis only comes to what the memory index knows, which is fed by every batch."""
    rng = random.Random(seed)
    blocks = make_chain("histories", 9)
    index, memory = await started(server.url), MemoryIndex(WallClock())
    lives: dict[str, int] = {}
    workers: dict[str, tuple[PublishingWorker, History]] = {}
    ended: list[PublishingWorker] = []

    def born(id: str) -> None:
        lives[id] = lives.get(id, 0) + 1
        history = History(rng, blocks)
        info = make_info(id, history.kinds, history.windows, str(lives[id]))
        workers[id] = PublishingWorker(index.publication, info), history
        memory.join(info)

    for id in "abc":
        born(id)
        index.follow(workers[id][0].info)
    for n in range(150):
        id = rng.choice("abc")
        worker, history = workers[id]
        match rng.choices(["change", "lose", "die", "silence"], [90, 5, 3, 2])[0]:
            case "die":
                await worker.kill()
                ended.append(worker)
                born(id)
            case "silence":
                with server.client as client:
                    client.delete(Keys("bien", "fp").lease(id))
            case how:
                batch = worker.tell(history.change(), lose=how == "lose")
                if how == "lose":
                    worker.publisher.ranks[0].snapshot_at = ""  # as a publisher does that had to drop batches
                memory.apply(batch)
        if n % 10 == 0:
            await WallClock().sleep(0.01)
    expected = {id: history.usable for id, (_, history) in workers.items()}
    assert {id: usable(memory, blocks, id) for id in expected} == expected
    await until(
        lambda: {id: usable(index, blocks, id) for id in expected} == expected,
        f"{[usable(index, blocks, id) for id in expected]} is not {expected}",
    )
    assert index.undecodable == 0  # how often it had to look anew depends on how fast it was
    for worker in ended:
        await worker.close()
    await end(index, *(worker for worker, _ in workers.values()))


async def test_a_lease_that_ends_takes_the_cache_of_a_followed_worker_along(server: RedisProcess) -> None:
    blocks = make_chain("x", 5)
    index = await started(server.url)
    worker = PublishingWorker(index.publication, make_info())
    index.follow(worker.info)
    worker.tell(stored(blocks))
    await until(lambda: usable(index, blocks) == 5)
    await worker.kill()
    await until(lambda: usable(index, blocks) == 0)
    assert index.lost_leases == 1 and index.leased == 0
    await end(index, worker)


async def test_a_connected_worker_keeps_its_mirror_when_redis_forgets(server: RedisProcess) -> None:
    blocks = make_chain("x", 9)
    index = await started(server.url)
    worker = PublishingWorker(index.publication, make_info())
    index.join(worker.info)
    assert index.apply(worker.tell(stored(blocks[:4])))
    await until(lambda: index.leased == 1)
    with server.client as client:
        client.flushall()
    assert index.apply(worker.tell(stored(blocks[4:6], blocks[3])))
    assert usable(index, blocks) == 6
    again = await started(server.url)
    again.join(worker.info)

    async def restored() -> bool:
        return await again.restore("w", 0)

    async with asyncio.timeout(20):
        while not await restored():
            await WallClock().sleep(0.01)
    assert usable(again, blocks) == usable(index, blocks) == 6, "it has published all that it holds anew"
    await end(again)
    await end(index, worker)


async def test_a_connected_worker_that_has_fallen_silent_is_caught_up_with(server: RedisProcess) -> None:
    """Frames were lost on the way to us and no other follows that would tell; nor is the store whole at
    first."""
    blocks = make_chain("x", 5)
    index = await started(server.url)
    worker = PublishingWorker(index.publication, make_info())
    index.join(worker.info)
    assert index.apply(worker.tell(stored(blocks[:1])))
    await until(lambda: index.leased == 1 and worker.publisher.ranks[0].snapshot_at not in ("", "0-0"))
    worker.tell(stored(blocks[1:2], blocks[0]), lose=True)
    worker.tell(stored(blocks[2:4], blocks[1]))
    await until(lambda: index._watched["w"].published == (3,))
    await WallClock().sleep(0.3)
    assert usable(index, blocks) == 1 and index.restores == 0, "a batch is missing everywhere"
    worker.publisher.ranks[0].snapshot_at = ""  # the next snapshot has it
    worker.publisher._wake.set()
    await until(lambda: usable(index, blocks) == 4)
    assert index.restores == 1
    await end(index, worker)


async def test_it_is_away_until_it_answers(server: RedisProcess) -> None:
    """Also where there is no worker to look after."""
    with redis_process() as own:
        index = await started(own.url, timeout_seconds=0.1)
        await until(lambda: index._check_at > 0)
        own.freeze()
        assert await index.leases() == []
        for _ in range(20):
            await WallClock().sleep(0.01)
            assert index.health.state == "away"
        own.thaw()
        await until(lambda: index.health.state == "ok")
        await end(index)


async def test_an_outage_is_survived_and_said(server: RedisProcess) -> None:
    """Frozen, so that commands hang, then gone, then back and empty."""
    blocks = make_chain("x", 9)
    with redis_process() as own:
        index = await started(own.url, timeout_seconds=0.2)
        worker = PublishingWorker(index.publication, make_info())
        index.join(worker.info)
        assert index.apply(worker.tell(stored(blocks[:2])))
        await until(lambda: index.leased == 1 and worker.publisher.ranks[0].seq == 1)
        assert index.health.state == "ok"

        own.freeze()
        assert index.apply(worker.tell(stored(blocks[2:4], blocks[1])))
        await until(lambda: index.health.state == "away")
        assert "no answer in time" in index.health.reason and own.url in index.health.reason
        assert usable(index, blocks) == 4 and index.failures > 0
        assert not await index.restore("w", 0), "in bounded time"
        own.thaw()
        await until(lambda: index.health.state == "ok" and worker.publisher.ranks[0].seq == 2)

        own.stop()
        assert index.apply(worker.tell(stored(blocks[4:6], blocks[3])))
        await until(lambda: index.health.state == "away")
        assert index.apply(worker.tell(stored(blocks[6:7], blocks[5])))
        assert usable(index, blocks) == 7
        own.start()  # it comes back empty
        await until(lambda: index.health.state == "ok" and index.leased == 1)
        again = await started(own.url)
        again.join(worker.info)
        async with asyncio.timeout(20):
            while not await again.restore("w", 0):
                await WallClock().sleep(0.01)
        assert usable(again, blocks) == 7
        assert worker.publisher.failures > 0
        await end(again)
        await end(index, worker)


async def test_what_a_long_outage_drops_a_snapshot_brings_back(
    server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bien.core.worker.publisher.MAX_KEPT", 1000)
    blocks = make_chain("x", 200)
    with redis_process() as own:
        index = await started(own.url, timeout_seconds=0.2)
        worker = PublishingWorker(index.publication, make_info())
        index.follow(worker.info)
        worker.tell(stored(blocks[:1]))
        await until(lambda: usable(index, blocks) == 1)
        own.freeze()
        for n in range(1, 200):
            worker.tell(stored(blocks[n : n + 1], blocks[n - 1]))
        assert worker.publisher.dropped > 100 and worker.publisher._kept_bytes <= 1000
        own.thaw()
        await until(lambda: usable(index, blocks) == 200)
        await end(index, worker)


@pytest.mark.parametrize("at", ["-5-3", "5--3", "99999999999999999999-0", "1_0-0", " 1-0"])
async def test_a_snapshot_that_is_nowhere_in_the_stream_stops_no_other(server: RedisProcess, at: str) -> None:
    """Redis would refuse the command, and it is the same for all that are read at once."""
    keys, blocks = Keys("bien", "fp"), make_chain("x", 3)
    index = await started(server.url)
    workers = [PublishingWorker(index.publication, make_info(id)) for id in ("a", "b")]
    for worker in workers:
        worker.tell(stored(blocks))
    with server.client as client:
        await until(lambda: client.hlen(keys.snapshot("a")) and client.hlen(keys.snapshot("b")))
        generation = workers[0].info.generation
        for worker in workers:
            worker.publisher.ranks[0].snapshot_at = "z"  # it writes no other
        client.hset(keys.snapshot("b"), "0", write_snapshot(Snapshot(generation, 1), at))
    for worker in workers:
        index.join(worker.info)
    found = await asyncio.gather(index.restore("a", 0), index.restore("b", 0))
    assert found == [True, False] and index.up and usable(index, blocks, "a") == 3
    await end(index, *workers)


async def test_what_others_have_put_there_is_left_out_and_said(
    server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    keys, blocks = Keys("bien", "fp"), make_chain("x", 9)
    index = await started(server.url)
    worker = PublishingWorker(index.publication, make_info())
    index.follow(worker.info)
    worker.tell(stored(blocks[:3]))
    await until(lambda: usable(index, blocks) == 3 and index.leased == 1)
    garbage = [b"", b"\xc1", b"\xff" * 50, b"{}", b"\x80", bytes(range(256))]
    with server.client as client:
        for data in garbage:
            client.xadd(keys.events, {"d": data})
        client.xadd(keys.events, {"other": "field"})
        client.hset(keys.snapshot("w"), "0", b"\xc1garbage")
        client.hset(keys.lease("stranger"), mapping={"v": "99", "generation": "x"})
        client.zadd(keys.workers, {"stranger": 1e15, b"\xff\xfe": 1e15})
        deep = {"v": "1", "generation": "x", "endpoint": "h:1", "info": "[" * 60_000, "seq": "0"}
        client.hset(keys.lease("deep"), mapping=deep)
        client.zadd(keys.workers, {"deep": 1e15})
        client.set(keys.lease("wrong type"), "text")
        client.zadd(keys.workers, {"wrong type": 1e15})
    await until(lambda: index.undecodable >= len(garbage) + 1)
    assert [lease.info.id for lease in await index.leases()] == ["w"]
    assert index.undecodable >= len(garbage) + 4
    for name in ("stranger", "deep", "wrong type"):
        assert f"worker:{name}:" in caplog.text
    assert not await index.restore("w", 0)
    assert index.health.state == "degraded" and "found" in index.health.reason
    assert usable(index, blocks) == 3
    worker.publisher.ranks[0].snapshot_at = ""
    worker.tell(stored(blocks[3:5], blocks[2]))
    async with asyncio.timeout(20):
        while not await index.restore("w", 0):
            await WallClock().sleep(0.01)
    await until(lambda: usable(index, blocks) == 5)
    await end(index, worker)


async def test_a_key_of_another_type_is_a_fault_that_is_said_and_heals(server: RedisProcess) -> None:
    keys, blocks = Keys("bien", "fp"), make_chain("x", 4)
    with server.client as client:
        client.set(keys.events, "somebody's text")
        index = await started(server.url)
        worker = PublishingWorker(index.publication, make_info())
        index.join(worker.info)
        assert index.apply(worker.tell(stored(blocks)))
        await until(lambda: "a key of ours holds something else" in index.health.reason)
        assert usable(index, blocks) == 4
        client.delete(keys.events)
    await until(lambda: index.health.state == "ok" and worker.publisher.ranks[0].seq == 1)
    await end(index, worker)


async def test_what_redis_holds_is_bounded(server: RedisProcess) -> None:
    """Entries by count and by bytes; a snapshot that is too large is none; and everything expires."""
    keys, blocks = Keys("bien", "fp"), make_chain("x", 400)
    index = await started(server.url, stream_entries=16, stream_bytes=65536, snapshot_bytes=65536)
    worker = PublishingWorker(index.publication, make_info())
    index.join(worker.info)
    with server.client as client:
        for n in range(200):
            worker.tell(KVEvent("stored", hashes=b"".join(blocks)), KVEvent("cleared"))
            if n % 3 == 0:
                await until(lambda: worker.publisher.ranks[0].seq == worker.seq)
        await until(lambda: client.xlen(keys.events) < 150 and client.memory_usage(keys.events) < 2 * 65536)
        large = [b for n in range(20) for b in make_chain(f"large {n}", 400)]
        worker.tell(KVEvent("stored", hashes=b"".join(large)))
        worker.publisher.ranks[0].snapshot_at = ""
        await until(lambda: "larger than 65536" in worker.publisher._warned)
        await until(lambda: not client.hexists(keys.snapshot("w"), "0"))
        assert not await index.restore("w", 0)
        await worker.kill()
        assert all(client.pttl(key) > 0 for key in client.keys("*"))
    await end(index, worker)


async def test_who_may_not_enter_is_told(server: RedisProcess) -> None:
    with redis_process("--requirepass", "right") as guarded:
        path = guarded.url.removeprefix("unix://")
        with pytest.raises(ResourceError, match="refuses these credentials"):
            await started(guarded.url)
        with pytest.raises(ResourceError, match="refuses these credentials") as told:
            await started(f"unix://:wrong-password@{path}")
        assert "wrong-password" not in str(told.value)
        index = await started(f"unix://:right@{path}")
        await end(index)


async def test_what_is_no_redis_is_told() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    for handler, why in ((answer, "is no Redis"), (say_nothing, "no answer in time")):
        listening = await asyncio.start_server(handler, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(BienError, match=why):
            await started(f"redis://127.0.0.1:{port}/0", timeout_seconds=0.2)
        listening.close()


async def test_without_redis_at_the_start_it_can_go_on_with_the_mirror() -> None:
    index = await started("redis://127.0.0.1:1/0", on_failure="mirror")
    worker = PublishingWorker(index.publication, make_info())
    index.join(worker.info)
    assert index.health.state == "away" and await index.leases() == []
    assert index.apply(worker.tell(stored(make_chain("x", 3))))
    assert usable(index, make_chain("x", 3)) == 3
    await end(index, worker)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (("--replicaof", "127.0.0.1", "1"), "it is a replica; give the primary"),
        (("--maxmemory", "1"), "it is full; raise its maxmemory"),
        (("--min-replicas-to-write", "1"), "too few replicas"),
    ],
)
async def test_a_server_that_takes_no_writes_is_refused_with_advice(
    options: tuple[str, ...], advice: str
) -> None:
    with redis_process(*options) as own:
        with pytest.raises(ResourceError, match=advice):
            await started(own.url)
        index = await started(own.url, on_failure="mirror")
        assert index.health.state == "away" and advice in index.health.reason
        await end(index)


async def test_the_probe_leaves_nothing(server: RedisProcess) -> None:
    index = await started(server.url)
    with server.client as client:
        assert client.keys("*") == []
    await end(index)
