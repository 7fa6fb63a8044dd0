"""`Harness`: an engine with the hash executor, driven step by step; for tests of every plugin kind."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from bien.core.clock import WallClock
from bien.core.engine import Engine, EngineLimits
from bien.core.kv.cache import KVCache
from bien.core.kv.groups import GroupKind, KVGroup, SnapshotPolicy
from bien.core.kv.store import KVStore
from bien.core.report import StepReport
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.scheduler import Scheduler
from bien.core.speculation.draft import Draft
from bien.core.speculation.speculator import HostSpeculator
from bien.core.testing.hash_executor import HashExecutor, oracle


def toy_groups(
    kinds: str = "full", block_tokens: int = 4, window: int = 6, every: int = 8
) -> tuple[KVGroup, ...]:
    """Groups by name, e.g. "full+window+state+draft"."""
    made = {
        "full": KVGroup("full", GroupKind.FULL, (0,), block_tokens, bytes_per_token=8),
        "window": KVGroup("window", GroupKind.WINDOW, (1,), block_tokens, bytes_per_token=8, window=window),
        "state": KVGroup(
            "state", GroupKind.STATE, (2,), block_tokens, constant_bytes=16, croppable=False,
            snapshot=SnapshotPolicy(every),
        ),
        "draft": KVGroup("draft", GroupKind.DRAFT, (3,), block_tokens, bytes_per_token=8),
    }  # fmt: skip
    return tuple(made[name] for name in kinds.split("+"))


class Harness:
    """Runs requests to their end and keeps what each produced."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        groups: tuple[KVGroup, ...] | None = None,
        blocks: int = 64,
        slots: int = 4,
        depth: int = 1,
        max_context: int = 256,
        eos: tuple[int, ...] = (),
        speculator: HostSpeculator | None = None,
        draft: Callable[[list[int]], list[int] | Draft] | None = None,
        device_drafts: int = 0,
        drafting: dict[str, Any] | None = None,
        store: Callable[[HashExecutor], KVStore] | None = None,
    ) -> None:
        """`drafting`: what `EngineLimits` say of drafters."""
        self.groups = groups or toy_groups()
        sizes = tuple(blocks if g.paged else slots + 6 for g in self.groups)
        block_tokens = self.groups[0].block_tokens
        self.executor = HashExecutor(self.groups, draft)
        self.executor.allocate(sizes, slots, max_context)
        self.cache = KVCache(self.groups, sizes, block_tokens, slots)
        self.engine = Engine(
            scheduler=scheduler,
            cache=self.cache,
            groups=self.groups,
            limits=EngineLimits(slots, max_context, block_tokens, eos, device_drafts, **drafting or {}),
            clock=WallClock(),
            speculator=speculator,
            store=store(self.executor) if store else None,
            rng=random.Random(0),
        )
        self.depth = depth
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.events: list[Any] = []
        self.steps = 0
        self._flights: deque[Any] = deque()

    def submit(self, id: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> None:
        """Greedy, without end-of-text, unless `sampling` says otherwise."""
        sampling = fields.pop("sampling", None) or SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0
        )
        self.engine.submit(GenerateRequest(id, TokenIds.of(prompt), sampling, **fields))
        self.tokens[id] = []

    def step(self) -> bool:
        """Fill the pipeline up to `depth` plans, then finish the oldest. False: nothing happened."""
        while len(self._flights) < self.depth:
            plan = self.engine.begin()
            if plan is None:
                break
            self._flights.append(self.executor.sample(self.executor.forward(plan)).result())
        if not self._flights:
            self._take(self.engine.flush())
            return False
        self.steps += 1
        self._take(self.engine.finish(self._flights.popleft()))
        return True

    def run(self, limit: int = 10_000) -> None:
        """Until nothing is left to do."""
        idle = 0
        while self.engine.busy:
            idle = 0 if self.step() else idle + 1
            assert idle < 10_000, "the engine stands still with work left"
            if idle > 100:
                WallClock().block(0.001)  # transfers run on threads of their own
            limit -= 1
            assert limit > 0, "no end in sight"
        self._take(self.engine.flush())
        self.engine.check_integrity()

    def expect(self, id: str, prompt: list[int]) -> None:
        """What was produced is what the oracle says."""
        want = oracle(prompt, len(self.tokens[id]), self.groups)
        assert self.tokens[id] == want, f"{id}: {self.tokens[id]} instead of {want}"

    def _take(self, report: StepReport) -> None:
        for out in report.outputs:
            self.tokens[out.id] += list(memoryview(out.tokens).cast("I"))
            if out.cached >= 0:
                self.cached[out.id] = out.cached
            if out.finish:
                self.finish[out.id] = out.finish
        self.events += report.events
