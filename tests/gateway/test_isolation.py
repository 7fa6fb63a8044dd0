"""Tenants and salts share nothing: same prompts, 100,000 other names for the asker, no hit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from bien.core.clock import VirtualClock, WallClock
from bien.core.deployment import GatewaySpec
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import HASH_BYTES, tenant_key
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.testing.toy import write_toy
from bien.core.text.model import TextModel
from bien.gateway.chain import PromptChains
from bien.gateway.core import Gateway
from bien.gateway.http.app import make_app
from bien.gateway.http.server import serve
from bien.gateway.testing.fake_worker import FakeWorker, fake_info
from bien.gateway.verify.options import VerifyOptions
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.routers.round_robin import RoundRobin
from tests.gateway.conftest import MakeGateway
from tests.gateway.test_with_engines import worker

Pair = tuple[str, str]  # tenant and salt
PROMPTS = [TokenIds.of(np.random.default_rng(i).integers(0, 1000, 45).tolist()) for i in range(40)]
OWNERS = [(f"tenant-{i % 7}\0:x/y", f"salt/{i % 5}\0:z-" if i % 3 else "") for i in range(len(PROMPTS))]
texts = st.text(st.sampled_from("ab\0\x01:/"), max_size=6)


def crafted(owner: Pair, rng: random.Random) -> Iterator[Pair]:
    """Pairs that look like the owner's, one way or another: the same text cut elsewhere, lengths written into
    it, keys as names, and chance. None comes twice, none is the owner."""
    tenant, salt = owner
    whole = tenant + salt
    seen = {owner}
    key = tenant_key(tenant, b"s")
    exact = [(whole[:i], whole[i:]) for i in range(len(whole) + 1)]
    for mark in "\0:/-":
        joined = tenant + mark + salt
        exact += [(joined[:i], joined[i + 1 :]) for i, letter in enumerate(joined) if letter == mark]
    for a, b in (
        (tenant, salt),
        (salt, tenant),
        (whole, ""),
        ("", whole),
        (key.hex(), salt),
        ("", key.hex()),
    ):
        exact += [(a, b), (a.upper(), b), (a + "\0", b), (a, b + "\0"), (a, "\0" + b), (a + " ", b)]
        exact += [(chr(len(a)) + a, b), (a + chr(len(b)) + b, ""), (f"{len(a)}:{a}{len(b)}:", b)]
    while True:
        found = exact.pop() if exact else None
        if found is None:
            letters = rng.choice(("ab", whole, "\0\1ab"))
            sizes = rng.randint(0, 12), rng.randint(0, 12)
            found = tuple("".join(rng.choice(letters) for _ in range(n)) for n in sizes)  # type: ignore[assignment]
        if found not in seen:
            seen.add(found)
            yield found


def ask(prompt: TokenIds, pair: Pair) -> GenerateRequest:
    return GenerateRequest("r", prompt, SamplingParams(max_tokens=1), pair[0], "s", salt=pair[1])


@given(texts, texts, texts, texts, st.binary(max_size=80), st.binary(max_size=80))
def test_keys_differ_where_tenant_salt_or_secret_do(
    a: str, b: str, c: str, d: str, secret: bytes, other: bytes
) -> None:
    assert (tenant_key(a, secret, b) == tenant_key(c, secret, d)) is ((a, b) == (c, d))
    assert (tenant_key(a, secret, b) == tenant_key(a, other, b)) is (secret == other)


def test_long_secrets_and_odd_texts_count_in_full() -> None:
    assert tenant_key("t", b"x" * 64 + b"1") != tenant_key("t", b"x" * 64 + b"2")
    assert len({tenant_key(t) for t in ("", "\0", "\ud800", "\ud801")}) == 4


def probe_chain_and_index(probes: int) -> None:
    """Each prompt is cached by its owner on every worker."""
    rng, chains, index = random.Random(1), PromptChains(4, "s"), MemoryIndex(WallClock())
    places = [(f"w{i}", 0) for i in range(4)]
    for id, _ in places:
        index.join(fake_info(id))
    for number, (prompt, owner) in enumerate(zip(PROMPTS, OWNERS, strict=True)):
        work = ask(prompt, owner)
        chains.name(work)
        for id, _ in places:
            event = KVEvent("stored", 0, b"", work.hashes)
            assert index.apply(EventBatch(id, 0, f"{id}.1", number + 1, [event]))
    others = [crafted(owner, random.Random(i)) for i, owner in enumerate(OWNERS)]
    for _ in range(probes):
        at = rng.randrange(len(PROMPTS))
        work = ask(PROMPTS[at], next(others[at]))
        chains.name(work)
        assert index.overlaps(work.hashes, places) == [0, 0, 0, 0]
    for prompt, owner in zip(PROMPTS, OWNERS, strict=True):
        work = ask(prompt, owner)
        chains.name(work)
        assert index.overlaps(work.hashes, places) == [len(work.hashes) // HASH_BYTES] * 4


def probe_engines(make_gateway: MakeGateway, probes: int) -> None:
    """The same through gateway, index and real engines; owners come again and again, and hit."""

    async def main() -> None:
        clients = [worker(f"w{i}", "full", 4000) for i in range(2)]
        gateway = make_gateway(*clients)
        rng = random.Random(2)
        others = [crafted(owner, random.Random(i)) for i, owner in enumerate(OWNERS)]

        async def cached(at: int, pair: Pair) -> tuple[int, int]:
            async with gateway.generate(ask(PROMPTS[at], pair)) as stream:
                async for _ in stream:
                    pass
                return stream.cached, stream.decision.predicted_cached

        for at, owner in enumerate(OWNERS):
            assert await cached(at, owner) == (0, 0)
        for number in range(probes):
            at = rng.randrange(len(PROMPTS))
            assert await cached(at, next(others[at])) == (0, 0)
            if number % 8 == 0:  # or they would be evicted, and found by nobody
                at = number // 8 % len(OWNERS)
                assert await cached(at, OWNERS[at]) == (44, 44)
        await gateway.close()

    VirtualClock.run(main())


def test_no_hit_in_chain_and_index() -> None:
    probe_chain_and_index(20_000)


@pytest.mark.slow
def test_no_hit_in_100_000_probes_of_chain_and_index() -> None:
    probe_chain_and_index(100_000)


def test_no_hit_in_engines(make_gateway: MakeGateway) -> None:
    probe_engines(make_gateway, 1_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_hit_in_100_000_probes_of_engines(make_gateway: MakeGateway) -> None:
    probe_engines(make_gateway, 100_000)


def test_a_session_s_name_gives_no_tenant_the_chains_of_another() -> None:
    chains = PromptChains(4, "s")
    first, second = ask(PROMPTS[0], ("a", "")), ask(PROMPTS[0], ("a", "x"))
    chains.name(first)
    chains.name(second)
    names = [{w.hashes[i : i + 16] for i in range(0, len(w.hashes), 16)} for w in (first, second)]
    assert not names[0] & names[1]


def test_without_a_secret_tenants_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    chains = PromptChains(4)
    chains.name(ask(PROMPTS[0], ("", "salt")))
    assert not caplog.records
    for pair in (("a", ""), ("b", ""), ("c", "")):
        chains.name(ask(PROMPTS[0], pair))
    assert caplog.text.count("gateway.secret is empty") == 1
    PromptChains(4, "set").name(ask(PROMPTS[0], ("a", "")))
    assert len(caplog.records) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


async def test_nothing_in_answers_headers_or_metrics_tells_of_others(folder: Path) -> None:
    clock, registry = WallClock(), CollectorRegistry()
    worker = FakeWorker(clock, info=fake_info("w0", max_context=512), prefill_seconds=0.0, step_seconds=0.0)
    spec = GatewaySpec(secret="s")
    gateway = Gateway(
        [worker], RoundRobin(), MemoryIndex(clock), clock, spec, metrics=registry, verify=VerifyOptions()
    )
    app = make_app(gateway, TextModel.load(folder), "toy", max_context=512, registry=registry)
    server = await serve(app, "127.0.0.1", 0)

    async def probe(key: str, **fields: Any) -> tuple[int, int]:
        """Cached tokens by the usage, and by the header."""
        body = {"model": "toy", "prompt": list(range(1, 60)), "max_tokens": 2, **fields}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with http.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            found = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
        async with http.post("/v1/completions", json=body | options, headers=headers) as response:
            await response.read()
            return found, int(response.headers["x-bien-predicted-cached-tokens"])

    async with aiohttp.ClientSession(server.url) as http:
        everyone = [
            (key, salt) for key in ("", "sk-alice", "sk-bob") for salt in (None, "x", "y", "sk-alice")
        ]
        for key, salt in everyone:
            # The first of the two was new to its namespace; the second found the first.
            assert await probe(key, cache_salt=salt) == (0, 56)
        for key, salt in everyone:
            assert await probe(key, cache_salt=salt) == (56, 56)
        async with http.post("/v1/completions", json={"model": "toy", "prompt": "a", "cache_salt": ""}) as no:
            assert no.status == 400
            assert "cache_salt has 0 characters; valid: 1 to 1024" in await no.text()
        page = await (await http.get("/metrics")).text()
    tenants = {request.tenant for _, request in worker.submitted}
    assert len(tenants) == 4  # three, and the canary's
    for secret in ("alice", "bob", "canary ", *(t for t in tenants if t)):
        assert secret not in page
    await server.close()
    await gateway.close()
