"""What it costs to hold the index against the engines: microseconds per request and per batch of events.

python -m bien.replay.bench.verify [--workers 64] [--tokens 100000] [--requests 20000]

All that a `Verifier` does for a request whose parity is good, from placement to the first token, and for a
batch that stores what a turn adds. CPU time, the best of several rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import time

from bien.core.clock import WallClock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import HASH_BYTES
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.request import GenerateRequest, TokenIds
from bien.core.worker.messages import WorkerInfo, WorkerStats
from bien.gateway.routing import Decision, Target
from bien.gateway.stream import Stream
from bien.gateway.verify.canary import Answer
from bien.gateway.verify.options import VerifyOptions
from bien.gateway.verify.verifier import Verifier
from bien.gateway.verify.window import Space

ROUNDS = 5
BLOCK, TURN = 16, 44  # tokens of a block, blocks of a turn


class Placement(Stream):
    """A stream at a worker that is not there."""

    home = ""

    @property
    def worker(self) -> str:
        return self.home


async def _nowhere(worker: str, request: GenerateRequest, seconds: float) -> Answer | None:
    return None


async def _recover(stream: Stream) -> None:
    raise NotImplementedError


def measure(workers: int, tokens: int, requests: int) -> dict[str, float]:
    clock = WallClock()
    own = Space(b"k" * 32, True)
    options = VerifyOptions(canary=False, probe=False)
    provider = PluginManager.load("").find("kv_index", "memory").provider
    index = provider.factory(provider.config_type(), Context(clock=clock))
    verifier = Verifier(index, clock, _nowhere, own, own, options)
    infos = [WorkerInfo(f"w{i}", "bench", "bench", block_tokens=BLOCK) for i in range(workers)]
    for info in infos:
        verifier.joined(info)
    hashes = os.urandom(tokens // BLOCK * HASH_BYTES)
    cached = (tokens // BLOCK - TURN) * BLOCK
    request = GenerateRequest("r", TokenIds(bytes(4 * tokens)), tenant="t", hashes=hashes, hash_key=b"k" * 32)
    targets = [Target(info.id, 0, info, WorkerStats(), 0, 0, cached) for info in infos]
    per_request, per_batch = [], []
    for turn in range(ROUNDS):
        streams = []
        for n in range(requests):
            stream = Placement(request, 0.0, _recover)
            stream.home, stream.cached, stream.decision = infos[n % workers].id, cached, Decision(0, cached)
            streams.append(stream)
        begin = time.process_time()
        for n, stream in enumerate(streams):
            verifier.adjust(stream.route, hashes, targets)
            verifier.placed(stream, targets[n % workers], None)
            verifier.compare(stream)
            verifier.started(stream)
        per_request.append((time.process_time() - begin) / requests)
        stored = [KVEvent("stored", 0, hashes[:HASH_BYTES], hashes[: TURN * HASH_BYTES])]
        first = turn * requests
        batches = [
            EventBatch(infos[n % workers].id, 0, "bench", (first + n) // workers + 1, stored)
            for n in range(requests)
        ]
        begin = time.process_time()
        for batch in batches:
            verifier.heard(batch)
        per_batch.append((time.process_time() - begin) / requests)
    return {
        "us_per_request": round(min(per_request) * 1e6, 2),
        "us_per_batch": round(min(per_batch) * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=20_000)
    given = parser.parse_args()
    print(json.dumps(measure(given.workers, given.tokens, given.requests)))


if __name__ == "__main__":
    main()
