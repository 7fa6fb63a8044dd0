"""`Holdings`: the blocks of one engine over all its KV groups, in Python."""

from __future__ import annotations

from collections.abc import Iterator

from bien.core.api import GroupKind, KVEvent
from bien.gateway.api import WorkerInfo
from bien.plugins.indexes._mirror.chain import Chain
from bien.plugins.indexes._mirror.groups import Everywhere, Somewhere
from bien.plugins.indexes._mirror.runs import Runs


class Holdings:
    def __init__(self, info: WorkerInfo) -> None:
        self.groups: list[Runs | Everywhere | Somewhere] = []
        self.every: list[int] = []  # of the state groups: blocks between snapshots, 0 = at the end only
        for kind, window, every in zip(
            info.group_kinds, info.group_windows, info.snapshot_tokens, strict=True
        ):
            if kind == GroupKind.STATE.value:
                self.groups.append(Somewhere(0))
                self.every.append(every // info.block_tokens)
            elif kind == GroupKind.WINDOW.value and window:
                self.groups.append(Somewhere(-(-window // info.block_tokens)))
            else:
                self.groups.append(Runs())
        self._sort()

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def feed(self, event: KVEvent) -> None:
        if event.op == "stored":
            if not self.groups[event.group].store(event):
                self._by_block(event.group).store(event)
        elif event.op == "removed":
            if not self.groups[event.group].remove(event.hashes, event.tier):
                self._by_block(event.group).remove(event.hashes, event.tier)
        elif event.op == "cleared":
            for group in self.groups:
                group.clear(event.tier)

    def holds(self, hashes: bytes) -> bool:
        """Whether the last block of a chain is present, by the group that is there for longest."""
        return (self.whole or self.groups)[0].holds(hashes)

    def events(self, tier: str) -> Iterator[KVEvent]:
        """What leads to all this; `tier` is the only one there has been."""
        for number, group in enumerate(self.groups):
            for event in group.events():
                yield KVEvent("stored", number, event.parent, event.hashes, tier)

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

    def _sort(self) -> None:
        self.whole = [g for g in self.groups if not isinstance(g, Somewhere)]
        self.partial = [g for g in self.groups if isinstance(g, Somewhere)]

    def _by_block(self, group: int) -> Everywhere:
        """What runs cannot say any more: the same content, block by block from now on."""
        runs, self.groups[group] = self.groups[group], (found := Everywhere())
        assert isinstance(runs, Runs)
        for event in runs.events():
            found.store(event)
        self._sort()
        return found
