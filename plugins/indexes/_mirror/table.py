"""`Table`: who holds which blocks, of all engines of an index; compiled where it can be, Python where not."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

from bien.core.api import BienError, KVEvent
from bien.gateway.api import WorkerInfo

log = logging.getLogger("bien.gateway")
TableChoice = Literal["auto", "native", "python"]


class Size(NamedTuple):
    blocks: int  # distinct ones, where the table knows; else as many as there are holdings
    holdings: int  # blocks of every engine, group and tier
    bytes: int  # 0: not known


class Table(Protocol):
    """Engines have numbers; -1 is one that holds nothing. Chains are packed hashes of 16 bytes. Events are
    applied in order and without doubt: gaps and generations are the mirror's matter."""

    kind: str  # "native" or "python"

    def join(self, info: WorkerInfo) -> int:
        """A new engine that holds nothing: its number."""
        ...

    def leave(self, engine: int) -> None: ...

    def clear(self, engine: int) -> None:
        """Take all blocks from it; what was predicted stays."""
        ...

    def feed(self, engine: int, events: Iterable[KVEvent]) -> None:
        """Apply them. Predictions whose last block is then in the first tier have come true."""
        ...

    def predict(self, engine: int, hashes: bytes, expires: float) -> None:
        """The blocks are on their way there until the clock says `expires`."""
        ...

    def take_back(self, engine: int, hashes: bytes) -> None:
        """Forget one prediction of just these, if there is one: that which would last longest, so that it is
        no matter whether others that have expired are still here."""
        ...

    def forget(self, engine: int) -> None:
        """Forget all predictions."""
        ...

    def usable(self, hashes: bytes, engines: list[int], now: float) -> list[int]:
        """Per engine, blocks of the chain that all its groups can use from its first tier, or will."""
        ...

    def loadable(self, hashes: bytes, engines: list[int], now: float) -> list[int]:
        """Per engine, how many more it could use if what slower tiers hold were in the first."""
        ...

    def size(self) -> Size: ...


def make_table(choice: TableChoice) -> Table:
    """`auto`: the compiled one where a compiler makes it, else Python's, with a warning. The first call on a
    machine takes seconds: it compiles. `native` raises what `compile_library` does."""
    from bien.plugins.indexes._mirror.plain import PlainTable

    if choice == "python":
        return PlainTable()
    from bien.plugins.indexes._mirror.native import NativeTable

    try:
        return NativeTable()
    except BienError as error:
        if choice == "native":
            raise
        log.warning("the index keeps its blocks in Python, which is slower and takes more memory: %s", error)
        return PlainTable()
