"""Redis or Valkey as bien uses it: URLs, a client that never waits for long, errors that say what is wrong.

Plain commands and plain Lua of Redis 6.2; the library is imported where a client is made.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, urlsplit

from bien.core.errors import UserError, nearest

if TYPE_CHECKING:
    from redis.asyncio import Redis

T = TypeVar("T")
SCHEMES = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
QUERY = ("db", "password", "username", "ssl_ca_certs", "ssl_certfile", "ssl_cert_reqs", "ssl_keyfile")
EXAMPLE = "redis://[[user]:password@]host:6379/0, rediss://… (TLS), unix:///path/to.sock, valkey://…"
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")
_QUERY = re.compile(r"([?&](?!ssl_|db=|username=)[^=&\s]*=)[^&\s]*")  # a password, under whatever name


def masked(text: str) -> str:
    """The text without the credentials of any URL in it."""
    return _QUERY.sub(r"\1***", _CREDENTIALS.sub("***@", text)) if "://" in text else text


def check_redis_url(url: str) -> None:
    """UserError, without its credentials, for a URL that names no server."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _bad(url, str(error)) from None
    if parts.scheme not in SCHEMES:
        raise _bad(url, nearest(parts.scheme, SCHEMES))
    if parts.scheme == "unix":
        if not parts.path:
            raise _bad(url, "it names no socket")
    elif not parts.hostname or port == 0:
        raise _bad(url, "it names no host and port")
    elif not re.fullmatch(r"/?\d*", parts.path):
        raise _bad(url, f"{parts.path!r} is not the number of a database")
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in QUERY:
            raise _bad(url, f"parameter {name!r}: {nearest(name, QUERY)}")


def redis_client(url: str, timeout: float) -> Redis:
    """A client of its own, not connected yet; the caller awaits its `aclose`. No command takes longer than
    `timeout` seconds, none is tried again by itself. UserError: `check_redis_url`."""
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    check_redis_url(url)
    scheme, rest = url.split("://", 1)
    client: Redis = Redis.from_url(
        f"{SCHEMES[scheme]}://{rest}",
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return client


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


def redis_trouble() -> tuple[type[Exception], ...]:
    """What a command of a client may raise when the server, or what it holds, is at fault."""
    from redis.exceptions import RedisError

    return RedisError, OSError, TimeoutError, UnicodeError


def explained(error: BaseException) -> str:
    """One line, without credentials, that says what a person can do about it."""
    from redis import exceptions as kinds

    text = masked(str(error) or type(error).__name__).rstrip(".")
    refused = any(isinstance(e, kinds.AuthenticationError) for e in (error, error.__cause__))
    if refused or text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
        return f"it refuses these credentials ({text})"
    if isinstance(error, (kinds.TimeoutError, TimeoutError)):
        return f"no answer in time ({text})"
    if isinstance(error, (kinds.InvalidResponse, UnicodeError)):
        return f"what answers there is no Redis ({text})"
    if text.startswith(("MOVED", "CROSSSLOT", "ASK ")):
        return f"it is a node of a cluster, which is not supported yet; give a single server ({text})"
    if text.startswith("READONLY"):
        return f"it is a replica; give the primary ({text})"
    if text.startswith("OOM"):
        return f"it is full; raise its maxmemory ({text})"
    if text.startswith("WRONGTYPE"):
        return f"a key of ours holds something else; give a namespace of its own ({text})"
    return text


def _bad(url: str, why: str) -> UserError:
    return UserError(f"{masked(url)!r} is no URL of a Redis: {masked(why)}; valid: {EXAMPLE}", field="url")
