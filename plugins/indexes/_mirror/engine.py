"""What one (worker, dp_rank) holds, by its events, and what is on its way there."""

from __future__ import annotations

from collections.abc import Iterable

from bien.core.api import HASH_BYTES, GroupKind, KVEvent
from bien.gateway.api import WorkerInfo
from bien.plugins.indexes._mirror.chain import Chain
from bien.plugins.indexes._mirror.groups import Everywhere, Somewhere
from bien.plugins.indexes._mirror.runs import Runs


class Prediction:
    __slots__ = ("blocks", "expires", "hashes", "last")

    def __init__(self, hashes: bytes, expires: float) -> None:
        self.hashes = hashes
        self.blocks = len(hashes) // HASH_BYTES
        self.last = hashes[-HASH_BYTES:]
        self.expires = expires

    def common(self, chain: Chain) -> int:
        """Blocks shared with a chain. Equal hashes at one block mean equal blocks before it."""
        low, high = 0, min(self.blocks, chain.blocks)
        while low < high:
            middle = (low + high + 1) // 2
            at = HASH_BYTES * (middle - 1)
            if self.hashes[at : at + HASH_BYTES] == chain.hashes[at : at + HASH_BYTES]:
                low = middle
            else:
                high = middle - 1
        return low


class Engine:
    """What one (worker, dp_rank) holds, as of event `seq` of its `generation`."""

    def __init__(self, info: WorkerInfo) -> None:
        self.generation = info.generation
        self.seq = 0
        self.lost = False  # a batch is missing: the mirror is stale until a snapshot comes
        self.predictions: list[Prediction] = []
        self._info = info
        self.clear()

    def clear(self) -> None:
        info = self._info
        self.groups: list[Runs | Everywhere | Somewhere] = []
        self._every: list[int] = []  # of the state groups: blocks between snapshots, 0 = at the end only
        for kind, window, every in zip(
            info.group_kinds, info.group_windows, info.snapshot_tokens, strict=True
        ):
            if kind == GroupKind.STATE.value:
                self.groups.append(Somewhere(0))
                self._every.append(every // info.block_tokens)
            elif kind == GroupKind.WINDOW.value and window:
                self.groups.append(Somewhere(-(-window // info.block_tokens)))
            else:
                self.groups.append(Runs())
        self._sort()

    def _sort(self) -> None:
        self.whole = [g for g in self.groups if not isinstance(g, Somewhere)]
        self.partial = [g for g in self.groups if isinstance(g, Somewhere)]

    def feed(self, events: Iterable[KVEvent]) -> None:
        groups = self.groups
        for event in events:
            if event.op == "stored":
                if not groups[event.group].store(event):
                    self._by_block(event.group).store(event)
            elif event.op == "removed":
                if not groups[event.group].remove(event.hashes, event.tier):
                    self._by_block(event.group).remove(event.hashes, event.tier)
            elif event.op == "cleared":
                for group in groups:
                    group.clear(event.tier)
        if self.predictions:
            witness = (self.whole or groups)[0]
            self.predictions = [p for p in self.predictions if not witness.holds(p.hashes)]

    def _by_block(self, group: int) -> Everywhere:
        """What runs cannot say any more: the same content, block by block from now on."""
        runs, self.groups[group] = self.groups[group], (found := Everywhere())
        assert isinstance(runs, Runs)
        for event in runs.events():
            found.store(event)
        self._sort()
        return found

    def take_back(self, hashes: bytes) -> None:
        """One of them: another request may have predicted the same."""
        for i, prediction in enumerate(self.predictions):
            if prediction.hashes == hashes:
                del self.predictions[i]
                return

    def usable(self, chain: Chain) -> int:
        """Blocks of the chain that every group can use."""
        position = chain.blocks
        for whole in self.whole:
            position = whole.last(chain, position)
        settled = not self.partial
        while position and not settled:
            before = position
            for partial in self.partial:
                position = partial.last(chain, position)
            settled = position == before
        return position

    def predicted(self, chain: Chain, position: int, now: float) -> int:
        """At least `position`: blocks usable once the prompts on their way there have run."""
        if not self.predictions or position == chain.blocks:
            return position
        self.predictions = [p for p in self.predictions if p.expires > now]
        at = HASH_BYTES * position
        beyond = chain.at(position)  # what shares no more than `position` blocks cannot help
        for prediction in self.predictions:
            if prediction.hashes[at : at + HASH_BYTES] == beyond:
                position = max(position, self._after(prediction, chain))
        return position

    def _after(self, prediction: Prediction, chain: Chain) -> int:
        # A state is kept at the prompt's last block boundary and at its regular snapshots, nowhere else.
        if chain.at(prediction.blocks - 1) == prediction.last:
            return prediction.blocks
        if 0 in self._every:
            return 0
        shared = prediction.common(chain)
        while any(shared % every for every in self._every):
            shared = min(shared - shared % every for every in self._every)
        return shared
