"""`DraftCounts`: what became of drafts, in all, by position and by who proposed them."""

from __future__ import annotations

import msgspec

MAX_POSITIONS = 64  # that are counted apart
MAX_SOURCES = 16  # the drafts of further ones count as those of OTHERS
OTHERS = "other"


class SourceCounts(msgspec.Struct, array_like=True, gc=False):
    """Of one source. A position counts from behind the last known token, from 0; in a tree it is a depth."""

    rounds: int = 0  # of drafting and verifying; each gains what was accepted, and one token
    drafted: int = 0  # tokens verified
    accepted: int = 0  # of these
    drafted_at: list[int] = []  # by position: rounds with a draft there
    accepted_at: list[int] = []  # by position: rounds in which it was accepted

    def add(self, drafted: int, depth: int, accepted: int) -> None:
        """A round: `drafted` nodes that reach to position `depth` - 1."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        depth = min(depth, MAX_POSITIONS)
        while len(self.drafted_at) < depth:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for at in range(depth):
            self.drafted_at[at] += 1
        for at in range(min(accepted, depth)):
            self.accepted_at[at] += 1

    def merge(self, other: SourceCounts) -> None:
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.drafted_at = _sum(self.drafted_at, other.drafted_at)
        self.accepted_at = _sum(self.accepted_at, other.accepted_at)

    @property
    def acceptance_length(self) -> float:
        """Tokens that a round gains."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


class DraftCounts(msgspec.Struct, array_like=True, gc=False):
    """By source: a drafter's name, or what its drafts say of theirs."""

    sources: dict[str, SourceCounts] = {}

    def add(self, source: str, drafted: int, depth: int, accepted: int) -> None:
        """A round, as `SourceCounts.add` takes it."""
        self._of(source).add(drafted, depth, accepted)

    def merge(self, other: DraftCounts) -> None:
        for source, counts in other.sources.items():
            self._of(source).merge(counts)

    def copy(self) -> DraftCounts:
        out = DraftCounts()
        out.merge(self)
        return out

    @property
    def total(self) -> SourceCounts:
        """Of all sources."""
        out = SourceCounts()
        for counts in self.sources.values():
            out.merge(counts)
        return out

    def _of(self, source: str) -> SourceCounts:
        if source not in self.sources and len(self.sources) >= MAX_SOURCES:
            source = OTHERS
        return self.sources.setdefault(source, SourceCounts())


def _sum(a: list[int], b: list[int]) -> list[int]:
    short, long = sorted((a, b), key=len)
    return [x + y for x, y in zip(short, long, strict=False)] + long[len(short) :]
