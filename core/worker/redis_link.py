"""Redis or Valkey as bien uses it: a client that never waits for long, errors that say what is wrong.

Plain commands and plain Lua of Redis 6.2, on one server, on the primary that sentinels name, or on a cluster,
in which every command and script has its keys in one slot. The library is imported where a client is made.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from bien.core.worker.redis_url import RedisUrl, masked, read_redis_url

T = TypeVar("T")
_shas: dict[str, str] = {}  # of scripts, by their text
_IN_SCRIPT = re.compile(r".*?: -([A-Z]+) ", re.DOTALL)
# What a person can do about it, by the kind of error.
ADVICE = {
    "READONLY": "it is a replica; give the primary",
    "OOM": "it is full; raise its maxmemory",
    "NOREPLICAS": "it writes nothing while too few replicas are there (its min-replicas-to-write)",
    "MISCONF": "it writes nothing since it cannot save to its disk; mend that, or see its "
    "stop-writes-on-bgsave-error",
    "WRONGTYPE": "a key of ours holds something else; give a namespace of its own",
}


def redis_client(url: str, timeout: float) -> Any:
    """A `redis.asyncio.Redis`, or, of a cluster, a `RedisCluster`: one of its own, not connected yet; the
    caller awaits `close_redis` of it. No command takes longer than `timeout` seconds, nor, where a primary or
    the nodes of a cluster are to be found first, does any server that is asked for them; none is tried again
    by itself. UserError: `read_redis_url`."""
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    at = read_redis_url(url)
    shared: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if at.kind == "single":
        return Redis.from_url(at.url, **shared)
    return _sentinel(at, shared) if at.kind == "sentinel" else _cluster(at, shared)


async def close_redis(client: Any) -> None:
    """End its connections, those to sentinels too."""
    await ask(client.aclose())
    if (nodes := getattr(client, "nodes_manager", None)) is not None:
        # A client whose last command failed counts as closed, and is not.
        await ask(nodes.aclose())
        await ask(nodes.aclose("startup_nodes"))
        return
    sentinel = getattr(client.connection_pool, "sentinel_manager", None)
    for one in () if sentinel is None else sentinel.sentinels:
        await ask(one.aclose())


async def ask(command: Awaitable[T]) -> T:
    """The answer to a command. Await nothing of a client without this: redis-py 8 mostly goes on when it is
    cancelled as if it was not, and whoever wanted its end would wait for ever."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await command
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def run_script(client: Any, text: str, keys: Sequence[str], *arguments: Any) -> Any:
    """The answer of a Lua script whose keys are all in `keys`, in one slot. Servers keep scripts; one that
    does not have it yet is sent the text."""
    from redis.exceptions import NoScriptError

    sha = _shas.get(text)
    if sha is None:
        sha = _shas[text] = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    try:
        return await ask(client.evalsha(sha, len(keys), *keys, *arguments))
    except NoScriptError:
        return await ask(client.eval(text, len(keys), *keys, *arguments))


def redis_trouble() -> tuple[type[Exception], ...]:
    """What a command of a client may raise when the server, or what it holds, is at fault."""
    from redis.exceptions import RedisClusterException, RedisError

    return RedisError, RedisClusterException, OSError, TimeoutError, UnicodeError


def explained(error: BaseException) -> str:
    """One line, without credentials, that says what a person can do about it."""
    from redis import exceptions as kinds
    from redis.asyncio.sentinel import MasterNotFoundError

    text = masked(str(error) or type(error).__name__).rstrip(".")
    code = _code(error)
    if isinstance(error, MasterNotFoundError):
        return f"no sentinel names a working primary of this service ({text.partition(' : ')[0]})"
    refused = any(isinstance(e, kinds.AuthenticationError) for e in (error, error.__cause__))
    if refused or code in ("NOAUTH", "WRONGPASS", "NOPERM"):
        return f"it refuses these credentials ({text})"
    if isinstance(error, (kinds.TimeoutError, TimeoutError)):
        return f"no answer in time ({text})"
    if isinstance(error, (kinds.InvalidResponse, UnicodeError)):
        return f"what answers there is no Redis ({text})"
    if isinstance(error, (kinds.AskError, kinds.ClusterCrossSlotError)):  # the first is "moved", too
        return f"it is a node of a cluster; give redis+cluster://… ({text})"
    if "Cluster mode is not enabled" in text or "cluster support disabled" in text:
        return f"it is no node of a cluster; give redis://… ({text})"
    if (advice := ADVICE.get(code)) is not None:
        return f"{advice} ({text})"
    return text


def _code(error: BaseException) -> str:
    """What kind of error a server says it is: its first word. The library takes that out of those that it
    knows, and servers before 7 put the error of a command in a script behind where that was."""
    from redis import exceptions as kinds

    known = {
        kinds.ReadOnlyError: "READONLY",
        kinds.OutOfMemoryError: "OOM",
        kinds.NoPermissionError: "NOPERM",
    }
    for kind, code in known.items():
        if isinstance(error, kind):
            return code
    text = str(error)
    inner = _IN_SCRIPT.match(text) if text.startswith("Error running script") else None
    return inner.group(1) if inner is not None else text.partition(" ")[0]


def _options(at: RedisUrl, shared: dict[str, Any]) -> dict[str, Any]:
    """What the URL says beside host and port, as keywords."""
    from redis.asyncio.connection import SSLConnection, parse_url

    options: dict[str, Any] = {**parse_url(at.url), **shared}
    for name in ("host", "port"):
        options.pop(name, None)
    if options.pop("connection_class", None) is SSLConnection:
        options["ssl"] = True
    return options


def _sentinel(at: RedisUrl, shared: dict[str, Any]) -> Any:
    from redis.asyncio.sentinel import Sentinel

    options = _options(at, shared)
    name, password = at.sentinel_user
    theirs = {key: value for key, value in options.items() if key in shared or key.startswith("ssl")}
    theirs |= {"username": name, "password": password}
    manager = Sentinel(list(at.hosts), sentinel_kwargs=theirs, **options)  # type: ignore[no-untyped-call]
    return manager.master_for(at.service)


def _cluster(at: RedisUrl, shared: dict[str, Any]) -> Any:
    from redis.asyncio.cluster import ClusterNode, RedisCluster

    options = _options(at, shared)
    options.pop("db", None)
    nodes = [ClusterNode(host, port) for host, port in at.hosts]
    # A namespace lives in a few slots: it does not matter here what has become of the others.
    return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
