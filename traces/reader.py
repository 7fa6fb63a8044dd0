"""The trace-format contract: a reader tells its format by content and yields sessions one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from bien.traces.model import Session, TraceMeta


class TraceReader(Protocol):
    """One open trace. A reader is made for one path: `matches`, then `sessions` once."""

    name: str

    @property
    def meta(self) -> TraceMeta:
        """What is known so far; block size after the first session, fidelity counts grow while reading."""
        ...

    def matches(self, path: Path) -> bool:
        """Whether the content (never the name alone) is of this format. Reads a few kilobytes, never
        raises for foreign content."""
        ...

    def sessions(self, path: Path) -> Iterator[Session]:
        """Sessions in trace order, each built when it is asked for; at most one is held.

        Raises:
            TraceError: naming the file and the position of the damage.
        """
        ...

    def close(self) -> None: ...
