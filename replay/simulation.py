"""A simulated replay: the gateway, engines and driver of a live one, on a virtual clock.

Nothing differs but the executor (a cost function), the transport (in process) and the content (runs that
are never materialised). One process, one thread, no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bien.core.build import BuiltWorker, build
from bien.core.clock import Clock, VirtualClock
from bien.core.compose import Composition, compose
from bien.core.costs.factors import CalibrationFile, read_calibration
from bien.core.costs.machine import WIDER
from bien.core.deployment import Deployment, PoolSpec, Selection, check_deployment
from bien.core.errors import DeploymentError, UserError
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.worker.client import WorkerClient
from bien.core.worker.inprocess import InProcessClient
from bien.core.worker.inprocess_ranks import InProcessRanks
from bien.gateway.core import Gateway
from bien.replay.cache_account import CacheAccount
from bien.replay.collection import collecting_rarely
from bien.replay.costs import accelerators, pool_costs, way_of
from bien.replay.driver import Driver
from bien.replay.measure import measure
from bien.replay.options import ReplayOptions
from bien.replay.redis_option import INDEX
from bien.replay.result import Result
from bien.replay.signals import cancelling
from bien.replay.slowdown import alone, slowdown
from bien.replay.target import TargetInfo
from bien.replay.targets.gateway import GatewayTarget
from bien.replay.traces import open_paths
from bien.replay.worker_load import WorkerLoad

DRAFTER = "simulated"  # the speculator that drafts without a text
TICK = 60.0  # virtual seconds between looks at the progress


class SimulationPlan(msgspec.Struct, frozen=True):
    """What is simulated. `jump` False takes every step by itself (slow; the results are the same);
    `slowdown` simulates the trace once more, for `jobs.slowdown`."""

    traces: tuple[Path, ...]
    options: ReplayOptions
    deployment: Deployment
    jump: bool = True
    slowdown: bool = False


class Run(NamedTuple):
    """How a simulation went."""

    driver: Driver
    result: Result
    interrupted: bool


def simulated(deployment: Deployment) -> tuple[Deployment, list[str]]:
    """The deployment with executors that cost virtual time only, and what was put in their place.

    A pool whose executor computes gets `simulated` with its default costs; speculators are left out, as
    there are no tokens to guess, but for the one that has forced acceptance. The memory index stands in for
    one that lies behind a connection. DeploymentError for what cannot be simulated: pools of others' workers,
    forced acceptance without the drafter that uses it here.
    """
    for remote in deployment.remote:
        text = "its workers are another's engines, which cannot be simulated; leave it out"
        raise DeploymentError(f"pool {remote.name!r}: {text}", field="pool")
    notes: list[str] = []
    pools = []
    for pool in deployment.pool:
        if pool.executor.use == "torch":
            notes.append(
                f"pool {pool.name!r}: executor 'simulated' with constant default costs in place of "
                f"{pool.executor.use!r} (uncalibrated)"
            )
            pool = msgspec.structs.replace(pool, executor=Selection("simulated"))
        if pool.speculation.acceptance and (pool.speculator is None or pool.speculator.use != DRAFTER):
            found = "no speculator" if pool.speculator is None else f"speculator {pool.speculator.use!r}"
            raise DeploymentError(
                f"pool {pool.name!r} forces acceptance and has {found}, so that nothing would be drafted in "
                f"a simulation; write speculator = {{ use = {DRAFTER!r}, max_drafts = N }}, or leave "
                "acceptance, acceptance_length and golden out of [pool.speculation]",
                field="pool",
            )
        if pool.speculator is not None and pool.speculator.use != DRAFTER:
            notes.append(
                f"pool {pool.name!r}: speculator {pool.speculator.use!r} is left out: its drafts need a text "
                f"(speculator {DRAFTER!r} has the costs of one, with forced acceptance)"
            )
            pool = msgspec.structs.replace(pool, speculator=None)
        pools.append(pool)
    gateway = deployment.gateway
    if gateway.kv_index.use == INDEX:
        notes.append(f"index {gateway.kv_index.use!r}: its mirror alone, which is index 'memory'")
        gateway = msgspec.structs.replace(gateway, kv_index=Selection("memory"))
    return msgspec.structs.replace(deployment, gateway=gateway, pool=tuple(pools)), notes


def calibrated(deployment: Deployment, file: Path) -> Deployment:
    """The deployment whose engine a calibration was made on, or one like it, with that engine's costs.
    UserError names what is wrong in the file."""
    found = read_calibration(file)
    for pool in deployment.pool:
        _check_alike(found, file, deployment, pool)
    parameters: dict[str, Any] = {"machine": found.machine, "factors": str(file), **found.formats}
    parameters |= found.layout
    executor = Selection("simulated", {k: v for k, v in parameters.items() if v})
    pools = tuple(msgspec.structs.replace(pool, executor=executor) for pool in deployment.pool)
    return msgspec.structs.replace(deployment, pool=pools)


def _check_alike(found: CalibrationFile, file: Path, deployment: Deployment, pool: PoolSpec) -> None:
    """UserError where the pool's engine is plainly another than the one that was calibrated."""
    model, devices = Path(deployment.model.name).name, found.layout.get("tensor", pool.devices)
    weights = found.formats.get("weights", "")
    quantized = pool.quantizer.use if pool.quantizer.use in WIDER else ""
    if found.model and Path(found.model).name != model:
        other = f"of the model {found.model!r}, the deployment has {model!r}"
    elif pool.executor.use != "torch":
        return  # nothing computes there whose layout or formats would be others
    elif devices != pool.devices:
        other = f"of {devices} devices, pool {pool.name!r} has {pool.devices}"
    elif (weights if weights in ("int8", "int4") else "") != quantized:
        other = f"of weights in {weights}, pool {pool.name!r} has quantizer {pool.quantizer.use!r}"
    else:
        return
    raise UserError(f"calibration {file} is {other}; valid: one of such an engine", field="factors")


def _extrapolated(composition: Composition, driver: Driver) -> list[str]:
    """What the run asked beyond what its calibrations have seen."""
    longest = max((r.prompt_tokens + r.asked for r in driver.records), default=0)
    notes = []
    for pool in composition.pools:
        found = getattr(pool.parts["executor"].config, "calibration", lambda: None)()
        seen = found.ranges.get("positions") if found else None
        if seen and longest > 2 * seen.high:  # the mean position of a prompt's tokens is its half
            notes.append(
                f"pool {pool.spec.name!r}: sequences of up to {longest:,} tokens, whose costs are "
                f"extrapolated: the calibration saw {seen.high:,.0f} positions"
            )
    return notes


def simulate(
    plan: SimulationPlan,
    manager: PluginManager,
    on_tick: Callable[[Driver], None] = lambda driver: None,
    wrap: Callable[[BuiltWorker], BuiltWorker] = lambda built: built,
) -> Run:
    """Run it to its end, or until Ctrl-C or what ends it likewise (signals.py). `on_tick` is called now and
    then; `wrap` may observe each worker (not those of a second run, which is there for the slowdown only).

    Raises:
        BienError: deployment or trace are wrong.
    """
    deployment, notes = simulated(plan.deployment)
    run = _simulate(plan, manager, deployment, on_tick, wrap)
    run.result.fidelity.notes.extend(notes)
    if plan.slowdown and not run.interrupted:
        one_by_one = msgspec.structs.replace(plan.options, concurrency=1, open_loop=False)
        single = msgspec.structs.replace(plan, options=one_by_one)
        ideal = _simulate(single, manager, alone(deployment, run.driver), on_tick)
        if ideal.interrupted:
            return run._replace(interrupted=True)
        run.result.jobs.slowdown = slowdown(run.driver, ideal.driver)
    return run


def _simulate(
    plan: SimulationPlan,
    manager: PluginManager,
    deployment: Deployment,
    on_tick: Callable[[Driver], None],
    wrap: Callable[[BuiltWorker], BuiltWorker] = lambda built: built,
) -> Run:
    composition = compose(deployment, manager)
    workers = [wrap(built) for built in build_workers(composition, plan.options.seed)]
    with collecting_rarely():
        return VirtualClock.run(_run(plan, manager, composition, workers, on_tick))


def build_workers(composition: Composition, seed: int) -> Iterable[BuiltWorker]:
    """Every worker of every pool, on the virtual clock."""
    for pool in composition.pools:
        for number in range(pool.spec.count):
            first, *others = (
                build(
                    pool,
                    id=f"{pool.spec.name}-{number}",
                    generation="simulated",
                    clock=VirtualClock(),
                    rng=random.Random(seed),
                    any_context=True,
                )
                for _ in range(pool.spec.dp_ranks)
            )
            info = msgspec.structs.replace(first.info, dp_ranks=1 + len(others))
            yield dataclasses.replace(first, info=info, others=tuple(others))


def in_process(built: BuiltWorker, clock: Clock, jump: bool = True) -> WorkerClient:
    """The worker on `clock`, as a gateway knows it."""
    ranks = [
        InProcessClient(built.info, one.engine, one.executor, clock, jump=jump, dp_rank=rank)
        for rank, one in enumerate((built, *built.others))
    ]
    return ranks[0] if len(ranks) == 1 else InProcessRanks(ranks)


def with_workers(deployment: Deployment, workers: int) -> Deployment:
    """The deployment with so many workers in its only pool. UserError where it has several."""
    pools = deployment.pool
    if len(pools) != 1:
        names = ", ".join(repr(pool.name) for pool in pools)
        raise UserError(f"--workers is the count of the only pool; this deployment has {names}")
    found = msgspec.structs.replace(deployment, pool=(msgspec.structs.replace(pools[0], count=workers),))
    check_deployment(found)
    return found


def make_gateway(
    composition: Composition, clients: list[WorkerClient], clock: VirtualClock, seed: int
) -> Gateway:
    """The composition's router and index around these clients."""
    ctx = Context(clock=clock, rng=random.Random(seed))
    return Gateway(
        clients,
        composition.gateway["router"].make(ctx),
        composition.gateway["kv_index"].make(ctx),
        clock,
        composition.spec,
        rng=random.Random(seed),
    )


async def _run(
    plan: SimulationPlan,
    manager: PluginManager,
    composition: Composition,
    workers: list[BuiltWorker],
    on_tick: Callable[[Driver], None],
) -> Run:
    clock = VirtualClock()
    clients = [in_process(worker, clock, plan.jump) for worker in workers]
    gateway = make_gateway(composition, clients, clock, plan.options.seed)
    spec = composition.pools
    info = TargetInfo(
        model=Path(composition.model.name).name,
        max_context=gateway.max_context,
        accelerators=sum(p.spec.engines * accelerators(p) for p in spec),
    )
    trace = open_paths(plan.traces, manager)
    block_tokens = composition.model.block_tokens
    driver = Driver(
        GatewayTarget(gateway, info, way_of(composition)),
        clock,
        trace.sessions(),
        plan.options,
        CacheAccount(block_tokens),
    )
    load = WorkerLoad(clock, lambda: _busy(workers))
    beside = [asyncio.create_task(load.run()), asyncio.create_task(_tick(driver, on_tick))]
    interrupted = False
    task = asyncio.current_task()
    assert task is not None
    try:
        try:
            with cancelling(task):
                await driver.run()
        except asyncio.CancelledError:  # Ctrl-C: what was simulated until now is kept
            interrupted = True
            task.uncancel()
        await load.sample()
        for worker in workers if not interrupted else ():
            for one in (worker, *worker.others):
                one.engine.check_integrity()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await gateway.close()
        trace.close()
    on_tick(driver)
    meta = trace.meta
    described: dict[str, Any] = msgspec.to_builtins(composition.deployment)
    described["gateway"]["secret"] = "set" if composition.spec.secret else ""
    result = measure(driver, meta, kind="simulated", deployment=described, interrupted=interrupted, load=load)
    result.costs = pool_costs(composition)
    result.fidelity.notes.extend(_extrapolated(composition, driver))
    return Run(driver, result, interrupted)


async def _busy(workers: list[BuiltWorker]) -> dict[str, float]:
    return {w.info.id: sum(one.engine.stats().busy_seconds for one in (w, *w.others)) for w in workers}


async def _tick(driver: Driver, on_tick: Callable[[Driver], None]) -> None:
    while True:
        # Rarer as the run grows long: years of gaps must not cost a look a minute.
        await driver.clock.sleep(max(TICK, (driver.clock.time() - driver.started) / 100))
        on_tick(driver)
