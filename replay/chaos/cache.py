"""`PrefixCache`: what a stand-in engine has cached, and the KV events that it tells of it, as maps."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal, Union

Name = Union[int, bytes]
Naming = Literal["bytes", "ints", "counted"]
Event = dict[str, Any]


@dataclass(slots=True)
class Block:
    name: Name
    parent: Name | None
    tokens: list[int]
    salt: str


class PrefixCache:
    """Blocks are content; what they are called is the engine's own business: digests of a seed (`bytes`, or
    their low 64 bits, `ints`), or 1, 2, 3, ... (`counted`), which other engines use for other blocks."""

    def __init__(self, block: int, capacity: int, naming: Naming, seed: str) -> None:
        """`capacity` in blocks."""
        self.block = block
        self._capacity = capacity
        self._naming = naming
        self._seed = seed.encode()
        self._count = 0
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # by content, least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def found(self, ids: list[int], salt: str) -> int:
        """Cached tokens of a prompt, whose last token is always computed."""
        chain = self._chain(ids[:-1], salt)
        return self.block * next((i for i, key in enumerate(chain) if key not in self._blocks), len(chain))

    def store(self, ids: list[int], salt: str) -> list[Event]:
        """Its whole blocks are there from now on, and were used last; what goes for it is told first."""
        chain = self._chain(ids, salt)
        runs: list[list[Block]] = []  # of new blocks, each behind one that was there
        parent: Name | None = None
        for i, key in enumerate(chain):
            block = self._blocks.get(key)
            if block is None:
                tokens = ids[i * self.block : (i + 1) * self.block]
                block = self._blocks[key] = Block(self._name(key), parent, tokens, salt)
                if runs and runs[-1][-1].name == parent:
                    runs[-1].append(block)
                else:
                    runs.append([block])
            parent = block.name
        for key in reversed(chain):  # of one prompt its end goes first
            self._blocks.move_to_end(key)
        gone = []
        while len(self._blocks) > self._capacity:
            gone.append(self._blocks.popitem(last=False)[1].name)
        return ([_removed(gone)] if gone else []) + [_stored(run, self.block) for run in runs]

    def drop(self, ids: list[int], salt: str = "", keep: int = 0) -> list[Event]:
        """Its blocks are gone, but for the first `keep`; those of others that begin with it, too."""
        gone = [self._blocks.pop(key).name for key in self._chain(ids, salt)[keep:] if key in self._blocks]
        return [_removed(gone[::-1])] if gone else []

    def clear(self) -> list[Event]:
        self._blocks.clear()
        return [{"type": "AllBlocksCleared"}]

    def _chain(self, ids: list[int], salt: str) -> list[bytes]:
        key, chain = hashlib.blake2b(salt.encode(), digest_size=16).digest(), []
        for i in range(0, len(ids) - self.block + 1, self.block):
            content = b"".join(token.to_bytes(4, "little") for token in ids[i : i + self.block])
            key = hashlib.blake2b(content, key=key, digest_size=16).digest()
            chain.append(key)
        return chain

    def _name(self, key: bytes) -> Name:
        if self._naming == "counted":
            self._count += 1
            return self._count
        digest = hashlib.sha256(self._seed + key).digest()
        return digest if self._naming == "bytes" else int.from_bytes(digest[-8:], "big")


def _stored(blocks: list[Block], size: int) -> Event:
    salt = blocks[0].salt
    event: Event = {
        "type": "BlockStored",
        "block_hashes": [block.name for block in blocks],
        "parent_block_hash": blocks[0].parent,
        "token_ids": [token for block in blocks for token in block.tokens],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    if salt and blocks[0].parent is None:  # it enters the hash of a chain's first block only
        event["extra_keys"] = [[salt], *[None] * (len(blocks) - 1)]
    return event


def _removed(names: list[Name]) -> Event:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}
