"""`View`: the workers that can hold a request, as its router sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

from bien.core.errors import PluginFault
from bien.core.kv.hashing import HASH_BYTES
from bien.gateway.index import KVIndex, TieredIndex
from bien.gateway.roster import Member
from bien.gateway.routing import Decision, Router, RouteRequest, Target
from bien.gateway.stream import Stream


@dataclass(slots=True)
class View:
    fit: list[Member]
    members: list[Member]  # of each target: a member has one per rank
    targets: list[Target]
    hashes: bytes  # of the prompt's blocks that may be cached
    claims: list[int] | None = None  # what the index claims, where the verifier has put other overlaps

    @classmethod
    def of(
        cls, stream: Stream, members: Iterable[Member], index: KVIndex, tiered: TieredIndex | None
    ) -> View:
        """As of now. `tiered`: the index, if it is one. Raises what the index raises."""
        route = stream.route
        fit = fitting(stream, members)
        block = fit[0].info.block_tokens
        # The last token is always computed, so the block that it ends cannot be used.
        whole = (route.prompt_tokens - 1) // block
        if stream.request.sampling.prompt_logprobs >= 0:  # all of its positions are
            whole = 0
        hashes, members = route.hashes[: whole * HASH_BYTES], fit
        places = [(m.id, rank) for m in fit for rank in range(m.info.dp_ranks)]
        if len(places) > len(fit):
            members = [m for m in fit for _ in m.ranks]
        overlaps = index.overlaps(hashes, places)
        targets = [
            m.target(n * block, place[1]) for m, place, n in zip(members, places, overlaps, strict=True)
        ]
        if tiered is not None and any(len(m.info.tiers) > 1 for m in fit):
            for target, blocks in zip(targets, tiered.loadable(hashes, places), strict=True):
                target.loadable = blocks * block
        return cls(fit, members, targets, hashes)


def fitting(stream: Stream, members: Iterable[Member]) -> list[Member]:
    """Those that can be used and are large enough."""
    need = stream.route.prompt_tokens + stream.route.max_tokens
    return [m for m in members if m.usable and m.context >= need]


def check_decision(
    decision: Decision, router: Router, route: RouteRequest, targets: Sequence[Target]
) -> None:
    """PluginFault for one that cannot be."""
    if isinstance(decision, Decision):
        target, cached = decision.target, decision.predicted_cached
        # The latter goes over the wire.
        if isinstance(target, Integral) and isinstance(cached, int):
            if 0 <= target < len(targets) and 0 <= cached <= route.prompt_tokens:
                return
    raise PluginFault(
        f"router {type(router).__name__} chose {decision!r}; valid: a Decision with a target "
        f"from 0 to {len(targets) - 1} and predicted_cached from 0 to {route.prompt_tokens}"
    )
