"""What a routing decision costs: CPU microseconds of `choose` over workers that are busy and full.

python -m bien.replay.bench.routers [--workers 8,64] [--requests 2000] [--policy NAME ...]

Between two decisions every worker has stepped, so that routers which learn have something to learn. What the
index takes is not part of it (`python -m bien.replay.bench.index`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import msgspec

from bien.core.kv.hashing import HASH_BYTES
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.worker.messages import WorkerInfo, WorkerStats
from bien.gateway.routing import Router, RouteRequest, Target

BLOCK = 64
BLOCKS = 16_000  # of a worker, all in use or cached
PROMPT = 100_000
SESSIONS = 500


def measure(router: Router, workers: int, requests: int) -> float:
    """Median CPU microseconds of a decision."""
    rng, times = random.Random(0), []
    targets = [_target(rng, n) for n in range(workers)]
    chains = [rng.randbytes(PROMPT // BLOCK * HASH_BYTES) for _ in range(SESSIONS)]
    for n in range(requests):
        for target in targets:
            _step(rng, target)
        session = rng.randrange(SESSIONS)
        request = RouteRequest(f"r{n}", "", f"s{session}", PROMPT, 1000, 0, chains[session])
        begin = time.process_time()
        router.choose(request, targets)
        times.append(time.process_time() - begin)
    return statistics.median(times) * 1e6


def _target(rng: random.Random, n: int) -> Target:
    info = WorkerInfo(f"w{n}", "bench", "bench", block_tokens=BLOCK, max_context=1 << 20, slots=64)
    stats = WorkerStats(used_blocks=BLOCKS // 4, cached_blocks=BLOCKS - BLOCKS // 4, total_blocks=BLOCKS)
    return Target(info.id, 0, info, stats, rng.randint(0, 8), rng.randrange(5000), 0)


def _step(rng: random.Random, target: Target) -> None:
    stats = target.stats
    target.overlap = rng.choice([0, 0, 0, rng.randrange(PROMPT)])
    target.stats = msgspec.structs.replace(
        stats,
        running=rng.randint(0, 8),
        queued_tokens=rng.randrange(9000),
        steps=stats.steps + 3,
        computed_tokens=stats.computed_tokens + rng.randrange(3000),
        output_tokens=stats.output_tokens + 12,
        busy_seconds=stats.busy_seconds + rng.uniform(0.01, 0.1),
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", default="8,64")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--policy", action="append", help="a router; all that are installed if left out")
    args = parser.parse_args(argv)
    manager = PluginManager.load()
    found: dict[int, dict[str, float]] = {}
    for workers in map(int, args.workers.split(",")):
        found[workers] = {}
        for name in args.policy or manager.names("router"):
            provider = manager.find("router", name).provider
            router = provider.factory(provider.config_type(), Context(rng=random.Random(0)))
            found[workers][name] = round(measure(router, workers, args.requests), 1)
            router.close()
    print(json.dumps({"requests": args.requests, "choose_us": found}, indent=1))


if __name__ == "__main__":
    main()
