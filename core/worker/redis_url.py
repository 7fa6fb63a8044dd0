"""URLs of Redis or Valkey: one server, the primary that sentinels name, or a cluster.

    redis://[[user]:password@]host[:6379][/db]
    redis+sentinel://[[user]:password@]host[:26379][,host…]/service[/db]
    redis+cluster://[[user]:password@]host[:6379][,host…]
    unix://[[user]:password@]/path/to.sock[?db=0]

`rediss` (TLS), `valkey` and `valkeys` stand for `redis` in each of the first three. With TLS, sentinels are
spoken to by TLS as well; their own credentials are `?sentinel_username=…&sentinel_password=…`.
"""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec

from bien.core.errors import UserError, nearest

Kind = Literal["single", "sentinel", "cluster"]
NAMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
SCHEMES = (*NAMES, "unix", *(f"{name}+{kind}" for kind in ("sentinel", "cluster") for name in NAMES))
QUERY = ("db", "password", "username", "ssl_ca_certs", "ssl_certfile", "ssl_cert_reqs", "ssl_keyfile")
SENTINEL_QUERY = ("sentinel_username", "sentinel_password")
EXAMPLE = (
    "redis://[[user]:password@]host:6379/0, rediss://… (TLS), unix:///path/to.sock, valkey://…, "
    "redis+sentinel://host:26379,host:26379/service/0, redis+cluster://host:6379,host:6379"
)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")
_QUERY = re.compile(r"([?&](?!ssl_|db=|username=)[^=&\s]*=)[^&\s]*")  # a password, under whatever name
_PORT = {"single": 6379, "sentinel": 26379, "cluster": 6379}


class RedisUrl(msgspec.Struct, frozen=True):
    """A URL, taken apart."""

    kind: Kind
    url: str  # as of one server: `redis`, `rediss` or `unix`, the first host
    hosts: tuple[tuple[str, int], ...] = ()  # servers, sentinels, or nodes of the cluster
    service: str = ""  # that sentinels look after
    sentinel_user: tuple[str | None, str | None] = (None, None)  # name and password


def masked(text: str) -> str:
    """The text without the credentials of any URL in it."""
    return _QUERY.sub(r"\1***", _CREDENTIALS.sub("***@", text)) if "://" in text else text


def check_redis_url(url: str) -> None:
    """UserError, without its credentials, for a URL that names no server."""
    read_redis_url(url)


def read_redis_url(url: str) -> RedisUrl:
    """UserError: `check_redis_url`."""
    scheme, _, rest = url.partition("://")
    if "://" not in url or scheme not in SCHEMES:
        scheme = scheme if "://" in url else url.partition(":")[0]
        raise _bad(url, nearest(scheme, SCHEMES))
    name, _, more = scheme.partition("+")
    kind: Kind = more or "single"  # type: ignore[assignment]
    known = QUERY + (SENTINEL_QUERY if kind == "sentinel" else ())
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True)
        hosts = () if name == "unix" else _hosts(parts.netloc, kind)
    except ValueError as error:
        raise _bad(url, str(error)) from None
    for parameter, _ in query:
        if parameter not in known:
            raise _bad(url, f"parameter {parameter!r}: {nearest(parameter, known)}")
    if name == "unix":
        if not parts.path:
            raise _bad(url, "it names no socket")
        return RedisUrl("single", f"unix://{rest}")
    service, db = _path(url, kind, parts.path)
    if kind == "cluster" and (db not in ("", "0") or dict(query).get("db", "0") != "0"):
        raise _bad(url, f"{db or dict(query)['db']!r} is a database, and a cluster has none but 0")
    asked = dict(query)
    user = asked.pop("sentinel_username", None), asked.pop("sentinel_password", None)
    login, at, _ = parts.netloc.rpartition("@")
    host, port = hosts[0]
    place = f"[{host}]:{port}" if ":" in host else f"{quote(host)}:{port}"
    one = f"{NAMES[name]}://{login}{at}{place}/{db}" + (f"?{urlencode(asked)}" if asked else "")
    return RedisUrl(kind, one, hosts, service, user)


def _hosts(netloc: str, kind: Kind) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for place in netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{place}")
        if not one.hostname or one.port == 0:
            raise ValueError("it names no host and port")
        found.append((unquote(one.hostname), one.port or _PORT[kind]))
    if kind == "single" and len(found) > 1:
        raise ValueError("it names several hosts; several are redis+sentinel:// or redis+cluster://")
    return tuple(found)


def _path(url: str, kind: Kind, path: str) -> tuple[str, str]:
    """Service and database."""
    service, db = "", path.removeprefix("/")
    if kind == "sentinel":
        service, _, db = db.partition("/")
        service = unquote(service)
        if not service:
            raise _bad(url, "it names no service, as in redis+sentinel://host:26379/service/0")
    if not re.fullmatch(r"\d*", db):
        raise _bad(url, f"{('/' + db)!r} is not the number of a database")
    return service, db


def _bad(url: str, why: str) -> UserError:
    return UserError(f"{masked(url)!r} is no URL of a Redis: {masked(why)}; valid: {EXAMPLE}", field="url")
