"""`ChaosEngine`: a server that stands in for vLLM: a prefix cache, its KV events over ZeroMQ, prompts that
cost time, and every bad habit that routers have met.

Its answers say, in their own text, who wrote them and what was found cached, so that the truth reaches a
client through any router: "e1 1184/1200 ...".
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web

from bien.core.clock import WallClock
from bien.core.errors import BienError
from bien.core.text.model import TextModel
from bien.gateway.testing.publisher import EventPublisher
from bien.gateway.testing.stand_in import StandIn
from bien.replay.chaos.cache import Event, Naming, PrefixCache
from bien.replay.chaos.wire import Form, encode

TRUTH = re.compile(r"e(\d+) (\d+)/(\d+) ")
CONTEXT = 262_144


@dataclass(frozen=True, slots=True)
class Habits:
    """What an engine does its own way. The defaults are what a router should find easy."""

    block: int = 16
    capacity: int = 100_000  # blocks
    naming: Naming = "bytes"
    seed: str = ""
    form: Form = "maps"
    events: bool = True  # whether it publishes any
    preamble: int = 0  # tokens that its template puts before each prompt
    lazy_clear: bool = False  # says that its cache was emptied at its next step only, as an idle vLLM does
    token_ms: float = 0.15  # of a prompt's token that is not cached
    pace_ms: float = 0.0  # of a token that it writes


class Served(NamedTuple):
    ids: list[int]
    salt: str
    cached: int


@dataclass(slots=True)
class Wire:
    """What happens to events between the engine and who listens."""

    lose: bool = False  # they are sent to nobody, and kept for a replay
    forget: bool = False  # and not kept either
    mute: set[str] = field(default_factory=set)  # types that are left out of messages


class ChaosEngine(StandIn):
    def __init__(self, number: int, text: TextModel, events: str, replay: str, name: str = "chaos") -> None:
        """`events` and `replay`: addresses of its sockets."""
        super().__init__(context=CONTEXT)
        self.number = number
        self.name = name
        self.habits = Habits()
        self.wire = Wire()
        self.served: list[Served] = []  # whose prompts were computed, in order
        self.published = 0  # messages, since it was made
        self.heard = 0  # subscribers, since it was made
        self.replays = 0  # asked for, since it was made
        self.running: set[int] = set()  # answers under way, those that wait for their turn too
        self._text = text
        self.addresses = events, replay
        self._seq = 0
        self._owed: list[Event] = []
        self._turn = asyncio.Lock()  # one prompt is computed at a time
        self._count = 0
        self._port: int | None = None
        self.cache = self._new_cache()
        self.publisher: EventPublisher

    # Its life.

    async def start(self, port: int | None = None) -> ChaosEngine:
        self.publisher = EventPublisher(*self.addresses)
        await super().start(port)
        self._port = self.port
        return self

    async def close(self) -> None:
        await super().close()
        await self._end_publisher()

    async def restart(self, habits: Habits | None = None, *, quietly: bool = False) -> None:
        """As another process at the same addresses: an empty cache, events from number 0 on. `quietly`: its
        sockets stay open, so that only the numbers tell."""
        self.habits = habits or self.habits
        self._seq, self._owed = 0, []
        self.cache = self._new_cache()
        if quietly:
            self.publisher.kept.clear()
            return
        await super().close()
        await self._end_publisher()
        await self.start(self._port)

    async def become(self, habits: Habits) -> None:
        """Other habits, an empty cache; the same process."""
        self.wire = Wire()
        self.cut_after = self.refuse = None
        self.pace = habits.pace_ms / 1000
        if habits != self.habits or len(self.cache):
            await self.tell(self.cache.clear())
        self.habits = habits
        self.cache = self._new_cache()

    async def _end_publisher(self) -> None:
        self.heard += self.publisher.subscribers
        self.replays += len(self.publisher.asked)
        await self.publisher.close()

    def _new_cache(self) -> PrefixCache:
        habits = self.habits
        return PrefixCache(habits.block, habits.capacity, habits.naming, habits.seed)

    @property
    def subscribers(self) -> int:
        return self.heard + self.publisher.subscribers

    @property
    def replays_asked(self) -> int:
        return self.replays + len(self.publisher.asked)

    # What a suite does behind the router's back.

    async def hold(self, prompt: Served) -> None:
        """As if somebody else had sent it this prompt."""
        await self.tell(self.cache.store(prompt.ids, prompt.salt))

    async def drop(self, prompt: Served) -> None:
        await self.tell(self.cache.drop(prompt.ids, prompt.salt))

    async def reset(self) -> None:
        """As `/reset_prefix_cache` does."""
        events = self.cache.clear()
        if self.habits.lazy_clear:
            self._owed += events
        else:
            await self.tell(events)

    def last(self, words: str) -> Served:
        """The newest prompt that it computed with these words in it."""
        wanted = self._text.encode_text(words).packed
        for served in reversed(self.served):
            packed = array("I", served.ids).tobytes()
            at = packed.find(wanted)
            while at % 4 and at >= 0:
                at = packed.find(wanted, at + 1)
            if at >= 0:
                return served
        raise BienError(f"engine e{self.number} has computed no prompt with {words!r} in it")

    async def tell(self, events: list[Event]) -> None:
        events = [event for event in self._owed + events if event["type"] not in self.wire.mute]
        self._owed = []
        if not events or not self.habits.events:
            return
        payload = encode(events, self.habits.form)
        await self.publisher.publish(
            self._seq, payload, keep=not self.wire.forget, send=not (self.wire.lose or self.wire.forget)
        )
        self._seq += 1
        self.published += 1

    # As `StandIn` asks for it.

    def routes(self, router: web.UrlDispatcher) -> None:
        super().routes(router)
        router.add_post("/v1/chat/completions", self._complete)
        for path in ("/v1/chat/completions/render", "/v1/completions/render"):
            router.add_post(path, self._render)
        router.add_post("/tokenize", self._tokenize)
        for path in ("/get_server_info", "/server_info", "/get_model_info", "/model_info"):
            router.add_get(path, self._info)

    def page(self) -> str:
        running, block = len(self.running), self.habits.block
        usage = sum(1 for _ in self.running) * 64 / self.habits.capacity
        return (
            f'vllm:num_requests_running{{model_name="{self.name}"}} {min(running, 1)}\n'
            f'vllm:num_requests_waiting{{model_name="{self.name}"}} {max(0, running - 1)}\n'
            f'vllm:kv_cache_usage_perc{{model_name="{self.name}"}} {usage:.4f}\n'
            f'vllm:cache_config_info{{block_size="{block}",num_gpu_blocks="{self.habits.capacity}"}} 1.0\n'
        )

    def read(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            ids = prompt
        elif isinstance(prompt, str):
            ids = self._text.encode_text(prompt).ids().tolist()
        else:
            ids = self._text.encode_chat(body["messages"]).ids().tolist()
        return [7] * self.habits.preamble + list(ids)

    async def prefill(self, body: dict[str, Any], ids: list[int]) -> int:
        salt = body.get("cache_salt") or ""
        self._count += 1
        number = self._count
        self.running.add(number)
        try:
            async with self._turn:
                cached = self.cache.found(ids, salt)
                await WallClock().sleep((len(ids) - cached) * self.habits.token_ms / 1000)
                events = self.cache.store(ids, salt)
            await self.tell(events)
        except BaseException:
            self.running.discard(number)
            raise
        self.served.append(Served(ids, salt, cached))
        body["bien"] = number, salt, cached
        return cached

    def write(self, ids: list[int], count: int) -> Sequence[tuple[int, str]]:
        cached = self.served[-1].cached  # of `ids`: nothing has been awaited since
        text = f"e{self.number} {cached}/{len(ids)} ".ljust(count, ".")[: max(1, count)]
        return list(zip(self._text.encode_text(text).ids().tolist(), text, strict=True))

    async def over(self, body: dict[str, Any], ids: list[int], made: list[int]) -> None:
        number, salt, _ = body.get("bien", (0, "", 0))
        self.running.discard(number)
        if made:
            await self.tell(self.cache.store(ids + made[:-1], salt))

    def head(self, body: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if "messages" in body else "text_completion"
        return {"id": "chaos", "object": kind, "created": 1, "model": self.name}

    def said(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        if "messages" in body:
            return {"delta": {"role": "assistant", "content": text}}
        return {"text": text}

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.read(body)
        asked = {"max_tokens": self.length(body), "temperature": 0.0}
        made = {"request_id": "chaos", "token_ids": ids, "sampling_params": asked, "model": self.name}
        return web.json_response(made)

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self.read(await request.json())
        return web.json_response({"count": len(ids), "max_model_len": self.context, "tokens": ids})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.name, "served_model_name": self.name, "tp_size": 1})
