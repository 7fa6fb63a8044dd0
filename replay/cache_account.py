"""`CacheAccount`: what an infinite cache would have hit in this very run, and where the rest was lost.

Turns are settled in the order in which they were sent, each once all before it have ended. One tree
remembers what any worker had, one per worker what that worker had; each loss is the step down to the next:

    shared tokens -rounding-> whole blocks -other replica-> of this worker -capacity-> achieved
"""

from __future__ import annotations

from collections import deque

import msgspec

from bien.core.request import BlockRuns
from bien.replay.record import TurnRecord
from bien.traces.prefix import PrefixTree
from bien.traces.stats import whole_blocks


class CacheLoss(msgspec.Struct):
    """Tokens of prompts, by cause. `capacity` holds all that is lost on the worker itself: eviction, and
    prompts that were sent before their prefix was computed. `unknown`: the worker is not known."""

    rounding: int = 0
    other_replica: int = 0
    capacity: int = 0
    unknown: int = 0


class _Pending(msgspec.Struct, gc=False):
    key: tuple[str, str]
    prompt: BlockRuns
    output: BlockRuns
    record: TurnRecord


class CacheAccount:
    """Feed it each turn when it is sent and settle when one has ended."""

    def __init__(self, block_tokens: int, outputs: bool = True) -> None:
        """`outputs`: whether what is generated is what was recorded, so that later prompts find it."""
        self.block_tokens = block_tokens
        self._outputs = outputs
        self.prompt_tokens = 0  # of settled turns whose cached tokens are known
        self.ideal = 0  # whole blocks that an infinite cache would have had
        self.achieved = 0
        self.loss = CacheLoss()
        self._pending: deque[_Pending] = deque()
        # By tenant and scope, then by worker; "" is any worker.
        self._trees: dict[tuple[str, str], dict[str, PrefixTree]] = {}
        self._over: set[tuple[str, str]] = set()

    def sent(self, tenant: str, scope: str, prompt: BlockRuns, output: BlockRuns, record: TurnRecord) -> None:
        self._pending.append(_Pending((tenant, scope), prompt, output, record))

    def settle(self) -> None:
        """Account for the oldest turns as far as they have ended."""
        while self._pending and self._pending[0].record.ended >= 0:
            self._settle(self._pending.popleft())
        if self._over:
            over = self._over - {p.key for p in self._pending}
            self._over -= over
            for key in over:
                self._trees.pop(key, None)

    def restart(self) -> None:
        """Counts begin anew; what was sent until now, all of which has ended, is known to the caches."""
        self.settle()
        self.prompt_tokens = self.ideal = self.achieved = 0
        self.loss = CacheLoss()

    def forget(self, tenant: str, scope: str) -> None:
        """No later turn has this scope."""
        self._over.add((tenant, scope))
        self.settle()

    def _settle(self, turn: _Pending) -> None:
        record = turn.record
        if record.got <= 0:
            return
        trees = self._trees.setdefault(turn.key, {})
        everywhere = trees.setdefault("", PrefixTree())
        here = trees.setdefault(record.worker, PrefixTree()) if record.worker else None
        shared = everywhere.match(turn.prompt, record.sent)
        local = here.match(turn.prompt, record.sent) if here else 0
        for tree in (everywhere, here):
            if tree:
                end = tree.insert(turn.prompt, record.sent)
                if self._outputs:
                    tree.insert(turn.output, record.last, end)
        if record.cached < 0:
            return
        blocks = whole_blocks(shared, len(turn.prompt), self.block_tokens)
        self.prompt_tokens += len(turn.prompt)
        self.ideal += blocks
        self.achieved += record.cached
        self.loss.rounding += min(shared, len(turn.prompt)) - blocks
        if here is None:
            self.loss.unknown += blocks - record.cached
            return
        own = whole_blocks(local, len(turn.prompt), self.block_tokens)
        self.loss.other_replica += blocks - own
        self.loss.capacity += own - record.cached
