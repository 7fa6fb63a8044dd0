"""Sampling parameters through HTTP: a toy model in float64, with and without drafts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from bien.core.clock import WallClock
from bien.core.deployment import GatewaySpec
from bien.core.engine import Engine
from bien.core.testing.torch_harness import TorchHarness
from bien.core.testing.toy import write_toy
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
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 1.0,
    "logit_bias": {"81": 0.5, "40": -100},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


class Client:
    def __init__(self, http: aiohttp.ClientSession, engine: Engine) -> None:
        self.engine = engine
        self._http = http

    async def ask(self, **fields: Any) -> list[int]:
        """The ids of an answer of 24 tokens, greedy unless `fields` say otherwise."""
        choice = await self.choice(**fields)
        ids: list[int] = choice["token_ids"]
        return ids

    async def choice(self, **fields: Any) -> dict[str, Any]:
        body = {"model": "toy", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        async with self._http.post(
            "/v1/completions", json=body | {"return_token_ids": True} | fields
        ) as response:
            assert response.status == 200, await response.text()
            choice: dict[str, Any] = (await response.json())["choices"][0]
            return choice


@asynccontextmanager
async def serving(folder: Path, drafts: bool = False, eos: tuple[int, ...] = ()) -> AsyncIterator[Client]:
    parts: dict[str, Any] = {"quantizer": NoQuantizer(), "parallel": Single()}
    if drafts:
        parts["speculator"] = PromptLookup(PromptLookupConfig(min_ngram=1))
    harness = TorchHarness(folder, Fcfs(FcfsConfig()), parts, eos=eos)
    info = WorkerInfo("w", "g", "fp", block_tokens=8, max_context=256, slots=4, vocab_size=288)
    clock = WallClock()
    worker = InProcessClient(info, harness.engine, harness.executor, clock)
    gateway = Gateway([worker], RoundRobin(), MemoryIndex(clock), clock, GatewaySpec(), rng=Random(0))
    server = await serve(make_app(gateway, TextModel.load(folder), "toy", max_context=256), "127.0.0.1", 0)
    async with aiohttp.ClientSession(server.url) as http:
        yield Client(http, harness.engine)
    await server.close()
    await gateway.close()


@pytest.mark.parametrize("fields", [
    PENALTIES,
    PENALTIES | {"temperature": 2, "seed": 3, "min_p": 0.02},
    {"min_tokens": 20, "stop_token_ids": list(range(3, 130))},
], ids=["greedy", "sampled", "min_tokens"])  # fmt: skip
async def test_the_text_is_the_same_with_drafts(folder: Path, fields: dict[str, Any]) -> None:
    async with serving(folder) as alone, serving(folder, drafts=True) as drafting:
        want = await alone.ask(**fields)
        assert await drafting.ask(**fields) == want
        assert await drafting.ask(**fields) == want, "a second time, from the cache"
        stats = drafting.engine.stats()
        assert 0 < stats.accepted < stats.drafted
        assert want != await alone.ask(temperature=fields.get("temperature", 0), seed=3)


async def test_each_parameter_reaches_the_sampler(folder: Path) -> None:
    async with serving(folder) as client:
        plain = await client.ask()
        for name, value in PENALTIES.items():
            strong = {"81": 100} if name == "logit_bias" else 2.0
            assert await client.ask(**{name: strong}) != plain, (name, value)
        assert await client.ask(logit_bias={"81": 100}) == [81] * 24
        forbidden = {str(i): -100 for i in set(plain)}
        assert not set(await client.ask(logit_bias=forbidden)) & set(plain)
        assert await client.ask(temperature=2, seed=1) != plain
        assert await client.ask(temperature=2, seed=1, min_p=1) == plain


async def test_no_end_before_min_tokens(folder: Path) -> None:
    """EOS and stop tokens are not drawn, where they would only not have been obeyed."""
    eos = (*range(3, 200), *range(210, 288))
    async with serving(folder, eos=eos) as client:
        assert len(await client.ask(ignore_eos=False)) < 12
        choice = await client.choice(ignore_eos=False, min_tokens=12)
        assert not set(choice["token_ids"][:12]) & set(eos)
        assert choice["finish_reason"] == "stop" and choice["token_ids"][-1] in eos
        assert set(await client.ask(ignore_eos=True, min_tokens=12)) & set(eos), "ignored, it is no end"
        rest = list(range(203, 210))
        choice = await client.choice(ignore_eos=False, min_tokens=3, stop_token_ids=rest)
        assert not set(choice["token_ids"][:3]) & {*eos, *rest}
