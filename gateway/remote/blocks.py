"""`BlockMap`: the blocks of a foreign engine by our own names.

An engine calls its blocks what it likes; what is in them it tells (token ids, and the block before). From
these our own hash chain is computed, with the key of whoever the block belongs to, so neither the engine's
hash function nor its seed matter. Its blocks may have any size: one of ours is there exactly while blocks of
the engine are there that hold all parts of it. Prompts that part inside one of the engine's blocks have what
they share of it twice, and it is gone when both are.

Blocks that hold more than tokens (an adapter, images, a salt that is none of ours) have no name here, and so
have all that follow them: no request can ask for them.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator

from bien.core.kv.events import KVEvent
from bien.core.kv.hashing import HASH_BYTES, continue_chain, root_hash
from bien.core.request import TokenIds
from bien.gateway.remote.wire import Cleared, EngineHash, Removed, Stored

KeyOf = Callable[[str], bytes | None]  # from a salt ("": none) to the key of its chain; None: not ours
TIERS = {"GPU": "device", "CPU": "host", "CPU_PINNED": "host"}
LOWEST = "disk"  # everything else that an engine names
MAX_SALTS = 10000
LONGEST_SALT = 256  # ours are shorter


def tier_of(medium: str | None) -> str:
    return "device" if medium is None else TIERS.get(medium.upper(), LOWEST)


def _more(extra: object) -> bool:
    """Whether extra keys say that more than tokens is in the block. Of a form that nobody knows: they do."""
    return extra is not None and not (isinstance(extra, (list, tuple, dict)) and not extra)


class _Block:
    """One of the engine's."""

    __slots__ = ("at", "key", "ours", "parent", "rest", "tiers")

    def __init__(self, key: bytes, parent: bytes, at: bytes, rest: bytes, ours: bytes) -> None:
        self.key = key  # of the chain
        self.parent = parent  # our hash before `ours`, b"" at a root
        self.at = at  # our newest hash at its end, b"" where none has ended yet
        self.rest = rest  # packed tokens behind `at`: less than one block of ours
        self.ours = ours  # our blocks that end in it, packed
        self.tiers: tuple[str, ...] = ()

    def named(self) -> Iterator[tuple[bytes, bytes]]:
        """Ours that end in it, each behind the one before."""
        parent = self.parent
        for i in range(0, len(self.ours), HASH_BYTES):
            name = self.ours[i : i + HASH_BYTES]
            yield parent, name
            parent = name


class BlockMap:
    """Those of one KV group of one engine."""

    def __init__(self, block_tokens: int, key_of: KeyOf, group: int = 0) -> None:
        self.block_tokens = block_tokens
        self.group = group
        self.orphans = 0  # blocks told of whose parent is not known: they cannot be named
        self.foreign = 0  # blocks told of that hold more than tokens
        self.unknown_salts: set[str] = set()  # of these, such as may turn out to be ours
        self._key_of = key_of
        self._blocks: dict[EngineHash, _Block | None] = {}  # None: a foreign one
        # Where the first of ours that ends in a block began in others: all that hold a part of it.
        self._parts: dict[EngineHash, tuple[EngineHash, ...]] = {}
        self._within: dict[EngineHash, list[EngineHash]] = {}  # a block -> those of which it is such a part
        self._path: dict[EngineHash, tuple[EngineHash, ...]] = {}  # the engine's -> those with its `rest`
        self._tiers: dict[tuple[str, ...], tuple[str, ...]] = {}  # the same few, shared by all blocks
        # How often one of ours is there, unless it is just one of the engine's.
        self._often: dict[tuple[str, bytes], int] = {}

    def __len__(self) -> int:
        """Blocks of the engine that are known, foreign ones too."""
        return len(self._blocks)

    def store(self, event: Stored) -> list[KVEvent]:
        """What it means for our index."""
        blocks = self._blocks
        if any(blocks.get(h) is None for h in event.hashes):
            if event.tokens:
                self._learn(event)
            else:  # a lower tier names blocks only; what is in them, the device has told
                self.orphans += sum(h not in blocks for h in event.hashes)
        return self._put(event.hashes, tier_of(event.medium))

    def remove(self, event: Removed) -> list[KVEvent]:
        tier = tier_of(event.medium)
        lost: list[bytes] = []
        for hash in event.hashes:
            block = self._blocks.get(hash)
            if block is None:
                self._blocks.pop(hash, None)
            elif tier in block.tiers:
                lost += [name for _, name in self._there(hash, block, tier) if self._drop(hash, name, tier)]
                self._leave(hash, block, tier)
        return [KVEvent("removed", self.group, b"", b"".join(lost), tier)] if lost else []

    def clear(self, event: Cleared) -> list[KVEvent]:
        if event.medium is None:
            tiers = sorted({tier for block in self._blocks.values() if block for tier in block.tiers})
            self.reset()
        else:
            tiers = [tier_of(event.medium)]
            for hash, block in list(self._blocks.items()):
                if block is not None and tiers[0] in block.tiers:
                    self._leave(hash, block, tiers[0])
            self._often = {key: n for key, n in self._often.items() if key[0] != tiers[0]}
        return [KVEvent("cleared", self.group, tier=tier) for tier in tiers]

    def reset(self) -> None:
        """Nothing is known any more."""
        self._blocks.clear()
        self._parts.clear()
        self._within.clear()
        self._often.clear()
        self._path.clear()
        self.unknown_salts.clear()

    def snapshot(self) -> list[KVEvent]:
        """All that is there, as "stored" events."""
        found: dict[tuple[str, bytes], bytes] = {}
        for hash, block in self._blocks.items():
            for tier in block.tiers if block is not None else ():
                assert block is not None
                for parent, name in self._ending(hash, block, tier):
                    found[tier, name] = parent
        return [KVEvent("stored", self.group, parent, name, tier) for (tier, name), parent in found.items()]

    # What blocks are.

    def _learn(self, event: Stored) -> None:
        blocks = self._blocks
        before = self._start(event)
        if before is None and event.parent is not None and event.parent not in blocks:
            self.orphans += len(event.hashes)
            return
        size = 4 * (len(event.tokens) // len(event.hashes))
        packed = array.array("I", event.tokens).tobytes()
        last: EngineHash | None = event.parent
        for i, hash in enumerate(event.hashes):
            # A salt enters the hash of a chain's first block only, and `_start` has read it.
            inside = event.extra is not None and _more(event.extra[i]) and (i or event.parent is not None)
            if before is None or event.adapter or inside:
                self.foreign += hash not in blocks
                blocks.setdefault(hash, None)
                before = None
                continue
            block = blocks.get(hash)
            if block is None:
                block = blocks[hash] = self._follow(before, last, hash, packed[size * i : size * (i + 1)])
            before, last = block, hash

    def _start(self, event: Stored) -> _Block | None:
        """What comes before the first of them; None for what has no name here."""
        if event.parent is not None:
            return self._blocks.get(event.parent)
        extra = event.extra[0] if event.extra else None
        salt = event.salt or ""
        if _more(extra):
            one = extra[0] if isinstance(extra, (list, tuple)) and len(extra) == 1 else None
            if not isinstance(one, str) or (salt and one != salt):
                return None
            salt = one
        key = self._key_of(salt)
        if key is None:
            if len(self.unknown_salts) < MAX_SALTS and len(salt) <= LONGEST_SALT:
                self.unknown_salts.add(salt)
            return None
        return _Block(key, b"", b"", b"", b"")

    def _follow(self, before: _Block, last: EngineHash | None, hash: EngineHash, tokens: bytes) -> _Block:
        size, key = 4 * self.block_tokens, before.key
        content = before.rest + tokens
        whole = len(content) // size * size
        ours = b""
        if whole:
            parent = before.at or root_hash(key)
            ours = continue_chain(key, parent, TokenIds(content[:whole]), self.block_tokens)
        at = ours if len(ours) == HASH_BYTES else ours[-HASH_BYTES:] or before.at
        block = _Block(key, before.at, at, content[whole:], ours)
        path = self._path.get(last, ()) if before.rest and last is not None else ()
        if path and ours:
            self._parts[hash] = (*path, hash)
            for part in path:
                self._within.setdefault(part, []).append(hash)
        if block.rest:
            self._path[hash] = (hash,) if ours else (*path, hash)
        return block

    def _leave(self, hash: EngineHash, block: _Block, tier: str) -> None:
        block.tiers = tuple(t for t in block.tiers if t != tier)
        if block.tiers:
            return
        del self._blocks[hash]
        self._path.pop(hash, None)
        for part in self._parts.pop(hash, (hash,))[:-1]:
            held = self._within[part]
            held.remove(hash)
            if not held:
                del self._within[part]

    # Where they are.

    def _put(self, hashes: list[EngineHash], tier: str) -> list[KVEvent]:
        runs: list[tuple[bytes, list[bytes]]] = []
        for hash in hashes:
            block = self._blocks.get(hash)
            if block is None or tier in block.tiers:
                continue
            tiers = (*block.tiers, tier)
            block.tiers = self._tiers.setdefault(tiers, tiers)
            for parent, name in self._there(hash, block, tier):
                if not self._take(hash, name, tier):
                    continue
                if runs and runs[-1][1][-1] == parent:
                    runs[-1][1].append(name)
                else:
                    runs.append((parent, [name]))
        return [KVEvent("stored", self.group, parent, b"".join(names), tier) for parent, names in runs]

    def _there(self, hash: EngineHash, block: _Block, tier: str) -> list[tuple[bytes, bytes]]:
        """Ours that it holds, or holds a part of, and that are there in full; each behind the one before."""
        found = self._ending(hash, block, tier)
        for other in self._within.get(hash, ()):
            behind = self._blocks[other]
            if behind is not None and tier in behind.tiers and self._whole(other, tier):
                found.append(next(behind.named()))
        return found

    def _ending(self, hash: EngineHash, block: _Block, tier: str) -> list[tuple[bytes, bytes]]:
        found = list(block.named())
        return found if self._whole(hash, tier) else found[1:]

    def _whole(self, hash: EngineHash, tier: str) -> bool:
        """Whether all parts are there of the first of ours that ends in it."""
        parts = self._parts.get(hash) if self._parts else None
        if parts is None:
            return True
        blocks = [self._blocks.get(part) for part in parts]
        return all(block is not None and tier in block.tiers for block in blocks)

    def _take(self, hash: EngineHash, name: bytes, tier: str) -> bool:
        """Whether it was not there."""
        if self._single(hash, name):
            return True
        often = self._often[tier, name] = self._often.get((tier, name), 0) + 1
        return often == 1

    def _drop(self, hash: EngineHash, name: bytes, tier: str) -> bool:
        """Whether it is gone."""
        if self._single(hash, name):
            return True
        often = self._often[tier, name] = self._often[tier, name] - 1
        if not often:
            del self._often[tier, name]
        return not often

    def _single(self, hash: EngineHash, name: bytes) -> bool:
        """Whether the engine's block is this one of ours, and nothing else: then it is there once."""
        block = self._blocks[hash]
        return block is not None and block.ours == name and not block.rest and hash not in self._parts
