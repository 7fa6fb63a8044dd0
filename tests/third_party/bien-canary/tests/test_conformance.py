from __future__ import annotations

import random

from bien_canary.router import Pinned, PinnedConfig
from bien_canary.scheduler import Shortest, ShortestConfig

from bien.core.testing.scheduler import SchedulerSuite
from bien.gateway.testing.router import RouterSuite


class TestShortest(SchedulerSuite):
    def build(self) -> Shortest:
        return Shortest(ShortestConfig())


class TestPinned(RouterSuite):
    def build(self, rng: random.Random) -> Pinned:
        return Pinned(PinnedConfig(), rng)
