"""Keyed hash chain: the name of a block's *content* and of everything before it.

BLAKE2b-128 over (parent, content, length-prefixed extra), keyed by the tenant, so that no tenant can
name another's block. Content is uint32-LE token ids, or canonical virtual runs in simulation. The
prompt's chain is computed once, in the gateway; the engine only extends it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from bien.core.request import Prompt

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
    out = [hashes]
    blake = hashlib.blake2b
    for content in _contents(prompt, have * block_tokens, want * block_tokens, block_tokens):
        parent = blake(parent + content, key=key, digest_size=HASH_BYTES).digest()
        out.append(parent)
    return b"".join(out)


def _contents(prompt: Prompt, start: int, stop: int, block_tokens: int) -> Iterator[bytes]:
    part = prompt.slice(start, stop)
    for at in range(0, stop - start, block_tokens):
        yield part.content(at, at + block_tokens)
