"""`Communicator`: what the ranks of one engine exchange while they compute. The core makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Communicator(Protocol):
    """One per rank. Every rank calls the same methods in the same order, with tensors of one shape and
    dtype. CollectiveError when a peer has died or does not come in time; then nothing more can be
    exchanged."""

    rank: int  # 0 .. world-1
    world: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, bit for bit the same on each. May be computed in `x` itself."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, in rank order."""
        ...

    def largest(self, value: int) -> int:
        """The largest value over ranks."""
        ...

    def close(self) -> None:
        """Whatever still waits in it fails. Never waits for peers."""
        ...
