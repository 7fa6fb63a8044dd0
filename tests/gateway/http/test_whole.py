"""The shell over the real gateway and a real engine in process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from bien.core.clock import WallClock
from bien.core.deployment import GatewaySpec
from bien.core.testing.harness import Harness
from bien.core.testing.hash_executor import oracle
from bien.core.testing.text import byte_level
from bien.core.text.model import TextModel
from bien.core.text.tokenizer import Tokenizer
from bien.core.worker.inprocess import InProcessClient
from bien.core.worker.messages import WorkerInfo
from bien.gateway.core import Gateway
from bien.gateway.http.app import make_app
from bien.gateway.http.served import Generator
from bien.gateway.http.server import Server, serve
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.routers.kv_aware import KVAwareConfig, KVAwareRouter
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig

PROMPT = list(range(3, 19))
CONTEXT = 20_000


@dataclass
class Stack:
    engine: Harness
    server: Server


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    harness = Harness(Fcfs(FcfsConfig()), blocks=CONTEXT // 4, max_context=CONTEXT)
    info = WorkerInfo(
        "w0", "g", "fp", block_tokens=4, max_context=CONTEXT, slots=4, capacity_tokens=CONTEXT, vocab_size=267
    )
    clock = WallClock()
    worker = InProcessClient(info, harness.engine, harness.executor, clock)
    router = KVAwareRouter(KVAwareConfig(), random.Random(0))
    gateway = Gateway([worker], router, MemoryIndex(clock), clock, GatewaySpec())
    shell: Generator = gateway
    app = make_app(shell, TextModel(Tokenizer(byte_level())), "toy", max_context=gateway.max_context)
    server = await serve(app, "127.0.0.1", 0)
    yield Stack(harness, server)
    await server.close()
    await gateway.close()


async def test_ids_in_ids_out_and_the_second_time_cached(stack: Stack) -> None:
    want = oracle(PROMPT, 6, stack.engine.groups)
    async with AsyncOpenAI(base_url=f"{stack.server.url}/v1", api_key="k", max_retries=0) as sdk:
        for cached in (0, 12):
            answer: Any = await sdk.completions.create(
                model="toy",
                prompt=PROMPT,
                max_tokens=6,
                temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            assert answer.choices[0].token_ids == want
            assert answer.usage.prompt_tokens_details.cached_tokens == cached
            assert answer.choices[0].finish_reason == "length"


async def test_a_recorded_continuation_replaces_what_is_sampled(stack: Stack) -> None:
    forced = [40, 41, 42, 43, 44]
    body = {"model": "toy", "prompt": PROMPT, "trace_decode_token_ids": forced, "return_token_ids": True}
    async with aiohttp.ClientSession(stack.server.url) as http:
        async with http.post("/v1/completions", json=body) as response:
            assert (await response.json())["choices"][0]["token_ids"] == forced


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_frees_the_engine(stack: Stack, stream: bool) -> None:
    body = {
        "model": "toy", "prompt": PROMPT, "max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": stream,
        "return_token_ids": True,
    }  # fmt: skip
    engine = stack.engine.engine
    async with asyncio.timeout(30), aiohttp.ClientSession(stack.server.url) as http:
        call = asyncio.create_task(http.post("/v1/completions", json=body).__aenter__())
        while not engine.stats().running:
            await asyncio.sleep(0)
        if stream:
            (await call).close()
        else:
            call.cancel()
        while engine.busy:
            await asyncio.sleep(0)
    assert engine.stats().output_tokens < CONTEXT - 100
    assert engine.stats().used_blocks == 0
    engine.check_integrity()
