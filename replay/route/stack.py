"""Simulates one variant: gateway, engines and driver of `bien simulate`, with a router that is watched."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bien.core.clock import VirtualClock
from bien.core.compose import Composition, compose
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.request import BlockRuns
from bien.core.worker.inprocess import InProcessClient
from bien.gateway.core import Gateway
from bien.gateway.faults import FAULTS
from bien.replay.cache_account import CacheAccount
from bien.replay.driver import Driver
from bien.replay.options import ReplayOptions
from bien.replay.record import TurnRecord
from bien.replay.route.hindsight import improved
from bien.replay.route.infinite import InfiniteCache
from bien.replay.route.pooled import shared_among
from bien.replay.route.variant import COLUMNS, Placement, Seen, Variant
from bien.replay.route.watch import Placed, Watched
from bien.replay.signals import cancelling
from bien.replay.simulation import build_workers
from bien.replay.tally import Corpus
from bien.replay.target import TargetInfo
from bien.replay.targets.gateway import GatewayTarget
from bien.traces.model import Session
from bien.traces.stats import whole_blocks

TICK = 300.0  # virtual seconds between looks at the progress


class Bench:
    """Simulates variants on one trace."""

    def __init__(self, sessions: Sequence[Session], manager: PluginManager) -> None:
        self._sessions = sessions
        self._manager = manager
        self._infinite = InfiniteCache(sessions)

    def run(self, variant: Variant, on_turns: Callable[[int], None] = lambda turns: None) -> Seen:
        """`on_turns` is told now and then how many turns have ended. BienError: the deployment is wrong."""
        placement = improved(variant.hindsight) if variant.hindsight else variant.placement
        composition = compose(variant.deployment, self._manager)
        try:
            return VirtualClock.run(self._run(variant, placement, composition, on_turns))
        except asyncio.CancelledError:  # by a signal
            raise KeyboardInterrupt from None

    async def _run(
        self,
        variant: Variant,
        placement: Placement | None,
        composition: Composition,
        on_turns: Callable[[int], None],
    ) -> Seen:
        clock, spec = VirtualClock(), composition.spec
        workers = list(build_workers(composition, variant.seed))
        if variant.pool_of:
            workers = [shared_among(w, variant.pool_of) for w in workers]
        names = [w.info.id for w in workers]
        ctx = Context(clock=clock, rng=random.Random(variant.seed))
        try:
            router = Watched(
                Placed(placement, names) if placement else composition.gateway["router"].make(ctx)
            )
        except FAULTS as error:  # one policy fails; the others are compared
            for worker in workers:
                worker.close()
            nothing = dict.fromkeys(COLUMNS, b"")
            return Seen(variant.name, packed=nothing, errors={f"{type(error).__name__}: {error}": 1})
        gateway = Gateway(
            [InProcessClient(w.info, w.engine, w.executor, clock) for w in workers],
            router,
            composition.gateway["kv_index"].make(ctx),
            clock,
            spec,
            rng=random.Random(variant.seed),
        )
        driver = self._driver(variant, GatewayTarget(gateway, TargetInfo()), clock, composition)
        looking = asyncio.create_task(_look(driver, on_turns))
        task = asyncio.current_task()
        assert task is not None
        try:
            with cancelling(task):
                await driver.run()
            for worker in workers:
                worker.engine.check_integrity()
            busy = [w.engine.stats().busy_seconds for w in workers]
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await gateway.close()
        on_turns(driver.tally.turns)
        seen = self._seen(variant, driver, router, names, composition.model.block_tokens)
        seen.busy = busy
        return seen

    def _driver(
        self, variant: Variant, target: GatewayTarget, clock: VirtualClock, composition: Composition
    ) -> Driver:
        options = ReplayOptions(
            concurrency=variant.concurrency,
            time_scale=variant.time_scale,
            gap_cap=variant.gap_cap,
            seed=variant.seed,
        )
        sessions: Iterator[Session] = iter(self._sessions)
        block_tokens = composition.model.block_tokens
        driver = Driver(target, clock, sessions, options, _NoAccount(block_tokens))
        driver.corpus = _NoCorpus(block_tokens, 0)
        return driver

    def _seen(
        self, variant: Variant, driver: Driver, router: Watched, names: list[str], block_tokens: int
    ) -> Seen:
        shared = self._infinite.shared(driver.records)
        errors = Counter(record.error for record in driver.records if record.error)
        rows = [
            (r, s) for r, s in zip(driver.records, shared, strict=True) if r.ok and r.id in router.glances
        ]
        at = {name: i for i, name in enumerate(names)}
        glances = [router.glances[r.id] for r, _ in rows]
        columns = {
            "sent": [r.sent for r, _ in rows],
            "ttft": [float("nan") if (t := r.ttft) is None else t for r, _ in rows],
            "prompt": [r.prompt_tokens for r, _ in rows],
            "output": [r.got for r, _ in rows],
            "cached": [max(0, r.cached) for r, _ in rows],
            "predicted": [r.predicted for r, _ in rows],
            "here": [g.here for g in glances],
            "best": [g.best for g in glances],
            "whole": [whole_blocks(s, r.prompt_tokens, block_tokens) for r, s in rows],
            "shared": [s for _, s in rows],
            "queued": [g.queued for g in glances],
            "ahead": [g.ahead for g in glances],
            "worker": [at[r.worker] for r, _ in rows],
            "holder": [at[g.holder] for g in glances],
        }
        return Seen(
            variant.name,
            names,
            seconds=driver.ended - driver.started,
            ids=[r.id for r, _ in rows],
            packed={name: np.asarray(values, np.float64).tobytes() for name, values in columns.items()},
            reasons=[dict(g.reasons) for g in glances] if variant.reasons else [],
            errors=dict(errors),
        )


async def _look(driver: Driver, on_turns: Callable[[int], None]) -> None:
    while True:
        await driver.clock.sleep(max(TICK, (driver.clock.time() - driver.started) / 100))
        on_turns(driver.tally.turns)


class _NoAccount(CacheAccount):
    """It is made once the run has ended, of the records."""

    def sent(self, tenant: str, scope: str, prompt: BlockRuns, output: BlockRuns, record: TurnRecord) -> None:
        pass

    def settle(self) -> None:
        pass

    def forget(self, tenant: str, scope: str) -> None:
        pass


class _NoCorpus(Corpus):
    """The trace is the same for all variants: it is described once."""

    def read(self, session: Session, taken: bool) -> None:
        pass

    def take(self, session: Session) -> None:
        pass
