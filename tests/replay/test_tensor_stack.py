"""A real model on two ranks behind a real gateway: it says what one says, and outlives a rank's death."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest

from bien.core.architectures.builtin import SMOLLM2
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec, Selection
from bien.replay.stack import Stack

pytestmark = pytest.mark.slow
SECONDS = 60.0
QUESTIONS = ("What is the capital of France? Answer in one sentence.", "Name three colours.")


def deployment(devices: int, parallel: str) -> Deployment:
    pool = PoolSpec(devices=devices, threads=2, kv_tokens=4096, slots=4, parallel=Selection(parallel))
    return Deployment(ModelSpec(SMOLLM2, max_context=1024), GatewaySpec(port=0), pool=(pool,))


async def ask(session: aiohttp.ClientSession, url: str, question: str) -> str:
    body = {
        "model": SMOLLM2,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 24,
    }
    async with session.post(f"{url}/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
    return str(found["choices"][0]["message"]["content"])


def ranks() -> list[psutil.Process]:
    found = psutil.Process(os.getpid()).children(recursive=True)
    return [p for p in found if "bien.core.worker.rank" in p.cmdline() and p.status() != "zombie"]


async def test_two_ranks_answer_as_one_and_come_back() -> None:
    answers, steps = [], list[str]()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS)) as session:
        for devices, parallel in ((1, "single"), (2, "tensor")):
            stack = await Stack.start(deployment(devices, parallel), lambda who, what, *_: steps.append(what))
            try:
                answers.append([await ask(session, f"{stack.url}/v1", q) for q in QUESTIONS])
                if devices == 1:
                    continue
                assert stack.accelerators == 2
                [rank] = ranks()
                rank.kill()
                async with asyncio.timeout(SECONDS):
                    while "is back" not in steps:
                        await asyncio.sleep(0.1)
                assert any(f"rank 1 (pid {rank.pid}) was killed by signal 9" in step for step in steps)
                assert await ask(session, f"{stack.url}/v1", QUESTIONS[0]) == answers[0][0]
            finally:
                await stack.close()
            assert not ranks()
    assert "Paris" in answers[0][0]
    assert answers[0] == answers[1]
