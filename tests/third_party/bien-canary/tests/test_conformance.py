from __future__ import annotations

from bien_canary.scheduler import Shortest, ShortestConfig

from bien.core.testing.scheduler import SchedulerSuite


class TestShortest(SchedulerSuite):
    def build(self) -> Shortest:
        return Shortest(ShortestConfig())
