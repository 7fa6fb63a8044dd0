"""1, 2, 4, 5: engines and gateways that start anew, caches that are emptied, messages that get lost."""

from __future__ import annotations

from bien.replay.chaos import moves
from bien.replay.chaos.ask import Reply
from bien.replay.chaos.case import ENOUGH, Case, Log, NotApplicable
from bien.replay.chaos.engine import Habits
from bien.replay.chaos.router import Router, until
from bien.replay.chaos.world import World

HALF = 0.5
REPLAYS = 3  # asked for because of one gap, at most


async def restarted(world: World, log: Log) -> None:
    async with world.router() as router:
        placed = await moves.twins(world, router)
        await world.engines[0].restart()
        await moves.noise(world, 0)
        await router.settle()
        what = "an engine starts anew: what it had is looked for at the other holder only"
        log.found(what, await moves.again(router, placed), moves.DECISIVE, HALF)
        if router.own:
            count = await router.metric("bien_index_asked_total")
            log.check("the index took the new life", count > 0, f"{count:.0f} snapshots taken")
    async with world.router(replay=False) as router:
        placed = await moves.twins(world, router)
        await world.engines[0].restart(quietly=True)
        await moves.noise(world, 0)
        await router.settle()
        what = "numbers begin at 0 again and nothing can be replayed: the same"
        log.found(what, await moves.again(router, placed), moves.DECISIVE, HALF)
    try:
        await _worker_restarted(world, log)
    except NotApplicable as error:
        log.skip("a real worker is killed and starts anew", str(error))


async def _worker_restarted(world: World, log: Log) -> None:
    fleet = await world.fleet()
    async with world.before(fleet) as router:
        prompts = world.prompts.several(moves.PLAIN)
        first = await router.all(prompts, at_once=3)
        for reply in first:
            moves.absent(reply)
        at = fleet.named(first[0].worker)
        held = [p for p, reply in zip(prompts, first, strict=True) if reply.worker == first[0].worker]
        await fleet.kill(at)
        await fleet.revive(at)

        async def back() -> bool:
            workers = await router.metric("bien_placements_total")
            return workers > 0 and len(await _workers(router)) == len(fleet.workers)

        await until(20.0, back)
        replies = await router.all(held)
        claimed = sum(max(0, reply.predicted) for reply in replies)
        found = sum(max(0, reply.cached) for reply in replies)
        log.answered("a real worker is killed and starts anew: requests go on", replies)
        log.check(
            "what it had is not claimed of it any more",
            claimed == found == 0,
            f"{claimed} tokens claimed and {found} found of {len(held)} prompts that it had",
        )


async def _workers(router: Router) -> list[str]:
    async with router.http.get(f"{router.url}/metrics") as answer:
        text = await answer.text()
    return [line for line in text.splitlines() if line.startswith("bien_worker_running{")]


async def cleared(world: World, log: Log) -> None:
    async with world.router() as router:
        placed = await moves.twins(world, router)
        await world.engines[0].reset()
        await router.settle()
        what = "an engine empties its cache and says so: what it had is looked for at the other holder"
        log.found(what, await moves.again(router, placed), moves.DECISIVE, HALF)
    async with world.router(Habits(lazy_clear=True)) as router:
        placed = await moves.twins(world, router)
        await world.engines[0].reset()  # says so with its next step
        replies = await moves.again(router, placed)
        misled = sum(reply.hit < HALF for reply in replies)
        log.check(
            "it says so at its next step only: that step may be misled, and no other",
            misled <= 2 and all(reply.ok for reply in replies),
            f"{misled} of {len(replies)} requests misled (at most 2)",
        )


async def gaps(world: World, log: Log) -> None:
    async with world.router() as router:
        moves.listening(router)
        placed = await moves.warm(world, router)
        engine, before = world.engines[1], world.engines[1].replays_asked
        engine.wire.lose = True
        for _, prompt, at in placed:
            if at != engine.number:
                await engine.hold(prompt)
                await world.engines[at].drop(prompt)
        engine.wire.lose = False
        await moves.noise(world, 1)
        await router.settle()
        replies = await moves.again(router, placed)
        asked = engine.replays_asked - before
        if asked:
            log.found("messages are lost on the way and can be had again", replies)
        else:
            log.skip("messages are lost on the way and can be had again", "it asks for no replay")
        for _ in range(20):
            await moves.noise(world, 1)
        await router.settle()
        asked = engine.replays_asked - before
        log.check("one gap, and no endless recovery", asked <= REPLAYS, f"{asked} replays asked for")
    async with world.router() as router:
        placed = await moves.twins(world, router)
        engine, before = world.engines[0], world.engines[0].replays_asked
        engine.wire.forget = True
        for one in placed:
            await engine.drop(one.prompt)
        engine.wire.forget = False
        for _ in range(10):
            await moves.noise(world, 0)
        await router.settle()
        what = "removals are lost for ever: what the engine may not have is looked for elsewhere"
        log.found(what, await moves.again(router, placed), moves.DECISIVE, HALF)
        asked = engine.replays_asked - before
        log.check("nor an endless recovery then", asked <= REPLAYS, f"{asked} replays asked for")
    if not world.own:
        log.skip("an engine without events is alarmed", "it looks into our own /health")
        return
    async with world.router(Habits(events=False), fresh=True) as router:
        for _ in range(3):
            await moves.warm(world, router, 3)

        async def alarmed() -> bool:
            return len((await router.health()).get("alarms", {})) == len(world.engines)

        seconds = await until(8.0, alarmed)
        alarms = (await router.health()).get("alarms", {})
        causes = ", ".join(sorted({cause for of in alarms.values() for cause in of}))
        log.check(
            "engines that never tell of their caches are alarmed",
            seconds >= 0,
            f"{len(alarms)} of {len(world.engines)} alarmed ({causes or 'no cause'})",
        )


async def fresh(world: World, log: Log) -> None:
    if not world.own:
        if not world.early:
            raise NotApplicable(
                "it ran before its engines had anything; start it while the suite waits for it"
            )
        assert world.given is not None
        moves.listening(world.given)
        log.found("what engines had before it started", [await world.given.ask(m) for m in world.early])
        return
    async with world.router() as first:
        placed = await moves.warm(world, first)
        async with world.router(again=True) as second:
            what = "a gateway that starts later finds what engines had"
            log.found(what, await moves.again(second, placed), chance=1 / len(world.engines))
    async with world.router(Habits(token_ms=0.08)) as first:
        talks = [one.messages for one in await moves.warm(world, first)]
        async with world.router(again=True, replay=False) as late:
            replies, before = list[Reply](), 0
            for _ in range(3):
                before = sum(reply.prompt for reply in replies)
                talks = [[*m, {"role": "user", "content": world.prompts.text(400)}] for m in talks]
                replies = await late.all(talks)
                await late.settle()
            claimed = sum(max(0, reply.predicted - reply.cached) for reply in replies)
            log.check(
                "one that never hears of the roots claims nothing that is not there",
                claimed <= 16 * len(replies),
                f"{claimed} tokens claimed and not found, of {sum(r.prompt for r in replies)}",
            )
            said = before / max(1, sum(reply.prompt for reply in replies))
            log.found("and keeps its own sessions together", replies, ENOUGH * said)
    fleet = await world.fleet()
    async with world.before(fleet) as router:
        prompts = world.prompts.several(moves.PLAIN)
        for reply in await router.all(prompts, at_once=3):
            moves.absent(reply)
    async with world.before(fleet, fresh=True) as router:
        replies = await router.all(prompts)
        log.found(
            "a gateway is started anew and takes all from Redis", replies, chance=1 / len(fleet.workers)
        )
        blind = sum(reply.predicted <= 0 for reply in replies)
        asked = await router.metric("bien_index_asked_total")
        log.check(
            "and decides nothing blindly",
            blind == 0,
            f"{blind} of {len(replies)} decisions blind; {asked:.0f} workers asked for their caches",
        )


CASES = (
    Case(1, "an engine restarts", "llm-d-router#2853", restarted),
    Case(2, "a cache is emptied", "aibrix#2287", cleared),
    Case(4, "messages get lost", "dynamo#7072, #11194", gaps),
    Case(5, "a gateway starts late", "sglang#39750", fresh),
)
