"""One worker in this process, for benchmarks that drive engine and executor directly."""

from __future__ import annotations

import random

from bien.core.build import BuiltWorker
from bien.core.build import build as build_pool
from bien.core.compose import compose
from bien.core.deployment import Deployment, GatewaySpec, ModelSpec, PoolSpec
from bien.core.plugins import PluginManager


def build(model: ModelSpec, pool: PoolSpec) -> BuiltWorker:
    """The pool's engine and executor on the wall clock."""
    composition = compose(Deployment(model, GatewaySpec(), (pool,)), PluginManager.load())
    return build_pool(
        composition.pools[0],
        id="bench",
        generation="bench",
        rng=random.Random(0),
        threads=pool.threads or 1,
    )
