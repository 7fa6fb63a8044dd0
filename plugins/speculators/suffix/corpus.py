"""`Corpus`: texts in which the end of another is looked up; compiled where it can be, Python where not."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from bien.core.api import BienError
from bien.plugins.speculators.suffix.chances import Chances

log = logging.getLogger("bien.engine")
CorpusChoice = Literal["auto", "native", "python"]
Tokens = bytes  # ids as uint32, as `TokenIds` packs them; below 2^31 - 1
CONTEXT = 64  # tokens of a text's end that are looked up, and repeated where it goes on elsewhere


class Found(NamedTuple):
    """The nodes of a draft, parents first."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]  # of each, once its parent is taken
    cells: list[int]  # its kind, for `Chances`


class Size(NamedTuple):
    tokens: int
    bytes: int


class Corpus(Protocol):
    """Positions count all tokens ever appended, and the breaks between texts; the oldest are forgotten."""

    end: int

    def append(self, tokens: Tokens, *, fresh: bool, repeated: int = 0) -> int:
        """Tokens that follow those appended last, or begin another text. The first `repeated` of them stand
        elsewhere too, and are not found here again. Returns the first one's position."""
        ...

    def equal(self, position: int, tokens: Tokens, start: int, count: int) -> int:
        """How many of `count` tokens, from `start` on, stand at `position`, repeated ones left out; -1 where
        that is forgotten."""
        ...

    def propose(
        self,
        shared: Any,
        seam: tuple[int, int],
        added: Tokens,
        limit: int,
        *,
        tree: bool,
        least: float,
        chances: Chances,
    ) -> Found:
        """Append `added`, then draft what follows the end of the last text: at most `limit` nodes, each with
        a chance of `least` that all up to it are taken, from this corpus and `shared`, another one or None.
        `seam`: the text begins in `shared` and ends before this position; the rest begins here at that."""
        ...

    def size(self) -> Size: ...


class Maker(Protocol):
    def __call__(self, limit: int) -> Corpus:
        """An empty corpus that forgets all but about the last `limit` tokens."""
        ...


def corpus_maker(choice: CorpusChoice) -> Maker:
    """`auto`: the compiled one where a compiler makes it, else Python's, with a warning. The first call on a
    machine takes seconds: it compiles. `native` raises what `compile_library` does."""
    from bien.plugins.speculators.suffix.plain import PlainCorpus

    if choice == "python":
        return PlainCorpus
    from bien.plugins.speculators.suffix.native import NativeCorpus

    try:
        NativeCorpus(1)
    except BienError as error:
        if choice == "native":
            raise
        log.warning("the suffix drafter keeps its texts in Python, which is slower: %s", error)
        return PlainCorpus
    return NativeCorpus


def packed(tokens: Sequence[int]) -> Tokens:
    return (tokens if isinstance(tokens, array) else array("I", tokens)).tobytes()


def unpacked(tokens: Tokens) -> list[int]:
    return memoryview(tokens).cast("I").tolist()
