"""Engines on a virtual clock that cache for themselves, and lie in one way each, until they are repaired."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

import msgspec

from bien.core.clock import VirtualClock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import HASH_BYTES, extend_chain, tenant_key
from bien.core.request import GenerateRequest, TokenIds
from bien.core.worker.messages import Output, Snapshot
from bien.gateway.testing.fake_worker import FakeWorker, fake_info
from bien.plugins.indexes.memory import MemoryIndex

CLOCK = VirtualClock()
BLOCK = 4
SECRET = b"s"


class Cacher(FakeWorker):
    """An engine with its own names of its own tokens: `blocks` of them are kept, the least recently used go,
    of one prompt its end first. Two prompts are computed at a time."""

    def __init__(self, id: str = "w0", blocks: int = 10_000, slots: int = 2) -> None:
        super().__init__(CLOCK, id, info=fake_info(id, max_context=4096, vocab_size=30_000))
        self.lying = True
        self.blocks = blocks
        self.held: OrderedDict[bytes, bytes] = OrderedDict()  # block -> the one before
        self.block = BLOCK
        self.generation = self.info.generation
        self._free = asyncio.Semaphore(slots)

    # What a liar does otherwise.

    def read(self, request: GenerateRequest) -> TokenIds:
        """The tokens that it computes."""
        assert isinstance(request.prompt, TokenIds)
        return request.prompt

    def key(self, request: GenerateRequest) -> bytes:
        return request.hash_key

    def rename(self, name: bytes) -> bytes:
        """What its events call a block."""
        return name

    def found(self, hit: int) -> int:
        """Tokens that it uses of `hit` cached ones."""
        return hit

    def tell(self, events: list[KVEvent]) -> None:
        self.post(events)

    def repair(self) -> None:
        """It tells the truth from now on, with an empty cache, and says so."""
        self.lying = False
        self.restart()

    # What all do.

    def restart(self) -> None:
        self.held.clear()
        boot, life = self.generation.rsplit(".", 1)
        self.generation, self.seq = f"{boot}.{int(life) + 1}", 0
        self.post([])

    def post(self, events: list[KVEvent]) -> None:
        self.seq += 1
        self.send(batch=EventBatch(self.info.id, 0, self.generation, self.seq, events))

    async def snapshot(self, dp_rank: int = 0) -> Snapshot:
        self.snapshots += 1
        events = [KVEvent("stored", 0, self._told(parent), self.rename(n)) for n, parent in self.held.items()]
        generation, seq = self.generation, self.seq
        await CLOCK.sleep(0.01)
        return Snapshot(generation, seq, events)

    async def _serve(self, rid: int, request: GenerateRequest) -> None:
        async with self._free:
            prompt = self.read(request)
            chain = extend_chain(self.key(request), b"", prompt, self.block, len(prompt))
            names = [chain[i : i + HASH_BYTES] for i in range(0, len(chain), HASH_BYTES)]
            whole = (len(prompt) - 1) // self.block
            hit = next((i for i, n in enumerate(names[:whole]) if n not in self.held), whole)
            for name in reversed(names[:hit]):
                self.held.move_to_end(name)
            cached = self.found(hit * self.block)
            await CLOCK.sleep(0.0005 * (len(prompt) - cached))
            self._store(names)
        for n in range(request.sampling.max_tokens):
            await CLOCK.sleep(0.01)
            finish = "length" if n == request.sampling.max_tokens - 1 else None
            first = {"cached": cached, "prompt_tokens": len(prompt)} if not n else {}
            self.send(Output(rid, 1, TokenIds.of([n]).packed, finish, **first))

    def _store(self, names: list[bytes]) -> None:
        events = []
        at = next((i for i, name in enumerate(names) if name not in self.held), len(names))
        fresh = [n for n in names[at:] if n not in self.held]
        if fresh:
            run = b"".join(map(self.rename, names[at:]))
            events.append(KVEvent("stored", 0, self._told(names[at - 1] if at else b""), run))
        for i in reversed(range(len(names))):
            self.held[names[i]] = names[i - 1] if i else b""
            self.held.move_to_end(names[i])
        gone = []
        while len(self.held) > self.blocks:
            gone.append(self.held.popitem(last=False)[0])
        if gone:
            events.append(KVEvent("removed", 0, b"", b"".join(map(self.rename, gone))))
        if events:
            self.tell(events)

    def _told(self, name: bytes) -> bytes:
        return self.rename(name) if name else b""


class OtherHash(Cacher):
    """Another hash function, or seed."""

    def rename(self, name: bytes) -> bytes:
        return hashlib.blake2b(name, digest_size=HASH_BYTES).digest() if self.lying else name


class LargerBlocks(Cacher):
    """Its events name blocks of the size that it claims to have, and it uses multiples of four of them."""

    def found(self, hit: int) -> int:
        return hit // (4 * BLOCK) * (4 * BLOCK) if self.lying else hit


class Finds(Cacher):
    """It finds something else than it has cached: `less` of these blocks, or a share of the tokens."""

    def __init__(self, id: str, less: int = 0, share: float = 1.0) -> None:
        super().__init__(id)
        self.less, self.share = less, share

    def found(self, hit: int) -> int:
        return max(0, int(hit * self.share) - self.less * BLOCK) if self.lying and hit else hit


class OtherBlocks(Cacher):
    """Its blocks, and their names, are of another size."""

    def __init__(self, id: str, size: int) -> None:
        super().__init__(id)
        self.block = size

    def repair(self) -> None:
        self.block = BLOCK
        super().repair()


class Inserts(Cacher):
    """It puts tokens into every prompt behind the first two blocks, or in front of all."""

    def __init__(self, id: str, at: int = 2 * BLOCK, counts: bool = True, replace: bool = False) -> None:
        super().__init__(id)
        self.at, self.counts, self.replace = at, counts, replace

    def read(self, request: GenerateRequest) -> TokenIds:
        prompt = super().read(request)
        if not self.lying:
            return prompt
        more = TokenIds.of([9, 9, 9])
        rest = self.at + 3 * self.replace
        return prompt.slice(0, self.at).join(more).join(prompt.slice(rest, len(prompt)))

    def send(self, *outputs: Output, **more: object) -> None:  # type: ignore[override]
        if not self.counts:
            outputs = tuple(msgspec.structs.replace(o, prompt_tokens=-1) for o in outputs)
        super().send(*outputs, **more)  # type: ignore[arg-type]


class OtherSalt(Cacher):
    """What blocks of these tenants are called depends on something that we do not know: each time (`never`:
    nothing is found), or for all time (the engine finds them, the index does not)."""

    def __init__(self, id: str, tenants: tuple[str, ...], never: bool) -> None:
        super().__init__(id)
        self.keys = {tenant_key(tenant, SECRET) for tenant in tenants}
        self.never, self.times = never, 0

    def key(self, request: GenerateRequest) -> bytes:
        key = request.hash_key
        of_them = key in self.keys if self.keys else key != tenant_key("", SECRET)
        if not self.lying or not of_them:
            return key
        self.times += self.never
        return hashlib.blake2b(request.hash_key + self.times.to_bytes(8, "little")).digest()


class KeepsNames(OtherSalt):
    """It never finds what that tenant has sent, and its events call the blocks by our names."""

    def __init__(self, id: str, tenants: tuple[str, ...]) -> None:
        super().__init__(id, tenants, never=True)
        self._ours: dict[bytes, bytes] = {}

    async def _serve(self, rid: int, request: GenerateRequest) -> None:
        prompt = self.read(request)
        times = self.times
        other = extend_chain(self.key(request), b"", prompt, self.block, len(prompt))
        self.times = times
        for i in range(0, len(other), HASH_BYTES):
            self._ours[other[i : i + HASH_BYTES]] = request.hashes[i : i + HASH_BYTES]
        await super()._serve(rid, request)

    def rename(self, name: bytes) -> bytes:
        return self._ours.get(name, name)


class Silent(Cacher):
    """Its events do not come, or come much later."""

    def __init__(self, id: str, late: float | None = None) -> None:
        super().__init__(id)
        self.late = late

    def tell(self, events: list[KVEvent]) -> None:
        if not self.lying:
            self.post(events)
        elif self.late is not None:
            asyncio.get_running_loop().call_later(self.late, self._post_late, events)

    def _post_late(self, events: list[KVEvent]) -> None:
        if self.lying:
            self.post(events)


class Lossy(Cacher):
    """Two of three of its batches get lost on their way; their numbers are missing."""

    def tell(self, events: list[KVEvent]) -> None:
        if self.lying and self.seq % 3:
            self.seq += 1
        else:
            self.post(events)


class Forgetful(Cacher):
    """It evicts and does not say so."""

    def tell(self, events: list[KVEvent]) -> None:
        told = [e for e in events if e.op != "removed"] if self.lying else events
        if told:
            self.post(told)


class Believes(MemoryIndex):
    """An index that is sure of itself: numbers may be missing, generations may change. `deaf`: and it hears
    of nothing."""

    def __init__(self, deaf: bool = False, removals: bool = True) -> None:
        super().__init__(CLOCK)
        self.lying = True
        self.deaf, self.removals = deaf, removals
        self._at: dict[str, tuple[str, int]] = {}

    def apply(self, batch: EventBatch) -> bool:
        if not self.lying:
            return super().apply(batch)
        if self.deaf:
            return True
        position = self.position(batch.worker, 0)
        if position is None or position.lost:
            return super().apply(batch)
        events = [e for e in batch.events if e.op == "stored" or self.removals]
        told = EventBatch(batch.worker, 0, position.generation, position.seq + 1, events)
        return super().apply(told)


class Restarts(Cacher):
    """Its cache is gone now and then."""

    served = 0

    async def _serve(self, rid: int, request: GenerateRequest) -> None:
        self.served += 1
        if self.lying and self.served % 12 == 0:
            self.restart()
        await super()._serve(rid, request)
