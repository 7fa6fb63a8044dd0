"""bien and other engines on one model, by turns in one run, with one client.

python -m bien.replay.bench.peers NAME=TARGET NAME=TARGET ... [--rounds 3] [--tests single,prefill,burst]

A target is the URL of a running server with OpenAI-style completions (http://127.0.0.1:8000; prompts are sent
as token ids, the answer is streamed), or PYTHON:FOLDER, an OpenVINO GenAI model that the Python of another
environment runs in process. Tests: single (128 prompt tokens, 128 generated: tokens/s after the first),
prefill (2,048 prompt tokens: tokens/s until the first), burst (32 x 256 + 64 at once: prompt and generated
tokens/s). Greedy, ends of text ignored, prompts random and always new. The table has medians; each ratio is
that of the first target to another one, median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from bien.core.clock import WallClock

TESTS = {"single": (1, 128, 128), "prefill": (1, 2048, 1), "burst": (32, 256, 64)}  # requests, prompt, output
LOW, HIGH = 1000, 30000  # token ids of prompts
Times = tuple[float, float, float]  # seconds from the first send to the first token, to the last; tokens made


class Target(Protocol):
    async def start(self) -> None: ...

    async def run(self, prompts: list[list[int]], count: int) -> Times: ...

    async def close(self) -> None: ...


class Server:
    """Any server with OpenAI-style completions."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=1200), connector=aiohttp.TCPConnector(limit=0)
        )
        async with self._http.get(self._url + "/v1/models") as answer:
            self._model = (await answer.json())["data"][0]["id"]

    async def run(self, prompts: list[list[int]], count: int) -> Times:
        clock = WallClock()
        begin = clock.time()
        done = await asyncio.gather(*(self._one(prompt, count, clock) for prompt in prompts))
        first, last = min(d[0] for d in done) - begin, max(d[1] for d in done) - begin
        return first, last, sum(d[2] for d in done)

    async def _one(self, prompt: list[int], count: int, clock: WallClock) -> Times:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": count,
            "min_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first = last = 0.0
        made = 0
        async with self._http.post(self._url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"{self._url} answers {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("choices"):
                    last = clock.time()
                    first = first or last
                if event.get("usage"):
                    made = event["usage"]["completion_tokens"]
        return first, last, made

    async def close(self) -> None:
        await self._http.close()


class OpenVino:
    """OpenVINO GenAI's continuous batching, in a process of its own."""

    def __init__(self, python: str, folder: str, threads: int) -> None:
        script = Path(__file__).with_name("openvino_peer.py")
        self._command = [python, str(script), folder, str(threads)]

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, limit=1 << 24
        )
        await self._answer()

    async def run(self, prompts: list[list[int]], count: int) -> Times:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, count]).encode() + b"\n")
        await self._process.stdin.drain()
        first, last, made = await self._answer()
        return first, last, made

    async def _answer(self) -> Any:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(b"["):
                return json.loads(line)
        raise SystemExit(f"{' '.join(self._command)} ended with {await self._process.wait()}")

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


def target(text: str, threads: int) -> tuple[str, Target]:
    name, _, where = text.partition("=")
    if where.startswith(("http://", "https://")):
        return name, Server(where)
    python, _, folder = where.partition(":")
    if not folder:
        raise SystemExit(f"target {text!r}; valid: NAME=http://HOST:PORT or NAME=PYTHON:FOLDER")
    return name, OpenVino(python, folder, threads)


async def rate(test: str, one: Target, rng: random.Random) -> float:
    """Tokens per second of a test; see the module."""
    requests, length, count = TESTS[test]
    prompts = [[rng.randrange(LOW, HIGH) for _ in range(length)] for _ in range(requests)]
    first, last, made = await one.run(prompts, count)
    if made != requests * count:
        raise SystemExit(f"{test}: {made} tokens came, not {requests * count}")
    if test == "single":
        return (count - 1) / (last - first)
    if test == "prefill":
        return length / first
    return (requests * length + made) / last


async def run(targets: dict[str, Target], tests: list[str], rounds: int) -> dict[str, Any]:
    rng = random.Random()
    found: dict[str, dict[str, list[float]]] = {test: {name: [] for name in targets} for test in tests}
    try:
        for one in targets.values():
            await one.start()
            await one.run([[LOW] * 64], 8)
        for _ in range(rounds):
            for test in tests:
                for name, one in targets.items():
                    found[test][name].append(await rate(test, one, rng))
    finally:
        for one in targets.values():
            await one.close()
    ours, *others = targets
    return {
        test: {
            "tokens_per_second": {name: round(statistics.median(values), 1) for name, values in of.items()},
            "ratio": {
                name: round(statistics.median(a / b for a, b in zip(of[ours], of[name], strict=True)), 2)
                for name in others
            },
        }
        for test, of in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="NAME=TARGET")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tests", default=",".join(TESTS))
    parser.add_argument("--threads", type=int, default=2, help="of targets in process")
    args = parser.parse_args()
    tests = args.tests.split(",")
    if unknown := [t for t in tests if t not in TESTS]:
        parser.error(f"no test {unknown[0]!r}; valid: {', '.join(TESTS)}")
    targets = dict(target(text, args.threads) for text in args.targets)
    print(json.dumps(asyncio.run(run(targets, tests, args.rounds)), indent=1))


if __name__ == "__main__":
    main()
