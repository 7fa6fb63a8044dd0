"""3, 13, 14, 15, 17: ownership that ends, tenants, ends of requests, and whether hits are what they seem."""

from __future__ import annotations

import asyncio

from bien.core.clock import WallClock
from bien.replay.chaos import moves
from bien.replay.chaos.ask import Reply, hits
from bien.replay.chaos.case import ENOUGH, Case, Log, NotApplicable
from bien.replay.chaos.engine import Habits
from bien.replay.chaos.gateways import LEASE
from bien.replay.chaos.router import Router, until
from bien.replay.chaos.world import World

FEW = 6  # prompts
LEAVERS = 6  # clients that leave in the middle of an answer
ALMOST = 0.1  # how far predicted and found tokens may part


async def ownership(world: World, log: Log) -> None:
    fleet = await world.fleet()
    async with world.before(fleet) as router:
        prompts = world.prompts.several(moves.PLAIN)
        first = await router.all(prompts, at_once=3)
        for reply in first:
            moves.absent(reply)
        worker = first[0].worker
        had = [p for p, reply in zip(prompts, first, strict=True) if reply.worker == worker]
        await WallClock().sleep(0.3)
        before = [name for name in await fleet.keys() if name.endswith(f":worker:{worker}")]
        await fleet.kill(fleet.named(worker))

        async def gone() -> bool:
            return not any(name in before for name in await fleet.keys())

        seconds = await until(4 * LEASE, gone)
        keys = await fleet.keys()
        log.check(
            "a worker dies without a word: its lease ends by itself",
            bool(before) and seconds >= 0,
            f"after {seconds:.1f} s (leases of {LEASE:g} s)" if seconds >= 0 else "it does not end",
        )
        forever = [name for name, ttl in keys.items() if ttl < 0]
        log.check(
            "nothing in Redis lives for ever",
            not forever,
            f"{len(forever)} of {len(keys)} keys {forever[:2]}",
        )
        log.answered("what it had is computed elsewhere", await router.all(had))
        await fleet.revive(fleet.named(worker))
        async with world.before(fleet, fresh=True) as late:
            replies = await late.all(had)
            claimed = sum(max(0, reply.predicted - reply.cached) for reply in replies)
            log.check(
                "its successor is not credited with it",
                claimed <= 16 * len(replies),
                f"{claimed} tokens claimed and not found, of {sum(r.prompt for r in replies)}",
            )


async def tenants(world: World, log: Log) -> None:
    async with world.router() as router:
        placed = await moves.warm(world, router, FEW, key="alice")
        await router.settle()
        log.found("a tenant finds what is his", await moves.again(router, placed, key="alice"))
        _nothing(log, "another one finds nothing of it", await moves.again(router, placed, key="bob"))
        _nothing(log, "nor does who is nobody's", await moves.again(router, placed))
        make = moves.elsewhere if router.listened_to else moves.warm
        salted = await make(world, router, FEW, salt="s1")
        if not any(one.prompt.salt for one in salted):
            log.check("salts reach the engines", False, "no request had one there")
            return
        if router.listened_to:
            what = "salted prompts are looked for where they are"
            replies = await moves.again(router, salted, salt="s1")
            log.found(what, replies, moves.DECISIVE, 1 / len(world.engines))
        _nothing(log, "another salt finds nothing of them", await moves.again(router, salted, salt="s2"))
        _nothing(log, "nor does no salt", await moves.again(router, salted))
        mixed = await moves.warm(world, router, FEW, key="k", salt="x:y")
        replies = await moves.again(router, mixed, key="k:x", salt="y")
        _nothing(log, "nor do names and salts that read the same together", replies)
    try:
        fleet = await world.fleet()
    except NotApplicable as error:
        log.skip("the same of real workers", str(error))
        return
    async with world.before(fleet) as router:
        prompts = world.prompts.several(FEW)
        for reply in await router.all(prompts, at_once=3, key="alice"):
            moves.absent(reply)
        log.found("real workers: a tenant finds what is his", await router.all(prompts, key="alice"))
        _nothing(log, "and another one nothing of it", await router.all(prompts, key="bob"))


def _nothing(log: Log, what: str, replies: list[Reply]) -> None:
    failed = [reply for reply in replies if not reply.ok]
    found = max((reply.cached for reply in replies), default=0)
    evidence = f"at most {found} tokens of {len(replies)} prompts found cached"
    log.check(what, found <= 0 and not failed, evidence + (f"; {len(failed)} failed" if failed else ""))


async def ends(world: World, log: Log) -> None:
    async with world.router(Habits(pace_ms=20.0)) as router:
        before = sum(engine.gone for engine in world.engines)
        tasks = [
            asyncio.create_task(router.ask(messages, 2000))
            for messages in world.prompts.several(LEAVERS, 400)
        ]

        async def writing() -> bool:
            return sum(len(engine.running) for engine in world.engines) == LEAVERS

        await until(10.0, writing)
        await WallClock().sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        async def left() -> bool:
            return not any(engine.running for engine in world.engines)

        seconds = await until(5.0, left)
        gone = sum(engine.gone for engine in world.engines) - before
        log.check(
            "clients leave in the middle of answers: engines stop writing",
            seconds >= 0 and gone == LEAVERS,
            f"{gone} of {LEAVERS} ended there, {sum(len(e.running) for e in world.engines)} under way",
        )
        if router.own:
            held = await router.metric("bien_inflight_requests")
            log.check("and the gateway holds nothing of them", held == 0, f"{held:.0f} requests in flight")
    async with world.router() as router:
        for engine in world.engines:
            engine.cut_after = 18
        replies = await router.all(world.prompts.several(FEW, 400), 40)
        seeming = sum(reply.whole and not reply.error for reply in replies)
        log.check(
            "engines break off in the middle of answers: no answer looks whole",
            seeming == 0,
            f"{seeming} of {len(replies)} looked whole",
        )
        for engine in world.engines:
            engine.cut_after = None
        log.answered("and the next ones are", await router.all(world.prompts.several(FEW, 400)))
    try:
        fleet = await world.fleet()
    except NotApplicable as error:
        log.skip("real workers", str(error))
        return
    async with world.before(fleet) as router:
        tasks = [
            asyncio.create_task(router.ask(m, 1500, ignore_eos=True))
            for m in world.prompts.several(2 * LEAVERS, 400)
        ]

        async def running() -> bool:
            return await router.metric("bien_worker_running") >= LEAVERS

        await until(10.0, running)
        await WallClock().sleep(0.3)
        for task in tasks[:LEAVERS]:
            task.cancel()
        await asyncio.gather(*tasks[:LEAVERS], return_exceptions=True)
        await fleet.kill(0)
        replies = [r for r in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(r, Reply)]
        await fleet.revive(0)
        silent = sum(not reply.ok and not reply.error for reply in replies)
        log.check(
            "a real worker dies under requests: they end whole, or with an error",
            silent == 0 and len(replies) == LEAVERS,
            f"{sum(r.ok for r in replies)} whole, {sum(bool(r.error) for r in replies)} with an error, "
            f"{silent} without a word",
        )

        async def free() -> bool:
            used = await router.metric("bien_worker_kv_usage_ratio")
            return used + await router.metric("bien_inflight_requests") == 0

        seconds = await until(8.0, free)
        used = await router.metric("bien_worker_kv_usage_ratio")
        held = await router.metric("bien_inflight_requests")
        log.check(
            "and nothing of them is held, in workers or gateway",
            seconds >= 0,
            f"KV in use {used:.2%}, {held:.0f} requests in flight",
        )
    log.skip("blocks handed from prefill to decode workers", "no router here hands over")


async def luck(world: World, log: Log) -> None:
    async with world.router() as router:
        chance = 1 / len(world.engines)
        talks = world.prompts.several(moves.PLAIN)
        replies = await router.all(talks, at_once=3)
        for reply in replies:
            moves.absent(reply)
        log.check(
            "fresh prompts were cached nowhere",
            all(reply.cached == 0 for reply in replies),
            f"{sum(r.cached for r in replies)} of {sum(r.prompt for r in replies)} tokens",
        )
        log.found("sent again, they are found", await router.all(talks), ENOUGH, chance)
        for _ in range(2):
            earlier = replies
            talks = [[*talk, {"role": "user", "content": world.prompts.text(300)}] for talk in talks]
            world.prompts.rng.shuffle(talks)
            replies = await router.all(talks)
        said = sum(reply.prompt for reply in earlier) / max(1, sum(reply.prompt for reply in replies))
        log.found("conversations that grow find all that they said before", replies, ENOUGH * said, chance)
    try:
        fleet = await world.fleet()
    except NotApplicable as error:
        log.skip("real workers", str(error))
        return
    async with world.before(fleet) as router:
        talks = world.prompts.several(moves.PLAIN)
        for reply in await router.all(talks, at_once=3):
            moves.absent(reply)
        log.found("real workers: absent at first, found when sent again", await router.all(talks), ENOUGH)


async def score(world: World, log: Log) -> None:
    async with world.router(fresh=True) as router:
        placed = await moves.elsewhere(world, router)
        replies = await moves.again(router, placed)
        what = "configured by the book, it finds what events alone can tell it"
        log.found(what, replies, moves.DECISIVE, 1 / len(world.engines))
        if router.own:
            await _parity(router, log, replies)
    if not world.own:
        return
    fleet = await world.fleet()
    async with world.before(fleet, fresh=True) as router:
        prompts = world.prompts.several(moves.PLAIN)
        for reply in await router.all(prompts, at_once=3):
            moves.absent(reply)
        await _parity(router, log, await router.all(prompts), "real workers: ")


async def _parity(router: Router, log: Log, replies: list[Reply], whose: str = "") -> None:
    predicted = sum(max(0, reply.predicted) for reply in replies)
    found = sum(max(0, reply.cached) for reply in replies)
    said = await router.metric("bien_parity_overall_ratio")
    log.check(
        f"{whose}its score is not 0, and true",
        predicted > 0 and abs(predicted / max(1, found) - 1) <= ALMOST and abs(said - 1) <= ALMOST,
        f"{predicted} tokens predicted, {found} found ({hits(replies):.1%}); parity in /metrics {said:.3f}",
    )


CASES = (
    Case(3, "ownership in Redis", "kthena#1223, #1428, #1552", ownership),
    Case(13, "tenants and salts", "vllm#16016, #53347, sglang#37271, TensorRT-LLM#14435", tenants),
    Case(14, "ends of requests", "vllm#46283, #21570, llm-d#1138", ends),
    Case(15, "hits by luck", "dynamo#9441", luck),
    Case(17, "a score that is always 0", "llm-d#981, llm-d-infra#185", score),
)
