"""Pools whose workers others run: one deployment behind another, over HTTP, by token ids and by text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bien.core.compose import compose
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec, RemoteSpec, Selection
from bien.core.errors import DeploymentError, ResourceError
from bien.core.plugins import PluginManager
from bien.core.testing.toy import write_toy
from bien.replay.simulation import simulated
from bien.replay.stack import Stack


def behind(url: str, model: Path, **parameters: Any) -> Deployment:
    engine = Selection("openai", {"urls": [url], **parameters})
    return Deployment(ModelSpec(str(model)), GatewaySpec(port=0), (), remote=(RemoteSpec(engine, "others"),))


async def ask(url: str, **fields: Any) -> tuple[int, dict[str, Any], str]:
    body = {"model": "toy", "prompt": list(range(40, 80)), "max_tokens": 12, "temperature": 0} | fields
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if body.get("stream"):
                return response.status, {}, (await response.text()) + str(dict(response.headers))
            return response.status, await response.json(), ""


def test_one_deployment_behind_another(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy")

    async def main() -> None:
        own = Deployment(
            ModelSpec(str(tmp_path / "toy")),
            GatewaySpec(port=0),
            (PoolSpec(kv_tokens=4096, slots=4, threads=1),),
        )
        inner = await Stack.start(own)
        by_ids = await Stack.start(behind(inner.url, tmp_path / "toy", token_ids=True, extensions=True))
        by_text = await Stack.start(behind(inner.url, tmp_path / "toy"))
        assert [info.id for info in by_ids.workers] == ["others-0"]
        fields = {"return_token_ids": True}
        _, expected, _ = await ask(inner.url, **fields)
        status, found, _ = await ask(by_ids.url, **fields)
        assert status == 200 and found["choices"] == expected["choices"]
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 32, "as the inner one says"
        status, found, _ = await ask(by_text.url)
        text = expected["choices"][0]["text"]
        assert found["choices"][0]["text"] == text
        assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        _, _, streamed = await ask(by_ids.url, stream=True)
        assert "'x-bien-predicted-cached-tokens': '32'" in streamed, "by what was sent there before"

        stop = text[len(text) // 2 : len(text) // 2 + 2]
        _, found, _ = await ask(by_text.url, stop=[stop])
        assert found["choices"][0]["text"] == text[: text.index(stop)]
        assert found["choices"][0]["finish_reason"] == "stop"
        status, found, _ = await ask(by_text.url, **fields)
        assert (status, found["error"]["param"]) == (400, "return_token_ids")
        status, found, _ = await ask(by_text.url, top_k=5)
        assert (status, found["error"]["param"]) == (400, "top_k")
        await inner.close()
        async with asyncio.timeout(20):
            while by_ids.workers:
                await asyncio.sleep(0.02)
        for stack in (by_ids, by_text):
            await stack.close()

    asyncio.run(main())


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy")
    with pytest.raises(ResourceError, match="no engine at http://127.0.0.1:9"):
        asyncio.run(Stack.start(behind("http://127.0.0.1:9", tmp_path / "toy")))


def test_engines_are_not_simulated(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="pool 'others'.*cannot be simulated"):
        simulated(behind("http://127.0.0.1:9", tmp_path))


def test_a_composition_has_its_engines(tmp_path: Path) -> None:
    composition = compose(behind("http://127.0.0.1:9", tmp_path), PluginManager.load())
    [(name, part)] = composition.remote
    assert (name, part.provider.kind, part.provider.name) == ("others", "engine", "openai")
    with pytest.raises(DeploymentError, match=r"pool 'others'.engine.cache_sconds"):
        compose(behind("http://127.0.0.1:9", tmp_path, cache_sconds=1), PluginManager.load())
