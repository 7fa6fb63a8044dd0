"""9, 10, 11, 12, 16: what engines call their blocks, of how many tokens they are, and how they say so."""

from __future__ import annotations

from bien.core.clock import WallClock
from bien.replay.chaos import moves
from bien.replay.chaos.ask import Message
from bien.replay.chaos.cache import Event
from bien.replay.chaos.case import Case, Log
from bien.replay.chaos.engine import Habits, Served
from bien.replay.chaos.router import Router, until
from bien.replay.chaos.wire import FORMS
from bien.replay.chaos.world import World

PREAMBLE = 5  # tokens
ROUNDS = 3
BIG = 20_000  # blocks that one message removes


async def hashes(world: World, log: Log) -> None:
    each = [Habits(naming="counted" if n else "ints", seed=str(n)) for n in range(len(world.engines))]
    async with world.router(each, fresh=True) as router:
        placed = await moves.elsewhere(world, router)
        replies = await moves.again(router, placed)
        for what, mine in (
            (
                "an engine has a hash of its own",
                [r for r, one in zip(replies, placed, strict=True) if not one.engine],
            ),
            (
                "others call different blocks by the same names",
                [r for r, o in zip(replies, placed, strict=True) if o.engine],
            ),
        ):
            log.found(f"{what}: prompts are looked for where they are", mine, moves.DECISIVE, 1 / len(each))


async def sizes(world: World, log: Log) -> None:
    each = [Habits(block=(16, 32, 64, 128)[n % 4]) for n in range(1, len(world.engines) + 1)]
    async with world.router(each, fresh=True) as router:
        placed = await moves.elsewhere(world, router)
        sizes = ", ".join(str(habits.block) for habits in each)
        what = f"engines have blocks of {sizes} tokens: prompts are looked for where they are"
        log.found(what, await moves.again(router, placed), moves.DECISIVE, 1 / len(each))


async def templates(world: World, log: Log) -> None:
    async with world.router() as router:
        talks = [
            [{"role": "system", "content": world.prompts.text(300)}, *messages]
            for messages in world.prompts.several(6, 1500)
        ]
        replies = await router.all(talks, at_once=3)
        for reply in replies:
            moves.absent(reply)
        for _ in range(2):
            talks = [_longer(world, talk, reply.text) for talk, reply in zip(talks, replies, strict=True)]
            replies = await router.all(talks, at_once=3)
        what = "conversations with a system's, an assistant's and a user's words find their earlier turns"
        log.found(what, replies, 0.8, 1 / len(world.engines))
    async with world.router(Habits(preamble=PREAMBLE), fresh=True, **_canary(world)) as router:
        placed = await moves.warm(world, router)
        replies = []
        for _ in range(ROUNDS):
            replies += await moves.again(router, placed)
        what = "engines count other tokens than the router: repeats find what they left"
        log.found(what, replies, chance=1 / len(world.engines))
        if not router.own:
            log.skip("and the cause is named", "it looks into our own /health")
            return

        async def named() -> bool:
            return "template" in await _causes(router)

        await until(8.0, named)
        causes = await _causes(router)
        log.check(
            "and the cause is named", "template" in causes, f"in /health: {', '.join(causes) or 'none'}"
        )


def _canary(world: World) -> dict[str, bool]:
    return {"canary": True} if world.own else {}


def _longer(world: World, talk: list[Message], answer: str) -> list[Message]:
    said = [{"role": "assistant", "content": answer}, {"role": "user", "content": world.prompts.text(150)}]
    return [*talk, *said]


async def _causes(router: Router) -> list[str]:
    workers = (await router.health()).get("routing", {}).get("workers", {})
    return sorted({worker["cause"] for worker in workers.values()})


async def forms(world: World, log: Log) -> None:
    each = [Habits(form=FORMS[n % len(FORMS)]) for n in range(len(world.engines))]
    async with world.router(each, fresh=True) as router:
        placed = await moves.elsewhere(world, router)
        replies = await moves.again(router, placed)
        for n, form in enumerate(FORMS):
            mine = [r for r, one in zip(replies, placed, strict=True) if one.engine % len(FORMS) == n]
            if mine:
                what = f"events as {form}: prompts are looked for where they are"
                log.found(what, mine, moves.DECISIVE, 1 / len(each))
        await world.engines[0].become(Habits(form="strange"))
        placed = await moves.warm(world, router)
        what = "one engine's events are of a form that nobody knows: requests go on"
        log.answered(what, await moves.again(router, placed))
        if not router.own:
            log.skip("and that is alarmed", "it looks into our own /health")
            return

        async def alarmed() -> bool:
            return "undecodable" in (await router.health()).get("alarms", {}).get("e-0", {})

        seconds = await until(8.0, alarmed)
        count = await router.metric("bien_remote_events_undecodable_total", worker="e-0")
        log.check("and that is alarmed", seconds >= 0 and count > 0, f"{count:.0f} counted as undecodable")


async def removals(world: World, log: Log) -> None:
    async with world.router() as router:
        placed = await moves.twins(world, router)
        engine = world.engines[0]
        names: list[Event] = [e for one in placed for e in engine.cache.drop(one.prompt.ids)]
        unknown = b"\x00" * 32
        mixed = [
            [unknown, *event["block_hashes"][:3], unknown, *event["block_hashes"][3:]] for event in names
        ]
        await engine.tell([{**event, "block_hashes": h} for event, h in zip(names, mixed, strict=True)])
        await router.settle()
        what = "a removal names blocks that are not known: the others are gone all the same"
        log.found(what, await moves.again(router, placed), moves.DECISIVE, 0.5)
        many = Served([world.prompts.rng.randrange(16, 200) for _ in range(16 * BIG)], "", 0)
        await world.engines[-1].hold(many)
        await router.settle()
        clock = WallClock()
        began = clock.time()
        await world.engines[-1].drop(many)
        replies = await router.all(world.prompts.several(12, 200), at_once=4)
        slowest = max(reply.ttft for reply in replies) * 1000
        what = f"{BIG:,} blocks are removed at once: requests meanwhile are answered"
        log.answered(what, replies)
        log.check(
            "in time",
            slowest < 5000,
            f"slowest first token {slowest:.0f} ms, all in {clock.time() - began:.1f} s",
        )


CASES = (
    Case(9, "hash functions and seeds", "vllm#51875, LMCache#1139", hashes),
    Case(10, "templates and tokenizers", "sglang#27386, production-stack#1045", templates),
    Case(11, "block sizes", "TensorRT-LLM#14882", sizes),
    Case(12, "forms of messages", "vllm#42892", forms),
    Case(16, "removals of what is not known", "dynamo#14652", removals),
)
