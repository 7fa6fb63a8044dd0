"""`Weight`: the tensors of a model, declared once: what loading expects, what parameters and bytes are
counted from, and what a token's products cost. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

Role = Literal[
    "embedding", "attention", "indexer", "state", "dense", "router", "routed", "shared", "norm", "head", "mtp"
]


class Weight(msgspec.Struct, frozen=True, gc=False):
    """One tensor, or `copies` alike, whose numbers 0.. stand for "{}" in `name`."""

    name: str  # as in the checkpoint
    shape: tuple[int, ...]
    role: Role
    copies: int = 1
    used: int = 1  # of the copies, by one token: experts that the router chooses
    product: bool = True  # multiplied with every token that it is used for; else looked up, added, scaled
    spare: bool = False  # a copy of another tensor that some checkpoints have: neither needed nor counted

    @property
    def size(self) -> int:
        """Parameters of one copy."""
        n = 1
        for s in self.shape:
            n *= s
        return n

    def names(self) -> Iterator[str]:
        if self.copies == 1 and "{}" not in self.name:
            yield self.name
        else:
            for i in range(self.copies):
                yield self.name.replace("{}", str(i))


def linear(name: str, rows: int, columns: int, role: Role, *, bias: bool = False) -> list[Weight]:
    """The weight [rows, columns] of a linear layer "name", and its bias."""
    weights = [Weight(f"{name}.weight", (rows, columns), role)]
    if bias:
        weights.append(Weight(f"{name}.bias", (rows,), role, product=False))
    return weights


def norm(name: str, width: int) -> Weight:
    return Weight(f"{name}.weight", (width,), "norm", product=False)


def total(weights: Iterable[Weight]) -> int:
    """Parameters of all copies, layers that predict further tokens (role "mtp") left out."""
    return sum(w.size * w.copies for w in weights if w.role != "mtp")


def active(weights: Iterable[Weight]) -> int:
    """Parameters that one token meets: of experts the chosen ones; the whole embedding is counted."""
    return sum(w.size * w.used for w in weights if w.role != "mtp")


def flops(weights: Iterable[Weight]) -> int:
    """Floating-point operations of one token's products with weights, two per parameter."""
    return 2 * sum(w.size * w.used for w in weights if w.product and w.role != "mtp")


def expected(weights: Iterable[Weight]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model itself by its name in the checkpoint."""
    return {name: w.shape for w in weights if w.role != "mtp" for name in w.names()}


def predicting(weights: Iterable[Weight]) -> list[Weight]:
    """Of the layers that predict further tokens ("multi-token prediction"): a checkpoint has all of these, or
    none; spare ones may be there beside the others."""
    return [w for w in weights if w.role == "mtp"]
