"""Do gateways that route at once choose the same worker? With and without reservations.

python -m bien.replay.bench.reservations [--gateways 4] [--workers 8] [--rounds 60] [--each 2] [--redis URL]
    [--patience 0.01]

In each round every gateway gets `each` new prompts at the same moment; all end before the next. Workers are
real processes whose steps take their time by the clock. Imbalance is the most placements on one worker over
the mean, 1 where all have the same; TTFT is in ms from placement. Without --redis a private server is used.
--patience: seconds that a request waits for an answer, at least; on a machine that is busy it waits longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bien.core.clock import WallClock
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.testing.toy import write_toy
from bien.gateway.stream import Stream
from bien.replay.bench.restart_fleet import Fleet, deployment
from bien.replay.redis_server import RedisServer
from bien.replay.run import new_loop

PROMPT_TOKENS = 2000
MEET_SECONDS = 2.0  # until every gateway knows of the others


async def rounds(args: argparse.Namespace, url: str, reservations: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_toy(Path(folder) / "toy", max_position_embeddings=8192)
        costs = {"step_ms": 5.0, "token_ms": 0.05}
        namespace = f"reservations-{reservations}".lower()
        index = {"reservations": reservations, "namespace": namespace, "reserve_seconds": args.patience}
        fleet = await Fleet.open(
            deployment(model, url, args.workers, 1 << 17, 3.0, index=index, **costs), args.gateways
        )
    rng, imbalance, ttfts = random.Random(1), [], []
    try:
        await WallClock().sleep(MEET_SECONDS)
        for n in range(args.rounds):
            requests = [_request(f"{n}.{k}", rng) for k in range(args.gateways * args.each)]
            streams = await asyncio.gather(
                *(_serve(fleet.sites[k % args.gateways].gateway, r) for k, r in enumerate(requests))
            )
            placed = Counter(stream.worker for stream in streams)
            imbalance.append(max(placed.values()) * args.workers / len(streams))
            ttfts += [1000 * (stream.first - stream.placed) for stream in streams]
            await WallClock().sleep(0.2)
        reservers = [site.index.reserver for site in fleet.sites]
        made, missed = sum(r.made for r in reservers), sum(r.missed for r in reservers)
        contested = sum(r.contested for r in reservers)
    finally:
        await fleet.close()
    ttfts.sort()
    return {
        "imbalance": round(statistics.mean(imbalance), 2),
        "even_rounds": sum(value <= 1.0 for value in imbalance),
        "ttft_p50_ms": round(ttfts[len(ttfts) // 2], 1),
        "ttft_p90_ms": round(ttfts[len(ttfts) * 9 // 10], 1),
        "reserved": made,
        "contested": contested,
        "missed": missed,
    }


def _request(name: str, rng: random.Random) -> GenerateRequest:
    prompt = TokenIds.of(rng.randrange(3, 250) for _ in range(PROMPT_TOKENS))
    return GenerateRequest(name, prompt, SamplingParams(max_tokens=4, ignore_eos=True), session=name)


async def _serve(gateway: Any, request: GenerateRequest) -> Stream:
    async with gateway.generate(request) as stream:
        async for _ in stream:
            pass
    return stream  # type: ignore[no-any-return]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncExitStack() as opened:
        url = args.redis
        if not url:
            server = await RedisServer.start()
            opened.push_async_callback(server.stop)
            url = server.url
        found = {"rounds": args.rounds, "requests_per_round": args.gateways * args.each}
        for name, reservations in (("without", False), ("with", True)):
            found[name] = await rounds(args, url, reservations)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--redis", default="")
    parser.add_argument("--patience", type=float, default=0.01)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        json.dump(runner.run(measure(parser.parse_args())), sys.stdout)
    print()


if __name__ == "__main__":
    main()
