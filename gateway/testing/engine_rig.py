"""`EngineRig`: one server that stands in for an upstream, its publisher of KV events, the engine under test,
and `Mirror`, which listens as a gateway does."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from bien.core.clock import WallClock
from bien.core.errors import WorkerDiedError
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import HASH_BYTES, extend_chain, tenant_key
from bien.core.providers import Context
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.worker.client import WorkerClient
from bien.core.worker.messages import Output, Snapshot, StepFrame, WorkerStats
from bien.gateway.remote.engine import Engine
from bien.gateway.testing.event_forms import Form, encode_events
from bien.gateway.testing.publisher import EventPublisher
from bien.gateway.testing.stand_in import StandIn

BLOCK = 4  # tokens, of the index and of the events
PATIENCE = 20.0  # seconds until something that must happen counts as not happening
Build = Callable[[str, "str | None", "str | None", Context], Engine]


async def until(condition: Callable[[], object], why: str) -> None:
    """AssertionError `why` when it does not come true."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await WallClock().sleep(0.002)
    except TimeoutError:
        raise AssertionError(why) from None


class Mirror:
    """A listener with an index of one worker: in step by snapshots and batches, as a gateway's is."""

    def __init__(self, client: WorkerClient) -> None:
        self.outputs: dict[int, list[Output]] = {}
        self.stats: list[WorkerStats] = []
        self.deaths: list[str] = []
        self.after_the_end = 0  # frames that came when none may
        self.closed = False
        self._client = client
        self._held: set[tuple[int, str, bytes]] = set()  # group, tier, block
        self._generation, self._seq = "", 0
        self._waiting: list[EventBatch] | None = None  # a snapshot is on its way
        self._task: asyncio.Task[None] | None = None
        client.attach(self)
        self._resync()

    def on_frame(self, worker: WorkerClient, frame: StepFrame) -> None:
        self.after_the_end += bool(self.deaths or self.closed)
        for output in frame.outputs:
            self.outputs.setdefault(output.rid, []).append(output)
        if frame.stats is not None:
            self.stats.append(frame.stats)
        if frame.batch is not None:
            if self._waiting is not None:
                self._waiting.append(frame.batch)
            elif not self._apply(frame.batch):
                self._resync()

    def on_death(self, worker: WorkerClient, reason: str) -> None:
        self.deaths.append(reason)

    def depth(self, tokens: Iterable[int], tenant: str = "", salt: str = "") -> int:
        """Leading tokens of a prompt that a router believes to be cached there."""
        ids = TokenIds.of(tokens)
        chain = extend_chain(tenant_key(tenant, salt=salt), b"", ids, BLOCK, len(ids))
        blocks, found = {block for group, _, block in self._held if group == 0}, 0
        while chain[found : found + HASH_BYTES] in blocks:
            found += HASH_BYTES
        return found // HASH_BYTES * BLOCK

    @property
    def blocks(self) -> int:
        """All that a router believes to be cached there."""
        return len({(group, block) for group, _, block in self._held})

    @property
    def settled(self) -> bool:
        return self._waiting is None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _apply(self, batch: EventBatch) -> bool:
        if batch.generation != self._generation or batch.seq > self._seq + 1:
            return False
        if batch.seq == self._seq + 1:
            self._seq = batch.seq
            for event in batch.events:
                self._take(event)
        return True

    def _take(self, event: KVEvent) -> None:
        blocks = [event.hashes[i : i + HASH_BYTES] for i in range(0, len(event.hashes), HASH_BYTES)]
        places = {(event.group, event.tier, block) for block in blocks}
        if event.op == "stored":
            self._held |= places
        elif event.op == "removed":
            self._held -= places
        else:
            self._held = {held for held in self._held if held[:2] != (event.group, event.tier)}

    def _resync(self) -> None:
        self._waiting = []
        self._task = asyncio.get_running_loop().create_task(self._fetch())

    async def _fetch(self) -> None:
        while True:
            try:
                got: Snapshot = await self._client.snapshot()
            except WorkerDiedError:
                return
            self._generation, self._seq = got.generation, got.seq
            self._held = set()
            for event in got.events:
                self._take(event)
            waiting, self._waiting = self._waiting or [], []
            if all(self._apply(batch) for batch in waiting):
                self._waiting = None
                return


class EngineRig:
    """Made by `opened`; the engine has one worker."""

    server: StandIn
    engine: Engine
    client: WorkerClient
    mirror: Mirror

    def __init__(self, server: StandIn, publisher: EventPublisher | None) -> None:
        self.server = server
        self._publisher = publisher
        self._rids = 0
        self._seq = 0  # of the next message

    @property
    def publisher(self) -> EventPublisher:
        assert self._publisher is not None
        return self._publisher

    async def connect(self) -> None:
        """Also again, after the worker has died."""
        self.client = await self.engine.connect(self.engine.ids[0])
        self.mirror = Mirror(self.client)

    async def leave(self) -> None:
        """Close the client, as a gateway does that ends."""
        self.mirror.closed = True
        await self.client.close()
        await self.mirror.close()

    # Requests.

    def request(
        self,
        prompt: Iterable[int] = range(100, 120),
        output: int = 5,
        tenant: str = "",
        salt: str = "",
        **sampling: Any,
    ) -> GenerateRequest:
        tokens, key = TokenIds.of(prompt), tenant_key(tenant, salt=salt)
        params = SamplingParams(max_tokens=output, **({"temperature": 0.0} | sampling))
        hashes = extend_chain(key, b"", tokens, BLOCK, len(tokens))
        return GenerateRequest("q", tokens, params, tenant=tenant, salt=salt, hashes=hashes, hash_key=key)

    def ask(self, prompt: Iterable[int] = range(100, 120), output: int = 5, **fields: Any) -> int:
        """Submit. Returns the rid."""
        self._rids += 1
        self.client.submit(self._rids, self.request(prompt, output, **fields))
        return self._rids

    async def answered(self, rid: int) -> list[Output]:
        """Its outputs, when it is over."""
        await until(lambda: self.finish(rid), f"an answer has no end: its outputs are {self.outputs(rid)}")
        return self.outputs(rid)

    async def begun(self, rid: int) -> None:
        await until(
            lambda: self.outputs(rid), "an answer has begun upstream, and nothing of it was passed on"
        )

    def outputs(self, rid: int) -> list[Output]:
        return self.mirror.outputs.get(rid, [])

    def finish(self, rid: int) -> str | None:
        got = self.outputs(rid)
        return got[-1].finish if got else None

    # KV events.

    async def tell(self, payload: bytes, *, keep: bool = True, send: bool = True) -> None:
        """The next message of the engine's sequence; `keep`: for a replay."""
        await self.publisher.publish(self._seq, payload, keep=keep, send=send)
        self._seq += 1

    async def tell_events(
        self, *events: Mapping[str, Any], form: Form = "maps", rank: int | None = None
    ) -> None:
        await self.tell(encode_events(events, form, rank=rank))

    def begin_again(self) -> None:
        """The upstream's process was replaced: its cache is empty, its sequence begins at 0."""
        self.publisher.kept.clear()
        self._seq = 0

    async def claims(self, tokens: Iterable[int], depth: int, tenant: str = "", salt: str = "") -> None:
        """Wait until a router believes that so much of the prompt is cached there."""
        wanted = list(tokens)
        try:
            await until(lambda: self.mirror.settled and self.mirror.depth(wanted, tenant, salt) == depth, "")
        except AssertionError:
            whose = f" of tenant {tenant!r}" if tenant else ""
            raise AssertionError(
                f"of the tokens {wanted[0]} to {wanted[-1]}{whose} {self.mirror.depth(wanted, tenant, salt)} "
                f"count as cached there; the engine's events say {depth}"
            ) from None


def stored(
    names: list[int], parent: int | None, tokens: Iterable[int], salt: str = "", **more: Any
) -> dict[str, Any]:
    """Blocks that the engine has now, in the chain behind `parent`."""
    extra = [[salt], *[None] * (len(names) - 1)] if salt else None
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra,
    } | more


@asynccontextmanager
async def opened(build: Build, server: StandIn, events: bool) -> AsyncIterator[EngineRig]:
    """All of it, up and connected, and gone at the end."""
    with tempfile.TemporaryDirectory() as folder:
        await server.start()
        here = f"ipc://{folder}/e", f"ipc://{folder}/r"
        publisher = EventPublisher(*here) if events else None
        rig = EngineRig(server, publisher)
        ctx = Context(pool="suite", model="a-model", block_tokens=BLOCK, hash_key=tenant_key(""))
        try:
            told, asked = here if events else (None, None)
            rig.engine = build(server.url, told, asked, ctx)
            assert len(rig.engine.ids) == 1, f"one server is one worker, not {list(rig.engine.ids)}"
            await rig.connect()
            if publisher is not None:
                assert await publisher.subscribed(PATIENCE), "the engine does not subscribe to KV events"
            try:
                yield rig
            finally:
                await rig.leave()
                await rig.engine.close()
            assert not rig.mirror.after_the_end, "frames came from a worker that was closed or dead"
        finally:
            server.released.set()
            await server.close()
            if publisher is not None:
                await publisher.close()
