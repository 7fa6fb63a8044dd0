"""A server over a toy model in float64, with prompt-lookup drafts or none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from bien.core.clock import WallClock
from bien.core.deployment import GatewaySpec
from bien.core.engine import Engine
from bien.core.testing.torch_harness import TorchHarness
from bien.core.text.model import TextModel
from bien.core.worker.inprocess import InProcessClient
from bien.core.worker.messages import WorkerInfo
from bien.gateway.core import Gateway
from bien.gateway.http.app import make_app
from bien.gateway.http.server import serve
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.none import NoQuantizer
from bien.plugins.routers.round_robin import RoundRobin
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from bien.plugins.speculators.prompt_lookup import PromptLookup, PromptLookupConfig

PROMPT = [70, 81, 92, 70, 81, 92, 33, 70, 81, 92, 70, 81]


class Client:
    def __init__(self, http: aiohttp.ClientSession, engine: Engine, gateway: Gateway, url: str) -> None:
        self.engine = engine
        self.gateway = gateway
        self.url = url
        self._http = http

    async def ask(self, **fields: Any) -> list[int]:
        """The ids of an answer of 24 tokens, greedy unless `fields` say otherwise."""
        choice = await self.choice(**fields)
        ids: list[int] = choice["token_ids"]
        return ids

    async def choice(self, **fields: Any) -> dict[str, Any]:
        choice: dict[str, Any] = (await self.answer(**fields))["choices"][0]
        return choice

    async def answer(self, **fields: Any) -> dict[str, Any]:
        body = {"model": "toy", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        async with self._http.post(
            "/v1/completions", json=body | {"return_token_ids": True} | fields
        ) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer


@asynccontextmanager
async def serving(
    folder: Path, drafts: bool = False, eos: tuple[int, ...] = (), **limits: Any
) -> AsyncIterator[Client]:
    """`limits`: of the gateway."""
    parts: dict[str, Any] = {"quantizer": NoQuantizer(), "parallel": Single()}
    if drafts:
        parts["speculator"] = PromptLookup(PromptLookupConfig(min_ngram=1))
    harness = TorchHarness(folder, Fcfs(FcfsConfig()), parts, eos=eos)
    info = WorkerInfo("w", "g", "fp", block_tokens=8, max_context=256, slots=4, vocab_size=288)
    clock = WallClock()
    worker = InProcessClient(info, harness.engine, harness.executor, clock)
    gateway = Gateway([worker], RoundRobin(), MemoryIndex(clock), clock, GatewaySpec(**limits), rng=Random(0))
    server = await serve(make_app(gateway, TextModel.load(folder), "toy", max_context=256), "127.0.0.1", 0)
    async with aiohttp.ClientSession(server.url) as http:
        yield Client(http, harness.engine, gateway, server.url)
    await server.close()
    await gateway.close()
