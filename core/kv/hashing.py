"""Keyed hash chain: the name of a block's *content* and of everything before it.

BLAKE2b-128 over (parent, content, length-prefixed extra), keyed by the tenant, so that no tenant can
name another's block. Content is uint32-LE token ids, or canonical virtual runs in simulation. The
prompt's chain is computed once, in the gateway; the engine only extends it.
"""

from __future__ import annotations

import array
import hashlib
import struct
from collections.abc import Iterator

from bien.core.request import BlockRuns, Prompt, TokenIds

HASH_BYTES = 16


def tenant_key(tenant: str, secret: bytes = b"") -> bytes:
    """The 32-byte key of a tenant's chain."""
    return hashlib.blake2b(tenant.encode(), key=secret[:64], person=b"bien-tenant", digest_size=32).digest()


def root_hash(key: bytes, extra: bytes = b"") -> bytes:
    """The parent of a first block; `extra` (adapter, salt) is length-prefixed."""
    head = len(extra).to_bytes(4, "little") + extra
    return hashlib.blake2b(head, key=key, digest_size=HASH_BYTES).digest()


def block_hash(key: bytes, parent: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(parent + content, key=key, digest_size=HASH_BYTES).digest()


def extend_chain(
    key: bytes, hashes: bytes, prompt: Prompt, block_tokens: int, stop_tokens: int, extra: bytes = b""
) -> bytes:
    """Append the hashes of the full blocks of `prompt` that end at or before `stop_tokens`."""
    have = len(hashes) // HASH_BYTES
    want = min(stop_tokens, len(prompt)) // block_tokens
    if want <= have:
        return hashes
    parent = hashes[-HASH_BYTES:] if have else root_hash(key, extra)
    return hashes + _chain(key, parent, prompt, have * block_tokens, want * block_tokens, block_tokens)


def continue_chain(key: bytes, parent: bytes, content: Prompt, block_tokens: int) -> bytes:
    """The hashes of the full blocks of `content` that follow the block named `parent` (a hash)."""
    return _chain(key, parent, content, 0, len(content) // block_tokens * block_tokens, block_tokens)


def _chain(key: bytes, parent: bytes, prompt: Prompt, start: int, stop: int, block_tokens: int) -> bytes:
    # A copy of the keyed state costs 0.2 us less per block than building it again.
    keyed = hashlib.blake2b(key=key, digest_size=HASH_BYTES)
    named = _ids_of_blocks if isinstance(prompt, TokenIds) else _runs_of_blocks
    out = []
    for content in named(prompt, start, stop, block_tokens):  # type: ignore[arg-type]
        state = keyed.copy()
        state.update(parent + content)
        parent = state.digest()
        out.append(parent)
    return b"".join(out)


def _ids_of_blocks(prompt: TokenIds, start: int, stop: int, size: int) -> Iterator[bytes]:
    packed = prompt.packed
    for at in range(4 * start, 4 * stop, 4 * size):
        yield packed[at : at + 4 * size]


def _runs_of_blocks(prompt: BlockRuns, start: int, stop: int, size: int) -> Iterator[bytes]:
    """`prompt.content` of each block, in one walk over the runs."""
    flat = array.array("q")
    flat.frombytes(prompt.packed)
    pack = struct.Struct("<qq").pack
    i = at = 0  # run i covers tokens at..at + flat[i + 1]
    for block in range(start, stop, size):
        while at + flat[i + 1] <= block:
            at += flat[i + 1]
            i += 2
        left = at + flat[i + 1] - block
        if left >= size:
            yield pack(flat[i] + block - at, size)
            continue
        pieces = [(flat[i] + block - at, left)]
        missing, j = size - left, i
        while missing > 0:
            j += 2
            pieces.append((flat[j], min(missing, flat[j + 1])))
            missing -= flat[j + 1]
        yield BlockRuns.of(pieces).packed
