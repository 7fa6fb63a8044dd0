"""The memory index at the size of a fleet: bytes per block, events per second, microseconds per lookup.

python -m bien.replay.bench.index_scale [--table native] [--workers 64] [--blocks 5000000] [--tokens 100000]

The index is filled with `blocks` distinct blocks in runs of 1 to 64, each held by one worker; a tenth of them
get further holders. Events: batches of one stored run, made before the clock runs; an eighth of the sessions
have moved and are stored elsewhere as well, the others begin with one of eight system prompts, and beyond its
room a worker removes the ends of its oldest sessions. Lookups: a prompt of `tokens` tokens, in blocks of 64
and of 16, asked for all workers at once, in the full index. Times are CPU times, of lookups the best of
several rounds; memory is the process's resident growth.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

import psutil

from bien.core.clock import WallClock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import HASH_BYTES
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.worker.messages import WorkerInfo

LONGEST = 64  # blocks of one run
ROUNDS = 7


class Worker:
    """What one worker tells."""

    def __init__(
        self, number: int, groups: tuple[str, ...] = ("full",), windows: tuple[int, ...] = (0,)
    ) -> None:
        every = (0,) * len(groups)
        self.info = WorkerInfo(
            f"w{number}",
            "bench",
            "bench",
            block_tokens=64,
            group_kinds=groups,
            group_windows=windows,
            snapshot_tokens=every,
        )
        self.seq = 0

    def batch(self, *events: KVEvent) -> EventBatch:
        self.seq += 1
        return EventBatch(self.info.id, 0, "bench", self.seq, list(events))

    def stored(self, hashes: bytes, parent: bytes = b"", group: int = 0) -> EventBatch:
        return self.batch(KVEvent("stored", group, parent, hashes))


class Sessions:
    """Batches of all workers: sessions grow by runs, move, and lose their ends. Prompts stay."""

    def __init__(self, workers: list[Worker], room: int, rng: random.Random) -> None:
        self._rng = rng
        self._workers = workers
        self._room = room  # blocks of one worker
        self._prompts = [rng.randbytes(HASH_BYTES * 100) for _ in range(8)]
        self._held: list[dict[int, list[bytes]]] = [{} for _ in workers]  # sessions as runs, a prompt first
        self._count = [0 for _ in workers]
        self._begun = 0

    def next(self) -> tuple[EventBatch, int]:
        """A batch, and the blocks that its events name."""
        rng, at = self._rng, self._rng.randrange(len(self._workers))
        sessions = self._held[at]
        if not sessions or rng.random() < 0.02:
            runs = self._new(sessions)
            events = [KVEvent("stored", 0, b"", b"".join(runs))]
            self._count[at] += len(b"".join(runs[1:])) // HASH_BYTES
        else:
            runs = sessions[rng.choice(list(sessions))]
            parent = runs[-1][-HASH_BYTES:]
            runs.append(rng.randbytes(HASH_BYTES * rng.randint(1, LONGEST)))
            events = [KVEvent("stored", 0, parent, runs[-1])]
            self._count[at] += len(runs[-1]) // HASH_BYTES
        while self._count[at] > self._room:
            oldest = next(iter(sessions))
            if len(sessions[oldest]) == 1:
                del sessions[oldest]
                continue
            gone = sessions[oldest].pop()
            self._count[at] -= len(gone) // HASH_BYTES
            events.append(KVEvent("removed", 0, b"", gone))
        return self._workers[at].batch(*events), sum(len(e.hashes) for e in events) // HASH_BYTES

    def _new(self, sessions: dict[int, list[bytes]]) -> list[bytes]:
        number, runs = self._begun, [self._rng.choice(self._prompts)]
        there = self._rng.choice(self._held)
        if there and self._rng.random() < 0.125:
            moved = self._rng.choice(list(there))
            if moved not in sessions:
                number, runs = moved, list(there[moved])
        if number == self._begun:
            self._begun += 1
        sessions[number] = runs
        return runs


def measure(args: argparse.Namespace) -> dict[str, Any]:
    provider = PluginManager.load("").find("kv_index", "memory").provider
    config = provider.config_type(table=args.table)
    index = provider.factory(config, Context(clock=WallClock()))
    rng = random.Random(1)
    workers = [Worker(n) for n in range(args.workers)]
    for worker in workers:
        index.join(worker.info)
    memory = fill(index, workers, args.blocks, rng)
    return {
        "table": index.table,
        "workers": args.workers,
        "memory": memory,
        "events": events(index, workers, args.batches, rng),
        "lookups_us": {
            f"blocks_of_{size}": lookups(index, workers, -(-args.tokens // size), rng) for size in (64, 16)
        },
    }


def fill(index: Any, workers: list[Worker], blocks: int, rng: random.Random) -> dict[str, Any]:
    process, kept, count = psutil.Process(), [], 0
    before = process.memory_info().rss
    while count < blocks:
        n = rng.randint(1, LONGEST)
        hashes = rng.randbytes(HASH_BYTES * n)
        if count < blocks // 10:
            kept.append(hashes)
        index.apply(rng.choice(workers).stored(hashes))
        count += n
    own = sum(map(len, kept))
    full = process.memory_info().rss
    further = 0
    for hashes in kept:
        for worker in rng.sample(workers, min(3, len(workers))):
            index.apply(worker.stored(hashes))
            further += len(hashes) // HASH_BYTES
    shared = process.memory_info().rss
    return {
        "distinct_blocks": count,
        "resident_mib": round((full - before - own) / 2**20),
        "bytes_per_block": round((full - before - own) / count, 1),
        "bytes_per_further_holder": round((shared - full) / further, 2),
    }


def events(index: Any, workers: list[Worker], batches: int, rng: random.Random) -> dict[str, int]:
    sessions = Sessions(workers, batches * LONGEST // (4 * len(workers)), rng)
    made = [sessions.next() for _ in range(batches)]
    start = time.process_time()
    for batch, _ in made:
        index.apply(batch)
    seconds = time.process_time() - start
    return {
        "blocks_per_second": round(sum(blocks for _, blocks in made) / seconds),
        "batches_per_second": round(batches / seconds),
    }


def lookups(index: Any, workers: list[Worker], blocks: int, rng: random.Random) -> dict[str, float]:
    targets = [(worker.info.id, 0) for worker in workers]

    def chain() -> bytes:
        return rng.randbytes(HASH_BYTES * blocks)

    def depths(found: bytes, count: int) -> bytes:
        for n, worker in enumerate(workers):
            index.apply(worker.stored(found[: HASH_BYTES * (blocks * (n % count + 1) // count)]))
        return found

    def asked(found: bytes) -> float:
        return best(lambda: index.overlaps(found, targets))

    found = {
        "unknown": asked(chain()),
        "1_depth": asked(depths(chain(), 1)),
        "4_depths": asked(depths(chain(), 4)),
        "each_its_depth": asked(depths(chain(), len(workers))),
        "several_groups": several(index, len(workers), blocks, rng),
    }
    # Chains that came a block at a time, between others: nothing of them lies in a row.
    scattered = [chain() for _ in range(8)]
    for at in range(0, HASH_BYTES * blocks, HASH_BYTES):
        for one in scattered:
            index.apply(workers[0].stored(one[at : at + HASH_BYTES]))
    found["each_its_depth_scattered"] = asked(depths(scattered[0], len(workers)))
    holes = depths(chain(), 1)
    for n, worker in enumerate(workers):
        at = HASH_BYTES * (blocks * n // len(workers))
        index.apply(worker.batch(KVEvent("removed", hashes=holes[at : at + HASH_BYTES])))
    found["each_a_hole"] = asked(holes)
    return found


def several(index: Any, count: int, blocks: int, rng: random.Random) -> float:
    """Full attention, a window of 8 blocks, and states at the ends of 64 turns; each worker has its depth."""
    workers = [Worker(1000 + n, ("full", "window", "state"), (0, 512, 0)) for n in range(count)]
    chain = rng.randbytes(HASH_BYTES * blocks)
    for n, worker in enumerate(workers):
        index.join(worker.info)
        depth = blocks * (n + 1) // count
        tail = chain[HASH_BYTES * max(0, depth - 8) : HASH_BYTES * depth]
        ends = range(max(1, blocks // 64), depth + 1, max(1, blocks // 64))
        states = b"".join(chain[HASH_BYTES * (end - 1) : HASH_BYTES * end] for end in ends)
        index.apply(worker.stored(chain[: HASH_BYTES * depth]))
        index.apply(worker.stored(tail, b"", 1))
        index.apply(worker.stored(states, b"", 2))
    targets = [(worker.info.id, 0) for worker in workers]
    found = best(lambda: index.overlaps(chain, targets))
    for worker in workers:
        index.leave(worker.info.id)
    return found


def best(work: Callable[[], object]) -> float:
    """Microseconds of CPU."""
    seconds: list[float] = []
    calls = 1
    work()
    while len(seconds) < ROUNDS:
        start = time.process_time()
        for _ in range(calls):
            work()
        used = time.process_time() - start
        if used < 0.005:
            calls *= 2
        else:
            seconds.append(used / calls)
    return round(1e6 * min(seconds), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--table", choices=["auto", "native", "python"], default="native")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=5_000_000)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=50_000)
    print(json.dumps(measure(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
