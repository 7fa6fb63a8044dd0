"""The hash chain of a sequence: the gateway names the prompt's blocks, the engine those that follow."""

from __future__ import annotations

from bien.core.errors import UserError
from bien.core.kv.hashing import HASH_BYTES, continue_chain, extend_chain, root_hash
from bien.core.request import GenerateRequest
from bien.core.sequence import Sequence


def prompt_chain(request: GenerateRequest, block_tokens: int) -> bytes:
    """Hashes of the prompt's full blocks. UserError: the request brings those of another number of them."""
    want = request.prompt_tokens // block_tokens
    if len(request.hashes) == want * HASH_BYTES:
        return request.hashes
    if request.hashes:
        raise UserError(
            f"hashes cover {len(request.hashes) // HASH_BYTES} blocks, the prompt has {want} full blocks "
            f"of {block_tokens} tokens",
            field="hashes",
        )
    return extend_chain(request.hash_key, b"", request.prompt, block_tokens, request.prompt_tokens)


def extended_chain(s: Sequence, blocks: int, block_tokens: int) -> bytes:
    """Hashes of the full blocks of the content of `s`, the first `blocks` at least."""
    have = len(s.hashes) // HASH_BYTES
    if blocks > have:
        parent = s.hashes[-HASH_BYTES:] or root_hash(s.request.hash_key)
        tail = s.content.named(have * block_tokens, blocks * block_tokens)
        s.hashes += continue_chain(s.request.hash_key, parent, tail, block_tokens)
    return s.hashes
