"""What a client asks for: prompt content, sampling parameters, and the request that carries them.

Pools, router, index and engine use lengths and hashes only. Executor, speculators and detokeniser
need token ids; a simulation has none and sends `BlockRuns`.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Union

import msgspec

assert sys.byteorder == "little", "packed token ids are little-endian"

_PAIR = struct.Struct("<qq")


class TokenIds(msgspec.Struct, array_like=True, gc=False, tag="t", frozen=True):
    """Token ids, packed as uint32 little-endian (a list of 200k ids costs 8 ms on a wire, this 0.1)."""

    packed: bytes = b""

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        return cls(array.array("I", ids).tobytes())

    def __len__(self) -> int:
        return len(self.packed) // 4

    def ids(self) -> array.array[int]:
        """The ids as `array('I')`."""
        out = array.array("I")
        out.frombytes(self.packed)
        return out

    def content(self, start: int, stop: int) -> bytes:
        """The bytes that name tokens start..stop (what a block hash covers)."""
        return self.packed[4 * start : 4 * stop]

    def slice(self, start: int, stop: int) -> TokenIds:
        return TokenIds(self.packed[4 * start : 4 * stop])

    def join(self, other: TokenIds) -> TokenIds:
        return TokenIds(self.packed + other.packed)


class BlockRuns(msgspec.Struct, array_like=True, gc=False, tag="r", frozen=True):
    """Opaque content: runs `[start, length)` of *virtual token ids* (int64 pairs, packed).

    A virtual token id names one token of a trace (trace block id x block size + offset, inside the
    session's scope); two prompts share a prefix exactly where their virtual ids are equal. Adjacent
    runs that continue each other are merged, so equal content has equal bytes.
    """

    packed: bytes = b""
    length: int = 0

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]]) -> BlockRuns:
        flat = array.array("q")
        total = 0
        for start, n in runs:
            if n <= 0:
                continue
            total += n
            if flat and flat[-2] + flat[-1] == start:
                flat[-1] += n
            else:
                flat.append(start)
                flat.append(n)
        return cls(flat.tobytes(), total)

    def __len__(self) -> int:
        return self.length

    def runs(self) -> list[tuple[int, int]]:
        flat = array.array("q")
        flat.frombytes(self.packed)
        return list(zip(flat[::2], flat[1::2], strict=True))

    def slice(self, start: int, stop: int) -> BlockRuns:
        """Tokens start..stop as runs of their own."""
        if len(self.packed) == 16 and 0 <= start < stop <= self.length:
            return BlockRuns(_PAIR.pack(_PAIR.unpack(self.packed)[0] + start, stop - start), stop - start)
        flat = array.array("q")
        flat.frombytes(self.packed)
        out: list[tuple[int, int]] = []
        at = 0
        for i in range(1, len(flat), 2):
            end = at + flat[i]
            if end > start:
                lo, hi = max(start, at), min(stop, end)
                if lo < hi:
                    out.append((flat[i - 1] + lo - at, hi - lo))
                if end >= stop:
                    break
            at = end
        return BlockRuns.of(out)

    def content(self, start: int, stop: int) -> bytes:
        """The bytes that name tokens start..stop (canonical: merged runs)."""
        return self.slice(start, stop).packed

    def join(self, other: BlockRuns) -> BlockRuns:
        if not self.length or not other.length:
            return self if self.length else other
        first, n = _PAIR.unpack_from(self.packed, len(self.packed) - 16)
        then, more = _PAIR.unpack_from(other.packed)
        if first + n != then:
            return BlockRuns(self.packed + other.packed, self.length + other.length)
        seam = _PAIR.pack(first, n + more)
        return BlockRuns(self.packed[:-16] + seam + other.packed[16:], self.length + other.length)


Prompt = Union[TokenIds, BlockRuns]


class SamplingParams(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """How tokens are chosen and when to stop. Defaults are the engine's, not a protocol's."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    seed: int | None = None  # None: the gateway draws one
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    speculate: bool = True  # per-request opt-out
    min_p: float = 0.0  # 0 = off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1 = off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    logprobs: int = -1  # k: log-probabilities of each output token and of the k likeliest; -1 = none
    choice: int = 0  # which of a request's answers this is: answers of one seed draw independently
    prompt_logprobs: int = -1  # the same of the prompt's tokens; its cached prefix is computed again
    max_drafts: int | None = None  # of a round; None: as many as the pool's


class GenerateRequest(msgspec.Struct, array_like=True, gc=False):
    """One generation, as the gateway hands it to a worker. Every added field has a default."""

    id: str
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    tenant: str = ""
    session: str = ""
    hashes: bytes = b""  # chain of the prompt's full blocks, 16 bytes each; set once by the gateway
    hash_key: bytes = b""  # the tenant's key (hashing.tenant_key); the engine extends the chain with it
    forced: Prompt | None = None  # recorded continuation: replaces each sampled token (trace replay)
    priority: int = 0
    traceparent: str = ""
    predicted_cached_tokens: int = 0  # set by the router, compared with the engine's own count
    age: float = 0.0  # seconds since it came to the gateway, when it is submitted: clocks of machines differ
    salt: str = ""  # of the client: a namespace inside its tenant's, which the gateway puts into `hash_key`
    dp_rank: int = 0  # which of its worker's engines; set by the gateway
    prediction: TokenIds | None = None  # the output that the client expects; it is drafted, never forced

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)


def pack_floats(values: Sequence[float]) -> bytes:
    """float32 little-endian, for logprobs on the wire."""
    return struct.pack(f"<{len(values)}f", *values)
