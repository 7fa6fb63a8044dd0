from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from bien.core.clock import Clock, WallClock
from bien.core.errors import BienError, ResourceError, UserError
from bien.core.kv.events import KVEvent
from bien.core.providers import Context
from bien.core.worker.published import Keys
from bien.gateway.index import DurableIndex, KVIndex
from bien.gateway.testing.durable import DurableSuite, History, PublishingWorker, until
from bien.gateway.testing.index import IndexSuite, make_chain, make_info
from bien.plugins.indexes.memory import MemoryIndex
from bien.plugins.indexes.redis import RedisConfig, bien_providers
from bien.plugins.indexes.redis.index import RedisIndex
from tests.redis_process import RedisProcess, redis_process

FAST = {"lease_seconds": 0.6, "poll_seconds": 0.005, "flush_seconds": 0.001, "timeout_seconds": 1.0}


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisProcess]:
    with redis_process() as server:
        yield server


@pytest.fixture
def server(shared: RedisProcess) -> RedisProcess:
    with shared.client as client:
        client.flushall()
    return shared


def make(url: str, **parameters: object) -> RedisIndex:
    config = RedisConfig(url, **{**FAST, **parameters})  # type: ignore[arg-type]
    return RedisIndex(config, Context(clock=WallClock()))


class TestMirror(IndexSuite):
    """Fed by frames it is the memory index, whether there is a Redis or not."""

    def build(self, clock: Clock) -> KVIndex:
        return RedisIndex(RedisConfig("redis://127.0.0.1:1/0"), Context(clock=clock))


class TestStore(DurableSuite):
    @pytest.fixture(autouse=True)
    def _server(self, server: RedisProcess) -> None:
        self.url = server.url

    def build(self, clock: Clock) -> DurableIndex:
        return RedisIndex(RedisConfig(self.url, **FAST), Context(clock=clock))  # type: ignore[arg-type]
