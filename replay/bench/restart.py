"""Restart protocol: how many placements are blind while Redis, gateways and workers are restarted.

python -m bien.replay.bench.restart [--requests 2000] [--workers 4] [--gateways 3] [--sessions 24] [--away 2]
    [--redis URL] [--limit 1800]

Sessions of several turns run all the while, each turn through the next gateway. A placement is blind if
the router predicted nothing, or less than half of what the engine then found cached, or if it went to a
worker that held less than half of what another held, of which the gateway's index knew less than half. An
onlooker that is never restarted says what workers hold. A placement is stale if less than half of what the
router predicted was found. With --redis the server is one's own: it is not restarted.

Phases: steady; Redis is killed, stays away, comes back empty, and a gateway is replaced after; every gateway
is replaced in turn; Redis is killed while gateways are replaced; a worker is killed and comes back empty.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bien.core.clock import WallClock
from bien.core.errors import BienError
from bien.core.kv.hashing import extend_chain, tenant_key
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.testing.toy import write_toy
from bien.core.worker.client import WorkerClient
from bien.core.worker.messages import StepFrame
from bien.gateway.feed import IndexFeed
from bien.gateway.index import KVIndex
from bien.gateway.metrics import Totals
from bien.replay.bench.restart_fleet import BLOCK, Fleet, Site, deployment
from bien.replay.redis_server import RedisServer
from bien.replay.run import new_loop
from bien.replay.say import say
from bien.replay.signals import ENDS

TURNS = 24  # of a session; then another begins in its place
STEP_TOKENS = 96  # that each turn adds
SYSTEM_TOKENS = 512  # that all sessions begin with
PHASES = ("steady", "redis", "gateways", "both", "worker")


@dataclass(slots=True)
class Counts:
    """Of one phase. Written by `Protocol`."""

    placements: int = 0
    blind: int = 0
    stale: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cases: list[dict[str, Any]] = field(default_factory=list)  # of the blind ones


def is_blind(predicted: int, found: int, worker: str, truth: dict[str, int], known: dict[str, int]) -> bool:
    """Of a placement at `worker`, as above; `truth` and `known` are tokens held by worker, just before it."""
    best = max(truth, key=lambda name: truth[name])
    unknown = 2 * known.get(best, 0) < truth[best]
    return 2 * predicted < found or (2 * truth.get(worker, 0) < truth[best] and unknown)


class Onlooker:
    """Knows what workers hold, from their own frames."""

    def __init__(self, index: KVIndex) -> None:
        self.index = index
        self._feed = IndexFeed(index, WallClock(), Totals())
        self._clients: dict[str, WorkerClient] = {}

    def see(self, client: WorkerClient) -> None:
        self._clients[client.info.id] = client
        client.attach(self)
        self._feed.join(client)

    async def settled(self) -> None:
        await self._feed.settled(10.0)

    def on_frame(self, worker: WorkerClient, frame: StepFrame) -> None:
        if frame.batch is not None and self._clients.get(worker.info.id) is worker:
            self._feed.apply(worker, frame.batch)

    def on_death(self, worker: WorkerClient, reason: str) -> None:
        if self._clients.get(worker.info.id) is worker:
            del self._clients[worker.info.id]
            self._feed.leave(worker.info.id)

    async def close(self) -> None:
        await self._feed.close()
        for client in self._clients.values():
            await client.close()


class Protocol:
    def __init__(
        self, fleet: Fleet, onlooker: Onlooker, sessions: int, phases: dict[str, Counts], seed: int = 0
    ) -> None:
        self.phases = phases
        self._fleet = fleet
        self._onlooker = onlooker
        self._rng = random.Random(seed)
        self._key = tenant_key("", fleet.composition.spec.secret.encode())
        self._system = [self._rng.randrange(3, 250) for _ in range(SYSTEM_TOKENS)]
        self._sessions = sessions
        self._begun = 0
        self._turns = 0

    async def phase(self, name: str, requests: int, event: Callable[[], Awaitable[None]] | None) -> None:
        """So many requests; the event comes after a quarter of them, and whatever it takes, requests go on
        until it is over."""
        counts = self.phases[name] = Counts()
        due, over = asyncio.Event(), asyncio.Event()

        async def happen() -> None:
            await due.wait()
            try:
                if event is not None:
                    await event()
            finally:
                over.set()

        def wanted() -> bool:
            if counts.placements >= requests // 4:
                due.set()
            return counts.placements < requests or not over.is_set()

        async with asyncio.TaskGroup() as group:  # one that fails ends the others
            group.create_task(happen())
            for _ in range(self._sessions):
                group.create_task(self._session(counts, wanted))

    async def _session(self, counts: Counts, wanted: Callable[[], bool]) -> None:
        while wanted():
            self._begun += 1
            name, tokens = f"s{self._begun}", list(self._system)
            for _ in range(TURNS):
                if not wanted():
                    return
                tokens += [self._rng.randrange(3, 250) for _ in range(STEP_TOKENS)]
                if not await self._turn(name, tokens, counts):
                    break
                await WallClock().sleep(self._rng.random() * 0.05)

    async def _turn(self, name: str, tokens: list[int], counts: Counts) -> bool:
        """Whether it went well."""
        self._turns += 1
        sites = [site for site in self._fleet.sites if site.serving]
        site = sites[self._turns % len(sites)]
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        request = GenerateRequest(f"r{self._turns}", TokenIds.of(tokens), sampling, session=name)
        try:
            before = self._knowledge(site, TokenIds.of(tokens))
            async with site.gateway.generate(request, restart=lambda: None) as stream:
                placed = stream.placements
                async for _ in stream:
                    pass
        except BienError as error:
            counts.failed += 1
            say(f"failed: {error}")
            return False
        counts.placements += 1
        counts.prompt_tokens += len(tokens)
        counts.cached_tokens += stream.cached
        if stream.placements != placed:
            return True  # its worker died: what was known before is not what it was placed by
        predicted, found = stream.decision.predicted_cached, stream.cached
        truth, known = before
        if is_blind(predicted, found, stream.worker, truth, known):
            counts.blind += 1
            case = {"worker": stream.worker, "predicted": predicted, "found": found}
            counts.cases.append({**case, "truth": truth, "known": known})
        if predicted > 2 * found:
            counts.stale += 1
        return True

    def _knowledge(self, site: Site, prompt: TokenIds) -> tuple[dict[str, int], dict[str, int]]:
        """Tokens that each worker holds, in truth and as the gateway's index says."""
        ids = [info.id for info in site.gateway.infos]
        hashes = extend_chain(self._key, b"", prompt, BLOCK, len(prompt) - 1)
        places = [(id, 0) for id in ids]
        truth, known = (
            [BLOCK * n for n in index.overlaps(hashes, places)]
            for index in (self._onlooker.index, site.index)
        )
        return dict(zip(ids, truth, strict=True)), dict(zip(ids, known, strict=True))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All of it; raises what went wrong, at the end of its servers too."""
    phases: dict[str, Counts] = {}
    await _run(args, phases)
    return _result(phases)


async def _run(args: argparse.Namespace, phases: dict[str, Counts]) -> None:
    async with AsyncExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        write_toy(folder / "toy", max_position_embeddings=8192)
        server: list[RedisServer] = []
        if not args.redis:
            server.append(await RedisServer.start())
            opened.push_async_callback(lambda: server[0].stop())
        url = args.redis or server[0].url
        of = deployment(folder / "toy", url, args.workers, 1 << 17, 3.0, step_ms=2.0, token_ms=0.02)
        fleet = await Fleet.open(of, args.gateways)
        opened.push_async_callback(fleet.close)
        found = PluginManager.load("").find("kv_index", "memory").provider
        onlooker = Onlooker(found.factory(found.config_type(), Context(clock=WallClock())))
        opened.push_async_callback(onlooker.close)
        for number in range(args.workers):
            onlooker.see(await fleet.client(number))
        await onlooker.settled()
        protocol = Protocol(fleet, onlooker, args.sessions, phases)
        clock = WallClock()

        async def restart_redis() -> None:
            if not server:
                return
            await server[0].stop()
            await clock.sleep(args.away)
            server[0] = await server[0].restart()

        async def redis() -> None:
            await restart_redis()
            await _healthy(fleet)
            await fleet.replace(0)

        async def gateways() -> None:
            for number in range(args.gateways):
                await fleet.replace(number)

        async def both() -> None:
            await asyncio.gather(restart_redis(), gateways())

        async def worker() -> None:
            await fleet.kill_worker(0)
            onlooker.see(await fleet.client(0))

        events = {"redis": redis, "gateways": gateways, "both": both, "worker": worker}
        for name in args.phases:
            await protocol.phase(name, args.requests // len(args.phases), events.get(name))
            say(f"{name}: {_told(protocol.phases[name])}")


async def _healthy(fleet: Fleet) -> None:
    """Redis is back, and workers have published to it."""
    async with asyncio.timeout(60):
        while any(site.index.health.state != "ok" for site in fleet.sites):
            await WallClock().sleep(0.05)


def _told(counts: Counts) -> str:
    reuse = counts.cached_tokens / max(1, counts.prompt_tokens)
    return (
        f"{counts.blind} of {counts.placements} placements blind, {counts.stale} stale, "
        f"{counts.failed} failed, reuse {reuse:.3f}"
    )


def _result(phases: dict[str, Counts]) -> dict[str, Any]:
    names = ("placements", "blind", "stale", "failed")
    placements, blind, stale, failed = (sum(getattr(c, name) for c in phases.values()) for name in names)
    return {
        "placements": placements,
        "blind": blind,
        "blind_share": round(blind / max(1, placements), 5),
        "stale": stale,
        "failed": failed,
        "phases": {
            name: {
                "placements": c.placements,
                "blind": c.blind,
                "stale": c.stale,
                "failed": c.failed,
                "reuse": round(c.cached_tokens / max(1, c.prompt_tokens), 4),
                "cases": c.cases[:5],
            }
            for name, c in phases.items()
        },
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--requests", type=int, default=2000)
    made.add_argument("--workers", type=int, default=4)
    made.add_argument("--gateways", type=int, default=3)
    made.add_argument("--sessions", type=int, default=24)
    made.add_argument("--away", type=float, default=2.0, help="seconds that Redis is gone")
    made.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    made.add_argument("--redis", default="")
    made.add_argument("--limit", type=float, default=1800.0, help="seconds for all of it")
    return made


async def _main(args: argparse.Namespace, phases: dict[str, Counts]) -> None:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for name in ENDS:
        loop.add_signal_handler(name, task.cancel, name.name)
    async with asyncio.timeout(args.limit):
        await _run(args, phases)


def main() -> int:
    """Whatever ends it, what was measured until then is printed, and why it ended."""
    args, phases, ended = parser().parse_args(), dict[str, Counts](), ""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        try:
            runner.run(_main(args, phases))
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            ended = f"ended by {error.args[0] if error.args else 'SIGINT'}"
        except TimeoutError:
            ended = f"not done within {args.limit:g} seconds, or something in it was not; see --limit"
            traceback.print_exc()
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    json.dump(_result(phases) | ({"ended": ended} if ended else {}), sys.stdout)
    print(flush=True)
    return 1 if ended else 0


if __name__ == "__main__":
    sys.exit(main())
