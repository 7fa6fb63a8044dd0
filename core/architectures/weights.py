"""`Weight`: the tensors of a model, declared once: what loading expects, what parameters and bytes are
counted from, and what a token's products cost. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

import msgspec

Role = Literal[
    "embedding", "attention", "indexer", "state", "dense", "router", "routed", "shared", "norm", "head", "mtp"
]


class Names(Protocol):
    def __contains__(self, name: str, /) -> bool: ...


class Weight(msgspec.Struct, frozen=True, gc=False):
    """One tensor, or `copies` alike, whose numbers 0.. stand for "{}" in `name`."""

    name: str  # as in the checkpoint
    shape: tuple[int, ...]
    role: Role
    copies: int = 1
    used: int = 1  # of the copies, by one token: experts that the router chooses
    product: bool = True  # multiplied with every token that it is used for; else looked up, added, scaled
    stacked: bool = False  # the copies are one tensor [copies, *shape]
    spare: bool = False  # a copy of another tensor that some checkpoints have: neither needed nor counted

    @property
    def size(self) -> int:
        """Parameters of one copy."""
        n = 1
        for s in self.shape:
            n *= s
        return n

    def names(self) -> Iterator[str]:
        if self.stacked or (self.copies == 1 and "{}" not in self.name):
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
    main = (w for w in weights if w.role != "mtp")
    return {name: (w.copies, *w.shape) if w.stacked else w.shape for w in main for name in w.names()}


def predicting(weights: Iterable[Weight], held: Names) -> dict[str, tuple[int, ...]]:
    """The tensors of the layers for further tokens ("multi-token prediction"), as `expected`. A checkpoint
    with the names `held` has all that are needed, or none of them; spare ones are named if it has them."""
    own = [(name, w) for w in weights if w.role == "mtp" for name in w.names()]
    if not any(name in held for name, _ in own):
        return {}
    return {name: w.shape for name, w in own if not w.spare or name in held}
