from __future__ import annotations

import msgspec
import numpy as np
import pytest

from bien.core.compose import compose
from bien.core.deployment import Deployment
from bien.core.plan import ExecutorPlan
from bien.core.plugins import PluginManager
from bien.replay.options import ReplayOptions
from bien.replay.route.policies import with_router
from bien.replay.route.pooled import PooledExecutor, pooled
from bien.replay.route.report import losses
from bien.replay.route.stack import Bench
from bien.replay.route.variant import COLUMNS, Seen, Variant
from bien.replay.simulation import SimulationPlan, build_workers, simulate
from bien.traces.model import Session
from tests.replay.route.conftest import TREES


@pytest.fixture(scope="module")
def simulated(sessions: list[Session], fleet: Deployment, manager: PluginManager, monkeymodule):
    """The same trace through `bien simulate`."""
    plan = SimulationPlan((), ReplayOptions(TREES), with_router(fleet, "round-robin"))
    return simulate(plan, manager)


@pytest.fixture(scope="module")
def monkeymodule(sessions: list[Session]):
    from bien.replay import simulation
    from bien.traces.model import TraceMeta

    class Opened:
        meta = TraceMeta("weka", 64)

        def sessions(self):
            return iter(sessions)

        def close(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "open_paths", lambda *_: Opened())
        yield patch


def test_it_is_the_simulation_that_bien_simulate_runs(simulated, round_robin: Seen):
    result, records = simulated.result, simulated.driver.records
    assert [r.id for r in records] == round_robin.ids
    assert round_robin["ttft"].tolist() == [r.ttft for r in records]
    assert round_robin["cached"].tolist() == [r.cached for r in records]
    assert [round_robin.workers[int(w)] for w in round_robin["worker"]] == [r.worker for r in records]
    assert round_robin.hit == pytest.approx(result.cache.achieved)
    loss = losses(round_robin)
    assert round_robin.hit + sum(msgspec.structs.astuple(loss)) == pytest.approx(result.cache.ideal)
    assert loss.rounding == pytest.approx(result.cache.loss.rounding)


def test_what_the_router_saw_is_kept(round_robin: Seen, kv_aware: Seen):
    for seen in (round_robin, kv_aware):
        assert set(seen.packed) == set(COLUMNS)
        assert (seen["here"] <= seen["best"]).all() and (seen["best"] < seen["prompt"]).all()
        away = seen["here"] < seen["best"]
        assert (seen["holder"] != seen["worker"])[away].all()
        assert (seen["holder"] == seen["worker"])[~away].all()
        assert len(seen.reasons) == len(seen.ids)
    assert (round_robin["here"] < round_robin["best"]).any()
    assert round_robin["queued"].any() and round_robin["ahead"].any()
    assert kv_aware.hit > round_robin.hit + 0.1


def test_one_pool_of_one_worker_is_that_worker(bench: Bench, fleet: Deployment, manager: PluginManager):
    one = msgspec.structs.replace(fleet, pool=(msgspec.structs.replace(fleet.pool[0], count=1),))
    worker = bench.run(Variant("one", one, TREES))
    pool = bench.run(Variant("pool", pooled(one, manager), TREES, pool_of=1))
    assert pool.packed == worker.packed


def test_a_pool_has_all_cache_and_all_computing_power(fleet: Deployment, manager: PluginManager):
    deployment = pooled(fleet, manager)
    (pool,), n = deployment.pool, fleet.pool[0].count
    assert pool.count == 1
    assert pool.kv_tokens == n * (fleet.pool[0].kv_tokens or 0)
    assert pool.slots == n * fleet.pool[0].slots
    budget = fleet.pool[0].scheduler.parameters["token_budget"]
    assert pool.scheduler.parameters["token_budget"] == n * budget
    (worker,) = build_workers(compose(deployment, manager), 0)
    shared = PooledExecutor(worker.executor, n)

    def seconds(rows: int, tokens: int) -> float:
        arrays = [np.full(rows, value, np.int32) for value in (0, 0, tokens, 0, 1)]
        return shared.sample(ExecutorPlan(0, *arrays)).result().seconds

    step, token, row = (fleet.pool[0].executor.parameters[k] for k in ("step_ms", "token_ms", "row_ms"))
    assert seconds(1, 1) == pytest.approx((step + token + row) / 1e3)
    more = seconds(4 * n, 100) - seconds(n, 100)  # as four rows and one at each of n workers
    assert more == pytest.approx(3 * (100 * token + row) / 1e3)


def test_a_pool_hits_at_least_what_workers_do(bench: Bench, fleet: Deployment, manager, kv_aware: Seen):
    pool = bench.run(Variant("pool", pooled(fleet, manager), TREES, pool_of=3))
    assert pool.hit > kv_aware.hit
    assert not losses(pool).other_replica


def test_turns_that_fail_are_counted_with_their_cause(sessions, fleet: Deployment, manager: PluginManager):
    small = msgspec.structs.replace(fleet.pool[0], kv_tokens=4096)
    cramped = msgspec.structs.replace(fleet, pool=(small,))
    seen = Bench(sessions[:4], manager).run(Variant("small", cramped, 2))
    assert sum(seen.errors.values()) > 0 and not seen.whole_run
    assert all("context" in text for text in seen.errors)
