"""The hash chain of a prompt, computed once per request and only for what is new.

A turn of an agent repeats its session's last prompt and adds a little. The cache keeps the latest
prompts of each (tenant, session) with their chains; blocks inside the common prefix keep their hashes.
"""

from __future__ import annotations

import array
import logging
from collections import OrderedDict
from dataclasses import dataclass

from bien.core.kv.hashing import HASH_BYTES, extend_chain, tenant_key
from bien.core.request import GenerateRequest, Prompt, TokenIds

log = logging.getLogger("bien.gateway")
VARIANTS = 8  # prompts kept per session: its sub-agents interleave under the same name
KEYS = 4096  # derived and kept


@dataclass(slots=True)
class _Known:
    prompt: Prompt
    hashes: bytes

    @property
    def bytes(self) -> int:
        return len(self.prompt.packed) + len(self.hashes) + 256


class PromptChains:
    """Sets `hash_key` and `hashes` of requests. Least recently used sessions go when `capacity_bytes`
    of prompts and chains are kept."""

    def __init__(self, block_tokens: int, secret: str = "", capacity_bytes: int = 128 << 20) -> None:
        self.block_tokens = block_tokens
        self.capacity_bytes = capacity_bytes
        self.kept_bytes = 0
        self._secret = secret.encode()
        self._warned = False
        self._keys: dict[tuple[str, str], bytes] = {}
        self._sessions: OrderedDict[tuple[bytes, str], list[_Known]] = OrderedDict()  # latest prompt last

    def name(self, request: GenerateRequest) -> None:
        """Write the key of its tenant and salt, and the chain of the prompt's full blocks, into `request`."""
        prompt = request.prompt
        key = self._keys.get((request.tenant, request.salt)) or self._derive(request)
        session = (key, request.session)
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = []
        else:
            self._sessions.move_to_end(session)
        best, shared = None, 0
        for candidate in known:
            common = common_tokens(candidate.prompt, prompt)
            if common > shared:
                best, shared = candidate, common
        start = b""
        if best is not None:
            start = best.hashes[: shared // self.block_tokens * HASH_BYTES]
        hashes = extend_chain(key, start, prompt, self.block_tokens, len(prompt))
        request.hash_key = key
        request.hashes = hashes
        # A prompt that goes on from a kept one replaces it; one that merely shares a beginning does not.
        if best is not None and 2 * shared >= len(best.prompt):
            self._drop(known, best)
        elif len(known) == VARIANTS:
            self._drop(known, known[0])
        latest = _Known(prompt, hashes)
        known.append(latest)
        self.kept_bytes += latest.bytes
        while self.kept_bytes > self.capacity_bytes and self._sessions:
            _, old = self._sessions.popitem(last=False)
            self.kept_bytes -= sum(entry.bytes for entry in old)

    def _derive(self, request: GenerateRequest) -> bytes:
        tenant, salt = request.tenant, request.salt
        if tenant and not self._secret and not self._warned and isinstance(request.prompt, TokenIds):
            self._warned = True
            log.warning(
                "requests of several tenants, and gateway.secret is empty: whoever knows a tenant's name can "
                "compute the names of its blocks; set a secret, the same one for all gateways"
            )
        if len(self._keys) >= KEYS:
            self._keys.clear()
        key = self._keys[tenant, salt] = tenant_key(tenant, self._secret, salt)
        return key

    def _drop(self, known: list[_Known], entry: _Known) -> None:
        known.remove(entry)
        self.kept_bytes -= entry.bytes


def common_tokens(a: Prompt, b: Prompt) -> int:
    """Length of the common prefix of two prompts, in tokens."""
    if isinstance(a, TokenIds):
        return _common_bytes(a.packed, b.packed) // 4 if isinstance(b, TokenIds) else 0
    if isinstance(b, TokenIds):
        return 0
    same = _common_bytes(a.packed, b.packed) // 16
    left, right = array.array("q"), array.array("q")
    left.frombytes(a.packed[: 16 * same + 16])
    right.frombytes(b.packed[16 * same : 16 * same + 16])
    tokens = sum(left[1 : 2 * same : 2])
    if right and len(left) > 2 * same and left[2 * same] == right[0]:
        tokens += min(left[2 * same + 1], right[1])
    return tokens


def _common_bytes(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b))
    at, step = 0, 256
    # Prompts differ at once or late: gallop, then halve. Slices compare by memcmp.
    while at < n and a[at : at + step] == b[at : at + step]:
        at += step
        step *= 2
    low, high = min(at, n), min(at + step, n)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low + (low < high and a[low] == b[low])
