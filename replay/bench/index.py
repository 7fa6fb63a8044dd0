"""What the index in Redis costs beside the memory index: CPU per event batch and per routing decision.

python -m bien.replay.bench.index [--workers 8] [--rate 50] [--seconds 5] [--blocks 16] [--prompt 1600]
    [--requests 2000] [--request-rate 100] [--outputs 64] [--redis URL]

Workers of a process of their own publish `rate` batches per second each; the measured process applies the
same batches as frames, and with index `redis` follows the stream as well. Each batch stores `blocks` blocks.
A decision asks for the overlaps of a chain of `prompt` blocks with every worker. Without --redis a private
server is started. Then what Redis spends on one routed request, all told (index_requests.py); with
--request-rate 0 as many come as can be served.
Times are CPU times of one process each, so they hold on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from typing import Any, Literal

from bien.core.clock import WallClock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.worker.messages import Snapshot, WorkerInfo
from bien.core.worker.published import Publication
from bien.core.worker.publisher import Publisher
from bien.core.worker.redis_link import close_redis, redis_client
from bien.gateway.index import DurableIndex, KVIndex
from bien.replay.bench.index_requests import per_request
from bien.replay.redis_server import RedisServer
from bien.replay.run import new_loop

DECISIONS = 2000


class Load:
    """The batches of one worker: chains that grow, the oldest removed when there are too many."""

    def __init__(self, worker: int, blocks: int) -> None:
        self.info = WorkerInfo(f"w{worker}", "bench", "bench", block_tokens=64)
        self.seq = 0
        self._rng = random.Random(worker)
        self._blocks = blocks
        self._held: list[tuple[bytes, bytes]] = []  # parent and hashes of what is cached

    def chain(self, blocks: int) -> bytes:
        """One that is stored in the first batches."""
        while sum(len(hashes) for _, hashes in self._held) < 16 * blocks:
            self.next()
        return b"".join(hashes for _, hashes in self._held)[: 16 * blocks]

    def next(self) -> EventBatch:
        self.seq += 1
        parent = self._held[-1][1][-16:] if self._held else b""
        hashes = self._rng.randbytes(16 * self._blocks)
        self._held.append((parent, hashes))
        events = [KVEvent("stored", 0, parent, hashes)]
        if len(self._held) > 2000:
            events.append(KVEvent("removed", 0, b"", self._held.pop()[1]))
        return EventBatch(self.info.id, 0, "bench", self.seq, events)

    def snapshot(self) -> Snapshot:
        return Snapshot("bench", self.seq, [KVEvent("stored", 0, p, h) for p, h in self._held])


async def gateway(index: KVIndex, args: argparse.Namespace) -> dict[str, float]:
    """CPU of one gateway's index while the batches come at their rate."""
    clock = WallClock()
    if isinstance(index, DurableIndex):
        await index.start()
    loads = [Load(n, args.blocks) for n in range(args.workers)]
    for load in loads:
        index.join(load.info)
    count, apply = 0, 0.0
    start, cpu = clock.time(), time.process_time()
    for n in range(int(args.rate * args.seconds)):
        await clock.sleep(start + n / args.rate - clock.time())
        for load in loads:
            batch = load.next()
            before = time.process_time()
            index.apply(batch)
            apply += time.process_time() - before
            count += 1
    whole = time.process_time() - cpu
    chain = Load(0, args.blocks).chain(args.prompt)
    targets = [(load.info.id, 0) for load in loads]
    before = time.process_time()
    for _ in range(DECISIONS):
        index.overlaps(chain, targets)
    decide = time.process_time() - before
    if isinstance(index, DurableIndex):
        await index.stop()
    index.close()
    return {
        "apply_us_per_batch": 1e6 * apply / count,
        "whole_us_per_batch": 1e6 * whole / count,
        "overlaps_us": 1e6 * decide / DECISIONS,
    }


async def workers(to: Publication | None, args: argparse.Namespace) -> float:
    """CPU seconds of workers that make the batches, and publish them if there is somewhere to."""
    clock = WallClock()
    loads = [Load(n, args.blocks) for n in range(args.workers)]
    publishers = []
    for load in loads if to is not None else ():
        assert to is not None
        publisher = Publisher(to, load.info, "127.0.0.1", 1, lambda rank: None)
        publisher._ask_snapshot = lambda rank, p=publisher, of=load: p.snapshot(of.snapshot())  # type: ignore[misc]
        publisher.start()
        publishers.append(publisher)
    start, cpu = clock.time(), time.process_time()
    for n in range(int(args.rate * args.seconds)):
        await clock.sleep(start + n / args.rate - clock.time())
        for i, load in enumerate(loads):
            batch = load.next()
            if publishers:
                publishers[i].add(batch)
    used = time.process_time() - cpu
    for publisher in publishers:
        await publisher.close()
    return used


def _work(to: Publication | None, args: argparse.Namespace, told: Any) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        told.send(runner.run(workers(to, args)))


async def _beside(
    name: Literal["memory", "redis"], url: str, args: argparse.Namespace
) -> tuple[dict[str, float], float]:
    """The gateway's figures, and the CPU seconds of workers that run at the same time."""
    found = PluginManager.load("").find("kv_index", name).provider
    config = found.config_type(url=url) if name == "redis" else found.config_type()
    index = found.factory(config, Context(clock=WallClock()))
    to = index.publication if isinstance(index, DurableIndex) else None
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(to, args, theirs))
    process.start()
    figures = await gateway(index, args)
    while not ours.poll():
        await WallClock().sleep(0.05)
    used = ours.recv()
    process.join()
    return figures, used


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    server = None if args.redis else await RedisServer.start()
    url = args.redis or server.url  # type: ignore[union-attr]
    client = redis_client(url, 5.0)
    try:
        before = await client.info("cpu")
        redis, published = await _beside("redis", url, args)
        after = await client.info("cpu")
        memory, made = await _beside("memory", url, args)
        requests: dict[str, Any] = {}
        if args.requests:
            requests = await per_request(url, args.request_rate, args.requests, args.outputs)
    finally:
        await close_redis(client)
        if server is not None:
            await server.stop()
    batches = args.workers * int(args.rate * args.seconds)
    used = sum(after[key] - before[key] for key in ("used_cpu_user", "used_cpu_sys"))
    return {
        "batches": batches,
        "memory": _rounded(memory),
        "redis": _rounded(redis),
        "ratio": {key: round(redis[key] / memory[key], 2) for key in memory},
        "beside_the_frames_share_of_a_core": round(
            (redis["whole_us_per_batch"] - memory["whole_us_per_batch"]) * args.workers * args.rate / 1e6, 4
        ),
        "publishing_us_per_batch": round(1e6 * (published - made) / batches, 1),
        "redis_server_us_per_batch": round(1e6 * used / batches, 1),
        "per_routed_request": requests,
    }


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 1) for key, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1600)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--request-rate", type=float, default=100.0)
    parser.add_argument("--outputs", type=int, default=64)
    parser.add_argument("--redis", default="")
    with asyncio.Runner(loop_factory=new_loop) as runner:
        json.dump(runner.run(measure(parser.parse_args())), sys.stdout)
    print()


if __name__ == "__main__":
    main()
