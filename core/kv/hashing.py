"""Keyed hash chain: the name of a block's *content* and of everything before it.

BLAKE2b-128 over (parent, uint32-LE token ids, length-prefixed extra), keyed by the tenant, so that no
tenant can name another's block. Opaque runs, which exist in simulations only, are named by arithmetic that
is as long but keeps no secret (run_names.py). The prompt's chain is computed once, in the gateway; the
engine only extends it.
"""

from __future__ import annotations

import hashlib

from bien.core.kv.run_names import name_runs
from bien.core.request import BlockRuns, Prompt

HASH_BYTES = 16


def tenant_key(tenant: str, secret: bytes = b"", salt: str = "") -> bytes:
    """The 32-byte key of a tenant's chain, or of what the tenant keeps apart by a salt of its own.

    The salt's key is derived from the tenant's: whatever a client makes of its salt, it stays inside its
    tenant's names. Texts are length-prefixed.
    """
    if len(secret) > hashlib.blake2b.MAX_KEY_SIZE:  # all of it counts
        secret = hashlib.blake2b(secret, person=b"bien-secret").digest()
    key = _derive(tenant, secret, b"bien-tenant")
    return _derive(salt, key, b"bien-client-salt") if salt else key


def _derive(text: str, key: bytes, person: bytes) -> bytes:
    data = text.encode(errors="surrogatepass")
    data = len(data).to_bytes(8, "little") + data
    return hashlib.blake2b(data, key=key, person=person, digest_size=32).digest()


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
    if isinstance(prompt, BlockRuns):
        return name_runs(parent, prompt, start, stop, block_tokens)
    # A copy of the keyed state costs 0.2 us less per block than building it again.
    keyed = hashlib.blake2b(key=key, digest_size=HASH_BYTES)
    packed, size = prompt.packed, 4 * block_tokens
    out = []
    for at in range(4 * start, 4 * stop, size):
        state = keyed.copy()
        state.update(parent + packed[at : at + size])
        parent = state.digest()
        out.append(parent)
    return b"".join(out)
