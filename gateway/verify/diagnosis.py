"""`name_cause`: which of the ways to be wrong an index is wrong in.

Each way leaves other traces, and a probe that was sent twice (canary.py) shows most of them: what the engine
finds is no matter of the index, what events call it none of the engine's cache.

    hash        the engine finds it; events tell of blocks, and none has its name
    block size  the engine finds another number of tokens than whole blocks of ours are
    template    the engine counts other tokens, finds what it never saw, or names agree up to an early place
    salt        all is well without a tenant, or of all tenants but one
    staleness   the engine finds it, and no event came, or the index did not take it; or a restart
    eviction    all is well with what is new; of what was there before, less is found than was claimed

None of these is an engine that finds less, or more, of what it has just computed, and by no size of blocks.
That is no fault of the index, and called `engine`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bien.gateway.verify.canary import Sighting
from bien.gateway.verify.tap import Names
from bien.gateway.verify.window import Comparison, share

MOST, SAME, FEW = 0.5, 0.9, 0.1  # shares of comparisons
SEVERAL, VARIED = 8, 3  # comparisons, and numbers among them, from which a common divisor says something


@dataclass(slots=True)
class Evidence:
    """What is known of one worker whose parity is bad."""

    block: int  # tokens of one of ours
    comparisons: Sequence[Comparison] = ()
    lonely: bool = False  # one namespace is wrong, or all that are named, and the others are right
    gap: str = ""  # numbers of events that are missing, in words
    restart: str = ""  # a restart that the index was not told of, in words
    names: Names | None = None  # what events call the blocks of late prompts
    plain: Sequence[Sighting] = ()  # without a tenant, in the order in which they were sent
    spaced: Sighting | None = None  # in the namespace of whom it is wrong for


def name_cause(evidence: Evidence) -> tuple[str, str]:
    """One of CAUSES, and why in words."""
    if why := _template(evidence):
        return "template", why
    plain, spaced = evidence.plain, evidence.spaced
    if plain and (found := _engine(plain) or _names(plain[0])) is not None:
        return found
    if plain and (why := _odd(plain)):
        return "engine", why
    if spaced is not None and not spaced.right and _plain_right(evidence):
        if _short(spaced) and evidence.gap:
            return "staleness", evidence.gap
        return "salt", (
            f"a probe with a tenant is found as {spaced.second} tokens and claimed as {spaced.claimed}, "
            "one without is right"
        )
    return _passive(evidence)


def _template(evidence: Evidence) -> str:
    for sighting in (*evidence.plain, *([evidence.spaced] if evidence.spaced else [])):
        if sighting.counted >= 0 and sighting.counted != sighting.sent:
            return f"of {sighting.sent} tokens sent the engine counts {sighting.counted}"
        if sighting.first > 0:
            return f"of a prompt that it never saw the engine finds {sighting.first} tokens cached"
    counted = [one for one in evidence.comparisons if one.counted >= 0]
    other = [one for one in counted if one.counted != one.sent]
    if other and len(other) >= MOST * len(counted):
        return f"of {other[-1].sent} tokens sent the engine counts {other[-1].counted}"
    return ""


def _engine(sightings: Sequence[Sighting]) -> tuple[str, str] | None:
    """Is it the engine that finds something else than it should?"""
    first = sightings[0]
    if first.second < 0:
        return None  # it does not say
    if all(one.second == 0 for one in sightings):
        if not any(one.claimed for one in sightings):
            return None  # it caches nothing, and the index says so
        return "eviction", f"the index claims {first.claimed} tokens of a probe, and the engine kept none"
    if first.second % first.block and _short(first):
        return "block size", f"the engine finds {first.second} tokens, no multiple of {first.block}"
    size = larger_blocks(sightings)
    if size is None:
        return None
    return "block size", f"the engine finds multiples of {size} tokens; those of the index are {first.block}"


def larger_blocks(sightings: Sequence[Sighting]) -> int | None:
    """The size of the engine's blocks, as these probes of several lengths suggest it; None: they do not."""
    first = sightings[0]
    if first.whole - first.second < first.block or len(sightings) < 2:
        return None  # one alone does not tell larger blocks from an end that is left out
    return _size([(one.sent, one.second) for one in sightings], first.block)


def _plain_right(evidence: Evidence) -> bool:
    """Is all well without a tenant: with probes, and with what was sent?"""
    sent = [one for one in evidence.comparisons if not one.space.named]
    if sum(one.off != 0 for one in sent) > max(1, FEW * len(sent)):
        return False
    return bool(evidence.plain) and all(one.right for one in evidence.plain)


def _odd(sightings: Sequence[Sighting]) -> str:
    """Does the engine find something else of each probe than was computed for it?"""
    off = [one.whole - one.second for one in sightings]
    if len(off) < 2 or min(one.second for one in sightings) < 0:
        return ""
    if not (min(off) > sightings[0].block or max(off) < -sightings[0].block):
        return ""
    sent = " and ".join(str(one.whole) for one in sightings)
    found = " and ".join(str(one.second) for one in sightings)
    return f"of {sent} tokens in whole blocks that it has just computed the engine finds {found}"


def _names(sighting: Sighting) -> tuple[str, str] | None:
    """Is it what events call the blocks, or are there none?"""
    if not _short(sighting):
        return None
    known = min(sighting.claimed // sighting.block, sighting.named)
    found = min(sighting.second, sighting.whole) // sighting.block
    if sighting.named >= found:
        has = sighting.claimed // sighting.block
        return "staleness", f"events told of all {found} blocks of a probe, and the index has {has}"
    if not sighting.strange:
        return "staleness", f"the engine caches {found} blocks of a probe, and no event told of them"
    if known:
        return "template", f"names of blocks agree up to token {known * sighting.block}, and no further"
    if sighting.familiar:
        return "staleness", "events tell of blocks of earlier requests, and not yet of a probe's"
    return "hash", f"events told of {sighting.strange} blocks, and of none by the names of a probe's"


def _passive(evidence: Evidence) -> tuple[str, str]:
    all = evidence.comparisons
    wrong = [one for one in all if one.off]
    if evidence.restart:
        return "staleness", evidence.restart
    if evidence.lonely and evidence.spaced is None:
        return (
            "salt",
            "requests of one tenant or salt, or of all that have one, are wrong; others are right",
        )
    if evidence.gap:
        return "staleness", evidence.gap
    if not wrong:
        return "unknown", "a probe of it is right"
    if size := _common(all):
        if size > evidence.block:
            return "block size", f"all that the engine finds are multiples of {size} tokens"
        if size % evidence.block and evidence.block % size == 0:
            return "block size", f"the engine finds multiples of {size} tokens"
    if sum(one.off > 0 for one in wrong) >= MOST * len(wrong):
        return "eviction", (
            f"{share(all):.0%} of requests find less than is claimed, and what is new is found: "
            "removals are missed"
        )
    return _called(evidence) or (
        "staleness",
        f"{share(all):.0%} of requests find more than is claimed: the index is behind",
    )


def _called(evidence: Evidence) -> tuple[str, str] | None:
    """What events call late prompts, where no probe has shown it."""
    names = evidence.names
    if evidence.plain or names is None or not names.told or not names.depths:
        return None
    deepest = max(names.depths)
    if not deepest:
        return "hash", "events tell of blocks, and of none by the names of prompts that were sent"
    cut = sum(depth == deepest < length for depth, length in zip(names.depths, names.lengths, strict=True))
    if cut >= SAME * len(names.depths):
        return "template", f"names of blocks agree up to token {deepest * evidence.block}, and no further"
    return None


def _common(comparisons: Sequence[Comparison]) -> int:
    """What all found tokens are multiples of; 0: they do not say."""
    found = [one.found for one in comparisons if one.found]
    if len(found) < SEVERAL or len(set(found)) < VARIED:
        return 0
    return math.gcd(*found)


def _short(sighting: Sighting) -> bool:
    """The index claims less of it than the engine found, by a block or more."""
    return min(sighting.second, sighting.whole) - sighting.claimed >= sighting.block


def _size(found: Sequence[tuple[int, int]], block: int = 0) -> int | None:
    """The smallest size of blocks beyond `block` by which prompts of so many tokens, the last of which is
    computed, have so many cached."""
    common = math.gcd(*(told for _, told in found))
    fitting = (size for size in range(block + 1, common + 1) if not common % size)
    return next((s for s in fitting if all((sent - 1) // s * s == told for sent, told in found)), None)
