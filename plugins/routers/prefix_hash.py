"""Prefix hash: consistent hashing of the prompt's first tokens, with bounded loads.

Prompts that begin alike meet on one worker without any index; a worker that comes or goes moves its share of
them only. V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018: who
has `load_factor` times the mean load is passed over for the next on the ring. smg's `prefix_hash` does this
with the same defaults, 256 tokens and 1.25.
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from bien.core.api import HASH_BYTES, Context, Provider, hookimpl
from bien.gateway.api import Decision, RouteRequest, Target, cached_tokens
from bien.plugins.routers._choice import Passive, load, lowest

Home = tuple[str, int]  # worker and rank


class PrefixHashConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`prefix_tokens` are rounded to whole blocks, at least one. `points`: of each worker on the ring."""

    prefix_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    load_factor: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.25
    points: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 160


class PrefixHash(Passive):
    def __init__(self, config: PrefixHashConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._places: list[Home] = []  # of the ring
        self._ring: list[tuple[int, int]] = []  # points in order, each with the index of its place

    def choose(self, request: RouteRequest, targets: Sequence[Target]) -> Decision:
        blocks = max(1, self._config.prefix_tokens // targets[0].info.block_tokens)
        end = min(len(request.hashes), blocks * HASH_BYTES)
        reasons: dict[str, float | str] = {}
        if end:
            # A block's hash names all before it: the last one of the prefix is the prefix's own.
            at, passed = self._walk(request.hashes[end - HASH_BYTES : end], targets)
            reasons["passed_over"] = float(passed)
        else:  # shorter than a block: there is nothing to share
            at, _ = lowest(map(load, targets), self._rng)
        reasons["requests"] = float(load(targets[at]))
        return Decision(at, cached_tokens(request, targets[at]), reasons)

    def _walk(self, prefix: bytes, targets: Sequence[Target]) -> tuple[int, int]:
        self._build([(t.worker, t.dp_rank) for t in targets])
        loads = [load(t) for t in targets]
        bound = math.ceil(self._config.load_factor * (sum(loads) + 1) / len(targets))
        start = bisect_left(self._ring, (int.from_bytes(prefix[:8], "little"), 0))
        passed: set[int] = set()
        for _, at in self._ring[start:] + self._ring[:start]:
            if loads[at] < bound:  # holds of someone: not all are above the mean
                return at, len(passed)
            passed.add(at)
        raise AssertionError("every load is at least the mean of all and one more")

    def _build(self, places: list[Home]) -> None:
        if places == self._places:
            return
        self._places = places
        self._ring = sorted(
            (_point(worker, rank, n), at)
            for at, (worker, rank) in enumerate(places)
            for n in range(self._config.points)
        )


def _point(worker: str, rank: int, n: int) -> int:
    name = f"{worker}/{rank}/{n}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "router",
            "prefix-hash",
            _build,
            PrefixHashConfig,
            summary="consistent hashing of the first tokens, with bounded loads",
        )
    ]


def _build(config: PrefixHashConfig, ctx: Context) -> PrefixHash:
    return PrefixHash(config, ctx.rng)
