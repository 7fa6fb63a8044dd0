"""The redis index over sentinels and clusters, with TLS and passwords: real servers, which fail over."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bien.core.clock import Clock, WallClock
from bien.core.errors import ResourceError, UserError
from bien.core.kv.events import KVEvent
from bien.core.providers import Context
from bien.core.worker.published import Keys
from bien.core.worker.redis_link import ask, close_redis, redis_client
from bien.core.worker.redis_url import read_redis_url
from bien.gateway.index import DurableIndex
from bien.gateway.testing.durable import DurableSuite, PublishingWorker, until
from bien.gateway.testing.index import make_chain, make_info
from bien.plugins.indexes.redis import RedisConfig
from bien.plugins.indexes.redis.index import RedisIndex
from tests.redis_process import redis_process
from tests.redis_servers import Cluster, cluster, free_port, replicated, wait

FAST = {"lease_seconds": 0.6, "poll_seconds": 0.005, "flush_seconds": 0.001, "timeout_seconds": 1.0}


def make(url: str, **parameters: object) -> RedisIndex:
    config = RedisConfig(url, **{**FAST, **parameters})  # type: ignore[arg-type]
    return RedisIndex(config, Context(clock=WallClock()))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinl://host/main", "did you mean 'redis\\+sentinel'"),
        ("redis+sentinel://host", "names no service"),
        ("redis+sentinel://host/main/zero", "'/zero' is not the number of a database"),
        ("redis+sentinel://host,me:hidden@/main", "names no host"),
        ("redis+cluster://host/1", "'1' is a database, and a cluster has none but 0"),
        ("redis+cluster://host?db=2", "'2' is a database"),
        ("redis+cluster://host?sentinel_password=hidden", "parameter 'sentinel_password'"),
        ("redis://host,other", "it names several hosts"),
    ],
)
def test_a_url_that_is_wrong_says_so_without_its_credentials(url: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as told:
        make(url)
    assert "hidden" not in str(told.value)


def test_urls_are_taken_apart() -> None:
    at = read_redis_url(
        "valkeys+sentinel://me:p%40ss@a,[::1]:7/main%20one/3?ssl_ca_certs=c.pem&sentinel_password=s%20p"
    )
    assert at.hosts == (("a", 26379), ("::1", 7)) and at.service == "main one"
    assert at.url == "rediss://me:p%40ss@a:26379/3?ssl_ca_certs=c.pem" and at.sentinel_user == (None, "s p")
    at = read_redis_url("redis+cluster://:p@a:1,b")
    assert at.hosts == (("a", 1), ("b", 6379)) and at.url == "redis://:p@a:1/" and at.kind == "cluster"


async def test_clients_get_what_the_url_says() -> None:
    url = (
        "rediss+sentinel://me:pw@a:1,b:2/main/3?ssl_ca_certs=c.pem&sentinel_username=it&sentinel_password=is"
    )
    client = redis_client(url, 0.5)
    pool = client.connection_pool
    theirs = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(k["host"], k["port"], k["username"], k["password"]) for k in theirs] == [
        ("a", 1, "it", "is"),
        ("b", 2, "it", "is"),
    ]
    own = pool.connection_kwargs
    assert (own["username"], own["password"], own["db"], own["socket_timeout"]) == ("me", "pw", 3, 0.5)
    for options, kind in ((own, pool.connection_class), *((k, None) for k in theirs)):
        assert options["ssl_ca_certs"] == "c.pem" and (kind is None or "SSL" in kind.__name__)
    await close_redis(client)
    client = redis_client("rediss+cluster://me:pw@a:1,b:2?ssl_ca_certs=c.pem", 0.5)
    nodes = client.nodes_manager.startup_nodes.values()
    assert {node.name for node in nodes} == {"a:1", "b:2"}
    for node in nodes:
        kept = node.connection_kwargs
        assert (kept["username"], kept["password"], kept["ssl_ca_certs"]) == ("me", "pw", "c.pem")
        assert "SSL" in node.connection_class.__name__
    await close_redis(client)


@pytest.fixture(scope="module")
def one_node() -> Iterator[Cluster]:
    with cluster() as servers:
        yield servers


class TestCluster(DurableSuite):
    """One node with all slots refuses a script whose keys lie in several of them just as three do."""

    rounds = 3

    @pytest.fixture(autouse=True)
    def _server(self, one_node: Cluster) -> None:
        with one_node.nodes[0].client as client:
            client.flushall()
        self.url = one_node.url

    def build(self, clock: Clock) -> DurableIndex:
        return make(self.url)


async def test_a_single_server_is_no_cluster() -> None:
    with redis_process("--port", str(port := free_port())):
        with pytest.raises(ResourceError, match="no node of a cluster"):
            await make(f"redis+cluster://127.0.0.1:{port}").start()


async def failed_over(url: str, fail: object, *, tell: int = 6) -> None:
    """A worker and two gateways' indexes live through it; a third that comes then finds all."""
    blocks = make_chain("x", 30)
    followed, joined = make(url), make(url)
    for index in (followed, joined):
        await index.start()
    worker = PublishingWorker(joined.publication, make_info())
    followed.follow(worker.info)
    joined.join(worker.info)
    said = 0

    def say(count: int) -> None:
        nonlocal said
        for n in range(said, said + count):
            batch = worker.tell(KVEvent("stored", 0, blocks[n - 1] if n else b"", blocks[n]))
            assert joined.apply(batch)
        said += count

    def usable(index: RedisIndex) -> int:
        return index.overlaps(b"".join(blocks), [("w", 0)])[0]

    say(tell)
    await until(lambda: usable(followed) == tell and joined.leased == 1)
    fail()  # type: ignore[operator]
    say(tell)
    assert usable(joined) == 2 * tell, "the mirror goes on"
    await until(lambda: joined.health.state != "ok", "it is noticed")
    await until(lambda: joined.health.state == "ok" and joined.leased == 1, "and heals")
    say(tell)
    await until(lambda: usable(followed) == 3 * tell, f"{usable(followed)} of {said} blocks")
    late = make(url)
    await late.start()
    late.join(worker.info)
    async with asyncio.timeout(20):
        while not await late.restore("w", 0):
            await WallClock().sleep(0.01)
    assert usable(late) == 3 * tell
    await worker.close()
    for index in (followed, joined, late):
        await index.stop()
        index.close()


async def test_a_primary_that_dies_is_followed_by_its_replica() -> None:
    with replicated(password="right") as servers:

        def fail() -> None:
            wait(servers.caught_up, "the replica is behind")
            servers.primary.stop()

        await failed_over(servers.url, fail)
        assert servers.promoted()
        with pytest.raises(ResourceError, match="refuses these credentials") as told:
            await make(servers.url.replace(":right@", ":wrong@")).start()
        assert "wrong" not in str(told.value)
        with pytest.raises(ResourceError, match="no sentinel names a working primary"):
            await make(servers.url.replace("/main/", "/other/")).start()


async def test_a_cluster_whose_node_dies_goes_on_with_its_replica() -> None:
    with cluster(1, 1) as servers:
        await failed_over(servers.url, servers.fail_over)


@pytest.mark.slow
async def test_a_cluster_of_three_fails_over_by_itself() -> None:
    with cluster(3, 3) as servers:
        with servers.nodes[0].client as client:
            slot = client.execute_command("CLUSTER", "KEYSLOT", Keys("bien", "fp").events)
        assert slot >= 0
        owner = servers.nodes[3 * slot // 16384]
        refused = set()
        for place in servers.url.partition("//")[2].split(",")[:3]:
            try:
                index = make(f"redis://{place}")
                await index.start()
                await index.stop()
            except ResourceError as error:
                refused.add("give redis+cluster://" in str(error))
        assert refused == {True}
        await failed_over(servers.url, owner.stop)


async def test_what_a_replica_had_not_got_is_published_again() -> None:
    """The copy that takes over is older than what the worker has written: others find a whole start all the
    same, though nothing changes any more that would make a snapshot due."""
    blocks, keys = make_chain("x", 30), Keys("bien", "fp")
    with redis_process() as server:
        index = make(server.url)
        await index.start()
        worker = PublishingWorker(index.publication, make_info())
        rank = worker.publisher.ranks[0]
        worker.tell(KVEvent("stored", 0, b"", blocks[0]))
        await until(lambda: rank.seq == 1 and rank.snapshot_at not in ("", "0-0"))
        with server.client as client:
            length = client.xlen(keys.events)
            for n in range(1, 9):
                worker.tell(KVEvent("stored", 0, blocks[n - 1], blocks[n]))
            await until(lambda: rank.seq == 9)
            asked = worker.asked
            client.xdel(keys.events, *(id for id, _ in client.xrange(keys.events)[length:]))
            client.hset(keys.lease("w"), "seq", 1)
            client.client_kill_filter(_type="normal", skipme=True)
            await until(lambda: worker.asked > asked and bool(rank.snapshot_at), "it writes a new snapshot")
        index.join(worker.info)
        assert await index.restore("w", 0)
        assert index.overlaps(b"".join(blocks), [("w", 0)]) == [9]
        await worker.close()
        await index.stop()
        index.close()


@asynccontextmanager
async def tls_before(socket: str, folder: Path) -> AsyncIterator[int]:
    """A port that speaks TLS for a server that does not."""
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
            ),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        below, above = await asyncio.open_unix_connection(socket)
        await asyncio.gather(copy(reader, above), copy(below, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_tls_is_spoken_and_checked(tmp_path: Path) -> None:
    with redis_process("--requirepass", "right") as server:
        async with tls_before(server.url.removeprefix("unix://"), tmp_path) as port:
            at = f"rediss://:right@localhost:{port}/0"
            client = redis_client(f"{at}?ssl_ca_certs={tmp_path / 'cert.pem'}", 2.0)
            assert await ask(client.ping())
            await close_redis(client)
            with pytest.raises(ResourceError, match="certificate"):
                await make(at).start()
