"""`TorchHarness`: an engine with a real model in the torch executor, driven step by step."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

from bien.core.architectures.registry import read_architecture
from bien.core.build import drafting_limits
from bien.core.clock import WallClock
from bien.core.deployment import PoolSpec, Selection
from bien.core.engine import Engine, EngineLimits
from bien.core.executors.make import make_executor
from bien.core.kv.cache import KVCache
from bien.core.kv.store import KVStore
from bien.core.providers import Context
from bien.core.scheduler import Scheduler
from bien.core.speculation.options import SpeculationSpec
from bien.core.testing.harness import Harness


class TorchHarness(Harness):
    """The model of a folder. `parts`: "quantizer" and "parallel", and optionally "speculator"."""

    def __init__(
        self,
        folder: Path,
        scheduler: Scheduler,
        parts: dict[str, Any],
        *,
        dtype: str = "float64",
        block_tokens: int = 8,
        blocks: int = 64,
        snapshots: int = 16,
        slots: int = 4,
        depth: int = 1,
        max_context: int = 256,
        eos: tuple[int, ...] = (),
        executor: Any = None,
        speculation: SpeculationSpec | None = None,
    ) -> None:
        """`executor`: in the place of one that is made here, from a context like it; pools are allocated."""
        architecture = read_architecture(folder, block_tokens, dtype, max_context)
        options = speculation or SpeculationSpec()
        ctx = Context(architecture=architecture, dtype=dtype, parts=parts, speculation=options)
        executor = executor or make_executor(ctx)
        self.executor = executor
        self.groups = executor.groups
        sizes = tuple(blocks if g.paged else slots + snapshots for g in self.groups)
        executor.allocate(sizes, slots, max_context)
        self.cache = KVCache(self.groups, sizes, block_tokens, slots)
        drafter = getattr(executor, "local", executor).drafter
        self._scheduler = scheduler
        self._host = None if drafter else parts.get("speculator")
        self.engine = Engine(
            scheduler=scheduler,
            cache=self.cache,
            groups=self.groups,
            limits=EngineLimits(
                slots, max_context, block_tokens, eos, speculation=options, **self._drafting(drafter, options)
            ),
            clock=WallClock(),
            speculator=self._host,
            rng=random.Random(0),
        )
        self.depth = depth
        self.tokens, self.finish, self.cached = {}, {}, {}
        self.events, self.steps, self._flights = [], 0, deque()

    def _drafting(self, drafter: Any, options: SpeculationSpec) -> dict[str, Any]:
        caps = drafter.caps if drafter else self._host.caps if self._host else None
        return drafting_limits(PoolSpec(speculator=Selection("drafter"), speculation=options), caps)

    def use_store(self, store: KVStore) -> None:
        """A lower tier; before the first request."""
        limits, scheduler = self.engine.limits, self._scheduler
        self.engine = Engine(
            scheduler=scheduler,
            cache=self.cache,
            groups=self.groups,
            limits=limits,
            clock=WallClock(),
            speculator=self._host,
            store=store,
            rng=random.Random(0),
        )
