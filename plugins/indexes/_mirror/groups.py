"""The blocks of one KV group of one engine, and how far into a prompt's chain they reach."""

from __future__ import annotations

from collections.abc import Iterator

from bien.core.api import HASH_BYTES, KVEvent
from bien.plugins.indexes._mirror.chain import DEVICE, Chain, split

UNKNOWN = b"?"  # parent of a block of which only a lower tier told


class Everywhere:
    """A group with blocks for every position (full, latent, indexer, compressed, draft), block by block: any
    tiers, any order."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes] = {}  # present block -> its parent, b"" at a root
        self.orphans = 0  # present blocks whose parent is absent; 0 = prefix-closed
        # Present children of a block: those counted here, and one more if it is present and no tail. So a run
        # of blocks costs an entry each above, and no more.
        self._branches: dict[bytes, int] = {}
        self._tails: set[bytes] = set()
        # What each tier holds, once there is more than one; until then `parents` says it of the only one.
        self._tiers: dict[str, set[bytes]] = {}
        self._only = ""

    def __contains__(self, block: bytes) -> bool:
        return block in self.parents

    def __len__(self) -> int:
        return len(self.parents)

    def events(self) -> Iterator[KVEvent]:
        """What leads to all this, while there has been one tier."""
        for block, parent in self.parents.items():
            yield KVEvent("stored", 0, b"" if parent is UNKNOWN else parent, block, self._only)

    def holds(self, hashes: bytes) -> bool:
        """Whether the last block of a chain is present."""
        return hashes[-HASH_BYTES:] in self.parents

    def store(self, event: KVEvent) -> bool:
        held = self._held(event.tier)
        # Stores of lower tiers name blocks, not chains: without a parent they say nothing of order.
        chained = event.tier == DEVICE or bool(event.parent)
        parent = event.parent if chained else UNKNOWN
        blocks = list(split(event.hashes))
        if chained and len(blocks) > 1 and self._new(blocks):
            # A run of which nothing is known: the same as below, without a look at each block.
            self.orphans += bool(parent) and parent not in self.parents
            self.parents.update(zip(blocks, [parent, *blocks[:-1]], strict=True))
            self._gain(parent)
            self._tails.add(blocks[-1])
            if held is not None:
                held.update(blocks)
            return True
        for block in blocks:
            known = self.parents.get(block)
            if known is None:
                self._link(block, parent)
            elif known is UNKNOWN and chained:
                self._unlink(block)
                self._link(block, parent)
            if held is not None:
                held.add(block)
            if chained:
                parent = block
        return True

    def _held(self, tier: str) -> set[bytes] | None:
        """What a tier holds; None for the only one there has ever been."""
        if not self._tiers:
            if tier == (self._only or tier):
                self._only = tier
                return None
            self._tiers[self._only] = set(self.parents)
        return self._tiers.setdefault(tier, set())

    def _new(self, blocks: list[bytes]) -> bool:
        """Whether these are distinct, and neither present nor a parent of what is. Where no present block
        lacks its parent, an absent one has nothing behind it."""
        return not self.orphans and blocks[0] not in self.parents and len(set(blocks)) == len(blocks)

    def remove(self, hashes: bytes, tier: str) -> bool:
        blocks = list(split(hashes))
        if not self._tiers:
            if tier == self._only and not self._unlink_tail(blocks):
                for block in blocks:
                    if block in self.parents:
                        self._unlink(block)
            return True
        held = self._tiers.get(tier)
        if held is None:
            return True
        others = [blocks for name, blocks in self._tiers.items() if name != tier and blocks]
        for block in blocks:
            if block not in held:
                continue
            held.remove(block)
            if not any(block in blocks for blocks in others):
                self._unlink(block)
        return True

    def clear(self, tier: str) -> None:
        held = self._tiers.get(tier, ()) if self._tiers else self.parents if tier == self._only else ()
        self.remove(b"".join(held), tier)

    def last(self, chain: Chain, limit: int) -> int:
        """Blocks of the chain, from its start and at most `limit`, that are present."""
        present, at = self.parents, chain.at
        if not limit or at(0) not in present:
            return 0
        if self.orphans:
            return next((i for i in range(limit) if at(i) not in present), limit)
        if at(limit - 1) in present:
            return limit
        low, high = 0, limit - 1  # present, absent
        while high - low > 1:
            middle = (low + high) // 2
            if at(middle) in present:
                low = middle
            else:
                high = middle
        return high

    def _unlink_tail(self, blocks: list[bytes]) -> bool:
        """Take away a run that nothing follows, as `_unlink` would block by block; False: it is none."""
        parents = self.parents
        if (
            len(blocks) < 2
            or self.orphans
            or blocks[-1] not in self._tails
            or blocks[0] not in parents
            or list(map(parents.get, blocks[1:])) != blocks[:-1]
            or not self._branches.keys().isdisjoint(blocks)
        ):
            return False
        self._tails.remove(blocks[-1])
        self._lose(parents[blocks[0]])
        for block in blocks:
            del parents[block]
        return True

    def _link(self, block: bytes, parent: bytes) -> None:
        self.parents[block] = parent
        self._gain(parent)
        self._tails.add(block)
        self.orphans += bool(parent) and parent not in self.parents
        self.orphans -= self._branches.get(block, 0)

    def _unlink(self, block: bytes) -> None:
        parent = self.parents.pop(block)
        self._lose(parent)
        if block in self._tails:
            self._tails.remove(block)
        else:
            self._branches[block] = self._branches.get(block, 0) + 1
        self.orphans -= bool(parent) and parent not in self.parents
        self.orphans += self._branches.get(block, 0)

    def _gain(self, parent: bytes) -> None:
        if parent in self._tails:
            self._tails.remove(parent)
        else:
            self._branches[parent] = self._branches.get(parent, 0) + 1

    def _lose(self, parent: bytes) -> None:
        left = self._branches.get(parent, 0) - 1
        if left > 0:
            self._branches[parent] = left
        elif not left:
            del self._branches[parent]
        else:
            self._tails.add(parent)


class Somewhere:
    """A group that needs only some blocks: a window before the position, or a state at it."""

    def __init__(self, window: int) -> None:
        self.window = window  # blocks before a position that must be present; 0: a state, at it
        self._tiers: dict[str, set[bytes]] = {DEVICE: set()}

    def __contains__(self, block: bytes) -> bool:
        for held in self._tiers.values():  # noqa: SIM110 (a generator would double the cost)
            if block in held:
                return True
        return False

    def __len__(self) -> int:
        return len(set().union(*self._tiers.values()))

    def events(self) -> Iterator[KVEvent]:
        """What leads to all this."""
        for tier, held in self._tiers.items():
            yield KVEvent("stored", 0, b"", b"".join(held), tier)

    def holds(self, hashes: bytes) -> bool:
        """Whether the last block of a chain is present."""
        return hashes[-HASH_BYTES:] in self

    def store(self, event: KVEvent) -> bool:
        self._tiers.setdefault(event.tier, set()).update(split(event.hashes))
        return True

    def remove(self, hashes: bytes, tier: str) -> bool:
        if tier in self._tiers:
            self._tiers[tier].difference_update(split(hashes))
        return True

    def clear(self, tier: str) -> None:
        self._tiers[tier] = set()

    def last(self, chain: Chain, limit: int) -> int:
        """The longest position, in blocks and at most `limit`, at which the group holds."""
        if not self.window:
            positions = chain.positions
            found = (positions[b] for held in self._tiers.values() for b in positions.keys() & held)
            return max((p for p in found if p <= limit), default=0)
        position = block = limit
        while block > max(0, position - self.window):
            block -= 1
            if chain.at(block) not in self:
                position = block
        return position
