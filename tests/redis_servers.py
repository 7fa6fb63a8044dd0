"""Real servers of Redis for tests that need more than one: with a replica and sentinels, or a cluster."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import redis

from tests.redis_process import RedisProcess, redis_process

PATIENCE = 30.0
BUS = 10000  # a cluster's nodes talk at their port plus this


def free_port() -> int:
    """One that is free, and the one of a cluster's bus as well."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + BUS))
            except (OSError, OverflowError):
                continue
            return port


def wait(condition: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


class Replicated:
    """A primary, its replica, and a sentinel that puts the one in the other's place."""

    def __init__(self, primary: RedisProcess, replica: RedisProcess, url: str) -> None:
        self.primary = primary
        self.replica = replica
        self.url = url

    def caught_up(self) -> bool:
        with self.primary.client as one, self.replica.client as other:
            offset: int = one.info("replication")["master_repl_offset"]
            return bool(other.info("replication")["master_repl_offset"] >= offset)

    def promoted(self) -> bool:
        with self.replica.client as other:
            return bool(other.info("replication")["role"] == "master")


@contextmanager
def replicated(*, password: str = "", down_ms: int = 300) -> Iterator[Replicated]:
    ports = [free_port() for _ in range(3)]
    auth = ("--requirepass", password, "--masterauth", password) if password else ()
    fast = (
        "--repl-diskless-sync",
        "yes",
        "--repl-diskless-sync-delay",
        "0",
        "--repl-ping-replica-period",
        "1",
    )
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        fast += ("--dir", folder)
        primary = opened.enter_context(redis_process("--port", str(ports[0]), *fast, *auth))
        of = ("--replicaof", "127.0.0.1", str(ports[0]))
        replica = opened.enter_context(redis_process("--port", str(ports[1]), *fast, *of, *auth))
        file = Path(folder) / "sentinel.conf"
        lines = [
            f"port {ports[2]}",
            f"sentinel monitor main 127.0.0.1 {ports[0]} 1",
            f"sentinel down-after-milliseconds main {down_ms}",
            "sentinel failover-timeout main 3000",
        ]
        if password:
            lines.append(f"sentinel auth-pass main {password}")
        file.write_text("\n".join(lines) + "\n")
        sentinel = opened.enter_context(redis_process(config=file))
        with replica.client as client:
            wait(lambda: client.info("replication")["master_link_status"] == "up", "no replica")
        with sentinel.client as client:
            wait(lambda: client.sentinel_masters()["main"]["num-slaves"] == 1, "no replica is known")
        login = f":{password}@" if password else ""
        yield Replicated(primary, replica, f"redis+sentinel://{login}127.0.0.1:1,127.0.0.1:{ports[2]}/main/0")


class Cluster:
    def __init__(self, nodes: list[RedisProcess], url: str) -> None:
        self.nodes = nodes
        self.url = url

    def fail_over(self) -> None:
        """The first node is killed, its replica (the last) takes its slots. By itself it would with three
        primaries, of which two can vote."""
        self.nodes[0].stop()
        with self.nodes[-1].client as client:
            client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")


@contextmanager
def cluster(primaries: int = 1, replicas: int = 0) -> Iterator[Cluster]:
    """So many primaries, which share the slots; replicas are spread over them."""
    ports = [free_port() for _ in range(primaries + replicas)]
    with ExitStack() as opened:
        nodes = []
        for port in ports:
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            options = ("--port", str(port), "--dir", folder, "--cluster-enabled", "yes")
            nodes.append(opened.enter_context(redis_process(*options, "--cluster-node-timeout", "500")))
        first = nodes[0].client
        bounds = [16384 * n // primaries for n in range(primaries + 1)]
        for n in range(primaries):
            with nodes[n].client as client:
                slots = map(str, range(bounds[n], bounds[n + 1]))
                client.execute_command("CLUSTER", "ADDSLOTS", *slots)
        for n, port in enumerate(ports[1:], 1):
            with nodes[n].client as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", str(n + 1))
            first.execute_command("CLUSTER", "MEET", "127.0.0.1", str(port))
        for n, node in enumerate(nodes[primaries:]):
            with node.client as client, nodes[n % primaries].client as its:
                id = its.execute_command("CLUSTER", "MYID").decode()
                wait(partial(_knows, client, id), "they do not meet")
                client.execute_command("CLUSTER", "REPLICATE", id)
                wait(partial(_replicates, client), "no replica")
        for node in nodes:
            with node.client as client:
                wait(partial(_whole, client, len(nodes)), "the cluster does not come up")
        first.close()
        yield Cluster(nodes, "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports))


def _knows(client: redis.Redis, id: str) -> bool:
    return id in str(client.execute_command("CLUSTER", "NODES"))


def _replicates(client: redis.Redis) -> bool:
    return bool(client.info("replication")["master_link_status"] == "up")


def _whole(client: redis.Redis, nodes: int) -> bool:
    info = client.cluster("info")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == nodes
