"""The contract of kind `engine`, and `RemoteEngine`, which plugins give their dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from bien.core.clock import Clock
from bien.core.errors import ResourceError, UserError
from bien.core.providers import Context
from bien.core.worker.client import WorkerClient
from bien.gateway.remote.alarms import EventWatch
from bien.gateway.remote.client import RemoteClient
from bien.gateway.remote.dialect import Dialect
from bien.gateway.remote.endpoint import FULL, WINDOW, Endpoint
from bien.gateway.remote.follow import Source
from bien.gateway.remote.metrics import export
from bien.gateway.remote.zmq_source import ZmqSource, load_zmq


class Engine(Protocol):
    """The workers of one pool that others run. Made inside a running loop; from `ctx` it takes `pool` (its
    workers' ids begin with it), `model`, `block_tokens` and `hash_key`."""

    @property
    def ids(self) -> Sequence[str]:
        """Of the workers."""
        ...

    async def connect(self, id: str) -> WorkerClient:
        """A client of this worker; again after it has died. ResourceError: it cannot be reached now.
        UserError: it never will be, as it is configured."""
        ...

    @property
    def alarms(self) -> dict[str, dict[str, str]]:
        """By worker and cause: what is wrong with what the index hears of it. Empty when all is well."""
        ...

    async def close(self) -> None:
        """After its clients are closed."""
        ...


class RemoteEngine:
    """Servers that speak a dialect of OpenAI's protocol, with or without KV events."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        dialect: Dialect,
        ctx: Context,
        source: Callable[[Endpoint], Source] | None = None,
    ) -> None:
        """`source` makes the connection to an endpoint's KV events, where it has any (None: ZeroMQ).
        UserError or ResourceError: an endpoint is no such thing, or a library is missing."""
        for endpoint in endpoints:
            _check(endpoint)
        if source is None and any(endpoint.events for endpoint in endpoints):
            load_zmq()  # before anything is started
        self._clock: Clock = ctx.clock
        self._dialect = dialect
        self._source = source or _zmq
        self._endpoints = {endpoint.id: endpoint for endpoint in endpoints}
        self._watches = {e.id: EventWatch(e.id, ctx.clock, e.grace_seconds) for e in endpoints}
        if ctx.metrics is not None:
            export(ctx.metrics, list(self._watches.values()))

    @property
    def ids(self) -> Sequence[str]:
        return list(self._endpoints)

    async def connect(self, id: str) -> WorkerClient:
        endpoint = self._endpoints[id]
        source = self._source(endpoint) if endpoint.events else None
        return await RemoteClient.connect(endpoint, self._dialect, self._clock, self._watches[id], source)

    @property
    def alarms(self) -> dict[str, dict[str, str]]:
        return {id: dict(watch.alarms) for id, watch in self._watches.items() if watch.alarms}

    async def close(self) -> None:
        """Nothing to do: the clients hold all there is."""


def endpoints(
    ctx: Context,
    urls: Sequence[str],
    *,
    events: Sequence[str] = (),
    replay: Sequence[str] = (),
    ranks: int = 1,
    **fields: object,
) -> list[Endpoint]:
    """One per URL and data-parallel rank, named after the pool. Of `events` and `replay` there is one address
    per URL, or none; rank r listens at the port r above. UserError: they do not fit together."""
    if not urls:
        raise UserError("urls is empty; valid: at least one", field="urls")
    for name, addresses in (("events", events), ("replay", replay)):
        if addresses and len(addresses) != len(urls):
            text = f"{name} has {len(addresses)} addresses for {len(urls)} urls; valid: one each, or none"
            raise UserError(text, field=name)
    if replay and not events:
        raise UserError("replay is given and events is not; valid: both, or events alone", field="replay")
    found = []
    for i, url in enumerate(urls):
        for rank in range(ranks):
            found.append(
                Endpoint(
                    id=f"{ctx.pool}-{i}" + (f".{rank}" if ranks > 1 else ""),
                    url=url.rstrip("/").removesuffix("/v1"),
                    model=ctx.model,
                    block_tokens=ctx.block_tokens,
                    hash_key=ctx.hash_key,
                    rank=rank if ranks > 1 else None,
                    events=_at(events, i, rank, "events"),
                    replay=_at(replay, i, rank, "replay"),
                    **fields,  # type: ignore[arg-type]
                )
            )
    return found


def _at(addresses: Sequence[str], index: int, rank: int, field: str) -> str | None:
    if not addresses:
        return None
    address = addresses[index]
    if not rank or "tcp://" not in address:
        return address if not rank else f"{address}_dp{rank}"
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise UserError(f"{field} {address!r} has no port; valid: tcp://HOST:PORT", field=field)
    return f"{host}:{int(port) + rank}"


def _check(endpoint: Endpoint) -> None:
    if not endpoint.url.startswith(("http://", "https://")):
        text = f"urls holds {endpoint.url!r}; valid: http://HOST:PORT or https://HOST"
        raise UserError(text, field="urls")
    for group in endpoint.groups:
        tokens = group.removeprefix(WINDOW)
        if group != FULL and not (group.startswith(WINDOW) and tokens.isdecimal() and int(tokens) > 0):
            raise UserError(f"groups holds {group!r}; valid: 'full' or 'window:TOKENS'", field="groups")
    for name in ("events", "replay"):
        address = getattr(endpoint, name)
        if address is not None and not address.removeprefix("@").startswith(("tcp://", "ipc://")):
            raise UserError(f"{name} is {address!r}; valid: tcp://HOST:PORT or ipc://PATH", field=name)


def _zmq(endpoint: Endpoint) -> Source:
    if endpoint.events is None:
        raise ResourceError(f"worker {endpoint.id} has no address of KV events")
    return ZmqSource(endpoint.events, endpoint.replay, endpoint.topic)
