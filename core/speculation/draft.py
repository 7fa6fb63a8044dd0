"""`Draft`: what a host drafter proposes for one sequence; `Scope`: whose sequence it is."""

from __future__ import annotations

from dataclasses import dataclass, field

ROOT = -1


@dataclass(slots=True)
class Draft:
    """Tokens to follow the last confirmed one. A chain, or a tree whose nodes come parents first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] | None = None  # of each node: an earlier one's index, ROOT behind the last known token
    confidence: list[float] | None = None  # that the target takes the node once it has taken its parent
    source: str = ""  # who proposed it, for metrics, in 64 characters; "" = the drafter's name

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, count: int) -> Draft:
        """Its first `count` nodes: parents come first, so they are a draft too."""
        if count >= len(self.tokens):
            return self
        parents = None if self.parents is None else self.parents[:count]
        confidence = None if self.confidence is None else self.confidence[:count]
        return Draft(self.tokens[:count], parents, confidence, self.source)


@dataclass(slots=True, frozen=True)
class Scope:
    """Drafters that learn across sequences keep what they learn inside these. A tenant's text is never
    drafted for another one, unless a deployment says so."""

    tenant: str = ""
    session: str = ""  # "" = none: the sequence shares with no other of its tenant
    salt: str = ""  # of the client: a namespace inside its tenant's
