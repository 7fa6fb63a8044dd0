"""`Asker`: conversations as agents have them, streamed through a router's URL, and what came of each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from bien.core.clock import WallClock
from bien.gateway.remote.answer import DONE, error_text, events
from bien.replay.chaos.engine import TRUTH

TOKENS = 24  # of an answer: enough for an engine to say who it is
PATIENCE = 60.0  # seconds for an answer
Message = dict[str, str]
LETTERS = "abcdefghijklmnopqrstuvwxyz      "


@dataclass(slots=True)
class Reply:
    """Of one request."""

    status: int = 0
    text: str = ""
    error: str = ""  # in the stream, or of the connection
    whole: bool = False  # whether it ended as answers do
    prompt: int = -1  # tokens; -1: nobody said
    usage: int = -1  # cached tokens, as the router passes it on
    cached: int = -1  # as the engine found it
    engine: int = -1  # number of the one that answered
    worker: str = ""  # where the router says that it was sent
    predicted: int = -1  # cached tokens that the router expected
    ttft: float = -1.0  # seconds
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.whole and not self.error

    @property
    def hit(self) -> float:
        """Share of the prompt that was cached; 0 where there was no answer."""
        return max(0, self.cached) / self.prompt if self.prompt > 0 else 0.0

    @property
    def place(self) -> str:
        return f"e{self.engine}" if self.engine >= 0 else self.worker or "nobody"


@dataclass(slots=True)
class Prompts:
    """Texts that nobody has seen before."""

    rng: random.Random
    count: int = 0

    def text(self, characters: int) -> str:
        return "".join(self.rng.choices(LETTERS, k=characters))

    def fresh(self, characters: int = 2000, system: str = "") -> list[Message]:
        self.count += 1
        words = f"{self.rng.getrandbits(64):016x} {self.text(characters - 17)}"
        user = [{"role": "user", "content": words}]
        return [{"role": "system", "content": system}, *user] if system else user

    def several(self, count: int, characters: int = 2000, system: str = "") -> list[list[Message]]:
        return [self.fresh(characters, system) for _ in range(count)]


@dataclass(slots=True)
class Asker:
    url: str
    model: str
    http: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)

    async def ask(
        self,
        messages: Sequence[Message],
        tokens: int = TOKENS,
        *,
        key: str = "",
        salt: str = "",
        patience: float = PATIENCE,
        **fields: Any,
    ) -> Reply:
        """Never raises: what went wrong is in the reply."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= fields | ({"cache_salt": salt} if salt else {})
        headers = self.headers | ({"Authorization": f"Bearer {key}"} if key else {})
        reply, clock = Reply(), WallClock()
        began = clock.time()
        try:
            async with asyncio.timeout(patience):
                url = f"{self.url}/v1/chat/completions"
                async with self.http.post(url, json=body, headers=headers) as response:
                    await self._read(response, reply, began)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            reply.error = reply.error or f"{type(error).__name__}: {error}"
        reply.seconds = clock.time() - began
        if truth := TRUTH.match(reply.text):
            reply.engine, reply.cached, reply.prompt = map(int, truth.groups())
        elif reply.cached < 0:
            reply.cached = reply.usage
        return reply

    async def all(
        self, prompts: Sequence[Sequence[Message]], tokens: int = TOKENS, at_once: int = 1, **fields: Any
    ) -> list[Reply]:
        """One after the other, or so many at a time; replies in the order of the prompts."""
        gate = asyncio.Semaphore(at_once)

        async def one(messages: Sequence[Message]) -> Reply:
            async with gate:
                return await self.ask(messages, tokens, **fields)

        return list(await asyncio.gather(*(one(messages) for messages in prompts)))

    async def _read(self, response: aiohttp.ClientResponse, reply: Reply, began: float) -> None:
        reply.status = response.status
        reply.worker = response.headers.get("x-bien-worker", "")
        reply.predicted = int(response.headers.get("x-bien-predicted-cached-tokens", -1))
        if response.status != 200:
            reply.error = (await response.text())[:300]
            return
        async for data in events(response.content.iter_any()):
            if data == DONE:
                reply.whole = True
                break
            event = msgspec.json.decode(data)
            if event.get("error"):
                reply.error = error_text(event["error"])[:300]
            for choice in event.get("choices") or ():
                piece = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
                if piece and reply.ttft < 0:
                    reply.ttft = WallClock().time() - began
                reply.text += piece
            if usage := event.get("usage"):
                reply.prompt = usage.get("prompt_tokens", -1)
                details = usage.get("prompt_tokens_details") or {}
                reply.usage = details.get("cached_tokens", -1)


def hits(replies: Sequence[Reply]) -> float:
    """Share of the prompts' tokens that were cached."""
    total = sum(max(0, reply.prompt) for reply in replies)
    return sum(max(0, reply.cached) for reply in replies) / total if total else 0.0


def places(replies: Sequence[Reply]) -> dict[str, int]:
    """Requests by who answered them."""
    found: dict[str, int] = {}
    for reply in replies:
        found[reply.place] = found.get(reply.place, 0) + 1
    return dict(sorted(found.items()))
