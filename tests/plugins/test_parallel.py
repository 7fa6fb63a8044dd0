"""The built-in parallel strategy."""

from __future__ import annotations

from bien.core.parallel.strategy import ParallelStrategy
from bien.core.testing.parallel import ParallelSuite
from bien.plugins.parallel.single import Single


class TestSingle(ParallelSuite):
    worlds = (1,)
    illegal = (0, 2, 8)

    def build(self, rank: int, world: int) -> ParallelStrategy:
        return Single()
