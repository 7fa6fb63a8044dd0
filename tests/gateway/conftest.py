from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from bien.core.clock import VirtualClock
from bien.core.deployment import GatewaySpec
from bien.gateway.core import Gateway
from bien.gateway.testing.fake_worker import FakeWorker
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.routers.kv_aware import KVAwareConfig, KVAwareRouter

MakeGateway = Callable[..., Gateway]


@pytest.fixture
def make_gateway() -> MakeGateway:
    """`make_gateway(worker, …, max_inflight=…, any argument of Gateway)`: kv-aware, memory index."""

    def make(*workers: FakeWorker, max_inflight: int = 64, **more: Any) -> Gateway:
        clock = VirtualClock()
        router = more.pop("router", None) or KVAwareRouter(KVAwareConfig(), random.Random(1))
        index = more.pop("index", None) or MemoryIndex(clock)
        more.setdefault("rng", random.Random(2))
        spec = GatewaySpec(max_inflight=max_inflight, secret="s")
        return Gateway(workers, router, index, clock, spec, **more)

    return make
