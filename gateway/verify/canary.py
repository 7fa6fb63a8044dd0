"""`Canary`: prompts that nobody has, each sent twice: what the engine finds the second time, what its events
call the blocks, and what the index makes of them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from bien.core.clock import Clock
from bien.core.kv.events import KVEvent
from bien.core.kv.hashing import HASH_BYTES, extend_chain
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.worker.messages import WorkerInfo
from bien.gateway.checks import context_limit
from bien.gateway.index import KVIndex
from bien.gateway.verify.options import VerifyOptions
from bien.gateway.verify.tap import CLEARED, Tap, split
from bien.gateway.verify.window import Space

TENANT = "\0bien canary"  # of nobody else: tenants' names are digests
PRIORITY = 100  # the least urgent
LOW, HIGH = 16, 4096  # ids that vocabularies have; the first few are often special
BLOCKS, FEWER, MORE = 7, 6, 31  # whole blocks; 7 and 6 together tell other block sizes from an end left out
TRIES = 3  # when it was evicted at once
BEFORE = 30.0  # seconds that are shortly
PAUSE = 0.05  # seconds between looks at the index


class Answer(NamedTuple):
    """What an engine said of one prompt; -1: nothing."""

    cached: int
    counted: int


Send = Callable[[str, GenerateRequest, float], Awaitable[Answer | None]]


class Sighting(NamedTuple):
    """What became of a canary. Tokens, but for `named` and `strange`."""

    sent: int
    block: int  # tokens of one of ours
    first: int  # found the first time
    second: int  # and the second time; -1: the engine does not say
    counted: int  # prompt tokens, as the engine counts them; -1: it does not say
    claimed: int  # by the index, in the end
    named: int  # by the events: those of its blocks, in order, that they told of
    strange: int  # stored blocks that events told of meanwhile and nobody had asked for
    familiar: int  # times that events told of blocks that others had asked for, then or shortly before

    @property
    def whole(self) -> int:
        """What the second one should find: full blocks, short of the last token."""
        return (self.sent - 1) // self.block * self.block

    @property
    def right(self) -> bool:
        """The index is right about it, as far as the engine says."""
        if self.second < 0:
            return True
        if self.first > self.block:
            return False
        return abs(self.second - self.whole) <= self.block and abs(self.second - self.claimed) <= self.block


class Canary:
    def __init__(
        self, send: Send, index: KVIndex, clock: Clock, rng: random.Random, options: VerifyOptions
    ) -> None:
        self._send = send
        self._index = index
        self._clock = clock
        self._rng = rng
        self._options = options

    async def sight(
        self, info: WorkerInfo, tap: Tap, space: Space, blocks: int = BLOCKS, dp_rank: int = 0
    ) -> Sighting | None:
        """At one rank, whose `tap` it is. None: the worker did not answer, or has no room for it."""
        for _ in range(TRIES):
            began = self._clock.time()
            prompt = self._prompt(info, blocks)
            hashes = extend_chain(space.key, b"", prompt, info.block_tokens, len(prompt))
            found = await self._once(info, tap, space, prompt, hashes, began, dp_rank)
            if found is None or not tap.removed.since(began, *split(hashes), CLEARED):
                return found
        return None

    def _prompt(self, info: WorkerInfo, blocks: int) -> TokenIds:
        block = info.block_tokens
        tokens = min(blocks * block + (block + 1) // 2 + 1, context_limit(info) - 2)
        high = min(info.vocab_size or HIGH, HIGH)
        low = min(LOW, high - 1)
        return TokenIds.of(self._rng.randrange(low, high) for _ in range(max(0, tokens)))

    async def _once(
        self,
        info: WorkerInfo,
        tap: Tap,
        space: Space,
        prompt: TokenIds,
        hashes: bytes,
        began: float,
        dp_rank: int,
    ) -> Sighting | None:
        block, heard = info.block_tokens, list[KVEvent]()
        if len(prompt) <= 2 * block:
            return None
        tap.listeners.append(heard)
        try:
            request = self._request(space, prompt, hashes, dp_rank)
            first = await self._send(info.id, request, self._options.answer)
            if first is None:
                return None
            request = self._request(space, prompt, hashes, dp_rank)
            second = await self._send(info.id, request, self._options.answer)
            if second is None:
                return None
            usable = hashes[: (len(prompt) - 1) // block * HASH_BYTES]
            claimed = await self._claim(info, usable, dp_rank)
        finally:
            tap.listeners.remove(heard)
        named, strange, familiar = _read(heard, hashes, tap, began)
        counted = (first.cached, second.cached, second.counted, claimed)
        return Sighting(len(prompt), block, *counted, named, strange, familiar)

    def _request(self, space: Space, prompt: TokenIds, hashes: bytes, dp_rank: int) -> GenerateRequest:
        return GenerateRequest(
            f"canary-{self._rng.getrandbits(64):016x}",
            prompt,
            SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True),
            tenant=TENANT if space.named else "",
            hashes=hashes,
            hash_key=space.key,
            priority=PRIORITY,
            dp_rank=dp_rank,
        )

    async def _claim(self, info: WorkerInfo, hashes: bytes, dp_rank: int) -> int:
        """Tokens that the index says are there; events may need a moment."""
        until = self._clock.time() + self._options.grace
        while True:
            blocks = self._index.overlaps(hashes, [(info.id, dp_rank)])[0]
            if blocks * HASH_BYTES >= len(hashes) or self._clock.time() >= until:
                return blocks * info.block_tokens
            await self._clock.sleep(PAUSE)


def _read(heard: list[KVEvent], hashes: bytes, tap: Tap, began: float) -> tuple[int, int, int]:
    names = split(hashes)
    told: set[bytes] = set()
    asked = {name for chain in tap.sent.told() for name in split(chain)}
    strange = 0
    familiar = sum(not asked.isdisjoint(split(run)) for run in tap.stored.told(began - BEFORE))
    mine = set(names)
    for event in heard:
        if event.op != "stored":
            continue
        run = split(event.hashes)
        told.update(run)
        if event.parent in asked or not asked.isdisjoint(run):
            asked.update(run)  # what follows them are answers
        else:
            strange += len(set(run) - mine)
    named = next((i for i, name in enumerate(names) if name not in told), len(names))
    return named, strange, familiar
