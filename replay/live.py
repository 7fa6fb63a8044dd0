"""A live replay: stack or URL, driver, display, result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from bien.core.architectures.registry import read_architecture
from bien.core.clock import WallClock
from bien.core.deployment import Deployment
from bien.core.errors import BienError, ResourceError
from bien.core.plugins import PluginManager
from bien.replay.cache_account import CacheAccount
from bien.replay.client_cost import ClientCost
from bien.replay.display import Display
from bien.replay.driver import Driver
from bien.replay.measure import measure
from bien.replay.options import ReplayOptions
from bien.replay.outputs import check_outputs, outputs_of
from bien.replay.redis_option import without_credentials
from bien.replay.report.words import counted
from bien.replay.result import Result, Validity, write_result
from bien.replay.stack_process import StackProcess
from bien.replay.summary import print_summary
from bien.replay.targets.http import HttpTarget
from bien.replay.traces import Survey, open_paths
from bien.replay.turns_file import turn_lines, write_turns
from bien.replay.worker_load import WorkerLoad, busy_seconds

LAST_WORDS = 1.0  # seconds
FOREIGN_BLOCK = 16  # tokens, of a server that does not say


class Plan(msgspec.Struct, frozen=True):
    """What a command line asked for. One of `deployment` and `url`."""

    traces: tuple[Path, ...]
    options: ReplayOptions
    json: Path
    deployment: Deployment | None = None
    url: str | None = None
    report: Path | None = None  # drawn by whoever runs this
    source: str | None = None  # file or name of the deployment


async def replay(plan: Plan, display: Display) -> tuple[Result, bool]:
    """Run it; the result is written when this returns, also when it was interrupted (then True).

    Raises:
        BienError: nothing could be measured, or the stack died (what was measured is written).
    """
    manager = PluginManager.load()
    # Bad traces and options are refused before anything is started.
    check_outputs(outputs_of(plan.json, plan.report), plan.traces, manager, plan.source)
    survey = Survey(open_paths(plan.traces, manager), plan.options)
    clock = WallClock()
    while survey.advance():  # takes seconds for large traces: an interrupt must get through
        await clock.sleep(0)
    survey.check()
    plan = msgspec.structs.replace(plan, options=survey.settled(plan.options))
    if plan.deployment is not None:
        survey.totals(_window(plan.deployment))
    async with _target(plan, clock, display) as (target, stack, block_tokens):
        totals = survey.totals(target.info.max_context)
        trace = open_paths(plan.traces, manager)
        account = CacheAccount(block_tokens, outputs=target.info.forces_tokens)
        driver = Driver(target, clock, trace.sessions(), plan.options, account)
        load = WorkerLoad(clock, lambda: _busy(target))
        cost = ClientCost(clock)
        interrupted, failure = await _drive(
            driver, stack, display.follow(driver, totals), load.run(), cost.run()
        )
        cost.stop()
        if not interrupted and not failure:
            try:
                await load.sample()
            except asyncio.CancelledError:
                interrupted = True
        result = measure(
            driver,
            trace.meta,
            kind="live",
            deployment=_described(plan),
            interrupted=interrupted,
            cost=cost,
            load=load,
        )
        trace.close()
        if failure:
            result.validity = Validity(False, [f"cut short: {failure}", *result.validity.reasons])
        if driver.records:
            try:
                write_result(plan.json, result)
                write_turns(plan.json, turn_lines(driver.records, driver.started))
            except ResourceError:
                print_summary(result)  # all that is left of the run
                raise
        if failure:
            if driver.records:
                display.note(f"what was measured until then is in {plan.json}")
            raise failure
        return result, interrupted


async def _drive(
    driver: Driver, stack: StackProcess | None, *watchers: Coroutine[Any, Any, None]
) -> tuple[bool, BienError | None]:
    """Run the driver, `watchers` beside it, to its end, an interrupt, or the stack's death."""
    running = asyncio.create_task(driver.run())
    beside = [asyncio.create_task(w) for w in watchers]
    death = [asyncio.create_task(stack.wait())] if stack else []
    interrupted = False
    failure: BienError | None = None
    try:
        await asyncio.wait([running, *death], return_when=asyncio.FIRST_COMPLETED)
        if death and driver.tally.errors:
            await asyncio.wait(death, timeout=LAST_WORDS)  # it may be what broke the last turns
        if death and death[0].done():
            failure = BienError(death[0].result())
    except asyncio.CancelledError:
        interrupted = True
    failure = await _end(running) or failure
    for task in (*beside, *death):
        task.cancel()
    await asyncio.gather(*beside, *death, return_exceptions=True)
    return interrupted, failure


async def _end(running: asyncio.Task[None]) -> BienError | None:
    running.cancel()
    with suppress(asyncio.CancelledError):
        try:
            await running
        except BienError as error:
            return error
    return None


@asynccontextmanager
async def _target(
    plan: Plan, clock: WallClock, display: Display
) -> AsyncIterator[tuple[HttpTarget, StackProcess | None, int]]:
    seed = plan.options.seed
    if plan.url is not None:
        target = await HttpTarget.connect(plan.url, clock, seed=seed)
        try:
            yield target, None, FOREIGN_BLOCK
        finally:
            await target.close()
        return
    assert plan.deployment is not None
    stack = await StackProcess.start(plan.deployment, display.step)
    try:
        target = await _reach(stack, clock, seed)
        up = stack.up
        display.note(f"serving {up.model} at {up.url} with {counted(len(up.workers), 'worker')}")
        try:
            yield target, stack, max(w.cached_in or w.block_tokens for w in up.workers)
        finally:
            await target.close()
    finally:
        await stack.stop()


async def _reach(stack: StackProcess, clock: WallClock, seed: int) -> HttpTarget:
    up = stack.up
    # Others' servers do not say; what our gateway takes then, its card says.
    vocabulary = min((w.vocab_size for w in up.workers if w.vocab_size), default=None)
    try:
        return await HttpTarget.connect(
            up.url, clock, seed=seed, vocab_size=vocabulary, accelerators=up.accelerators
        )
    except ResourceError:
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                raise BienError(await stack.wait()) from None
        raise


def _window(deployment: Deployment) -> int:
    model = deployment.model
    return read_architecture(model.name, model.block_tokens, model.dtype, model.max_context).max_context


async def _busy(target: HttpTarget) -> dict[str, float]:
    return busy_seconds(await target.metrics())


def _described(plan: Plan) -> dict[str, Any]:
    if plan.deployment is None:
        return {"url": plan.url}
    described: dict[str, Any] = msgspec.to_builtins(plan.deployment)
    described["gateway"]["secret"] = "set" if plan.deployment.gateway.secret else ""
    return {key: without_credentials(value) for key, value in described.items()}
