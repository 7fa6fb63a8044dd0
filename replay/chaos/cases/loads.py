"""6, 7, 8: memory that grows, hot spots, and load that other gateways have brought."""

from __future__ import annotations

import asyncio

import psutil

from bien.core.clock import WallClock
from bien.replay.chaos import moves
from bien.replay.chaos.ask import Message, hits, places
from bien.replay.chaos.case import Case, Log, NotApplicable
from bien.replay.chaos.engine import Habits, Served
from bien.replay.chaos.router import Router
from bien.replay.chaos.world import World

COLD = 24  # prompts, one after the other
HOT = 36  # requests that share a long beginning
BLOCKS, FIRST, MORE = 30_000, 2, 4  # blocks that come and go in each round; rounds
LEAK = 48.0  # bytes of memory per block that came and went, above which it is one
# An engine that had no core for a second looks slow, and a router that learns is right to avoid it for a
# while; one that never spreads does so at no try.
TRIES = 2
BUSIEST = 0.6  # share of the requests that one of three engines may get
OWN, OTHER = 12, 10  # requests through this gateway, and by others
PATIENCE = 0.8  # seconds of a client for a short prompt
LOOKED = 1.5  # seconds until a router must have looked at its engines' load


async def memory(world: World, log: Log) -> None:
    async with world.router(fresh=True) as router:
        if not router.pid:
            raise NotApplicable("its process is not on this machine, or not ours to look at")
        moves.listening(router)
        process, sizes = psutil.Process(router.pid), []
        engine = world.engines[0]
        for _ in range(FIRST + MORE):
            # A few hundred prompts' worth in each message, as engines send them.
            ids = [world.prompts.rng.randrange(16, 250) for _ in range(16 * BLOCKS)]
            parts = [Served(ids[i : i + 48_000], "", 0) for i in range(0, len(ids), 48_000)]
            for part in parts:
                await engine.hold(part)
            for part in parts:
                await engine.drop(part)
            await router.settle()
            engine.publisher.kept.clear()  # engines keep so many for replays and no more
            sizes.append(process.memory_info().rss)
        grown = sizes[-1] - sizes[FIRST - 1]
        per = grown / (MORE * BLOCKS)
        log.check(
            "blocks come and go: memory does not grow with all that ever was",
            per <= LEAK,
            f"{sizes[-1] / 2**20:.0f} MiB, {grown / 2**20:+.1f} over {MORE * BLOCKS:,} blocks, "
            f"{per:.0f} bytes each (at most {LEAK:.0f})",
        )


async def hot(world: World, log: Log) -> None:
    even = 1 / len(world.engines)
    async with world.router(Habits(token_ms=0.1)) as router:
        good, tried = False, 0
        while not good and tried < TRIES:
            replies = await router.all(world.prompts.several(COLD, 600))
            counts = _counts(router, places(replies))
            good, tried = min(counts) >= 2 and max(counts) <= BUSIEST * COLD, tried + 1
        log.check(
            "cold prompts one after the other are spread",
            good,
            f"{_spread(counts)} (each at least 2, at most {BUSIEST:.0%}){_tried(tried)}",
        )
        good, tried = False, 0
        while not good and tried < TRIES:
            system = world.prompts.text(3000)
            moves.absent(await router.ask(world.prompts.fresh(1000, system)))
            replies = await router.all(world.prompts.several(HOT, 1500, system), at_once=HOT // 2)
            counts = _counts(router, places(replies))
            good, tried = max(counts) <= BUSIEST * HOT, tried + 1
        log.answered("a system prompt that one engine has is asked for by many at once", replies)
        log.check(
            "and does not keep them all there",
            good,
            f"{_spread(counts)}; {hits(replies):.0%} found cached "
            f"(at most {BUSIEST:.0%} at one engine){_tried(tried)}",
        )
        talks = world.prompts.several(12, 1500)
        for reply in await router.all(talks, at_once=12):
            moves.absent(reply)
        for _ in range(2):
            talks = [_more(world, talk) for talk in talks]
            replies = await router.all(talks, at_once=12)
        log.found("under load sessions stay where their prompts are", replies, 0.7, even)
    slow = [Habits(token_ms=0.9), *[Habits()] * (len(world.engines) - 1)]
    async with world.router(slow, fresh=True) as router:
        await router.all(world.prompts.several(9, 800), at_once=3)
        replies = await router.all(world.prompts.several(30, 800), at_once=9)
        share = places(replies).get("e0", 0) / len(replies)
        log.check(
            "an engine that is six times slower gets less than its even share",
            share < even,
            f"{share:.0%} of {len(replies)} requests (even {even:.0%})",
        )


async def others(world: World, log: Log) -> None:
    async with world.router() as router:
        engine = router.engines[await _favourite(world, router)]
        # Another gateway's: sent to an engine without a word to this one.
        direct = Router(engine.url, router.model, router.http, world.engines, False, 0)
        load = [asyncio.create_task(direct.ask(m)) for m in world.prompts.several(OTHER, 20_000)]
        try:
            await WallClock().sleep(LOOKED)
            waiting = sum(not task.done() for task in load)
            before = len(engine.asked)
            # One after the other, and who has to wait leaves: a router's own books must not tell it.
            await router.all(world.prompts.several(OWN, 500), patience=PATIENCE)
            misled = len(engine.asked) - before
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
        log.check(
            "an engine is busy with others' requests: new ones go elsewhere",
            misled <= 1 and waiting > 0,
            f"{misled} of {OWN} sent there (even {OWN // len(world.engines)}, at most 1), "
            f"behind {waiting} of the others'",
        )
    try:
        fleet = await world.fleet()
    except NotApplicable as error:
        log.skip("two gateways of one fleet", str(error))
        return
    async with world.before(fleet) as one, world.before(fleet, fresh=True) as two:
        prompts = world.prompts.several(24, 3000)
        halves = await asyncio.gather(*(r.all(prompts[i::2], at_once=12) for i, r in enumerate((one, two))))
        replies = [reply for half in halves for reply in half]
        counts = sorted((places(replies) | {}).values())
        even = len(replies) / len(fleet.workers)
        log.answered("two gateways get 12 requests each at once", replies)
        log.check(
            "and do not choose the same workers",
            len(counts) == len(fleet.workers) and counts[-1] <= 1.5 * even,
            f"{_spread(counts)}, even {even:.0f} (at most {1.5 * even:.0f})",
        )


async def _favourite(world: World, router: Router) -> int:
    """The engine that it sends most cold prompts to."""
    counts = _counts(router, places(await router.all(world.prompts.several(9, 300))))
    return counts.index(max(counts))


def _more(world: World, talk: list[Message]) -> list[Message]:
    return [
        *talk,
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": world.prompts.text(200)},
    ]


def _counts(router: Router, found: dict[str, int]) -> list[int]:
    return [found.get(f"e{engine.number}", 0) for engine in router.engines]


def _tried(times: int) -> str:
    return f"; at try {times} of {TRIES}" if times > 1 else ""


def _spread(counts: list[int]) -> str:
    return " / ".join(map(str, counts))


CASES = (
    Case(6, "memory grows", "dynamo#4429", memory),
    Case(7, "hot spots", "dynamo#737, sglang#14305, #32195, #32983", hot),
    Case(8, "load that others bring", "smg#1621", others),
)
