"""The growing content of a sequence: prompt plus confirmed output, as ids or as opaque runs."""

from __future__ import annotations

import hashlib
from typing import Protocol

from bien.core.request import BlockRuns, Prompt, TokenIds


class Content(Protocol):
    """What the chain is extended over and what an executor is given."""

    @property
    def ids_known(self) -> bool:
        """Whether token ids exist (False in simulation)."""
        ...

    def append(self, ids: bytes, count: int) -> None:
        """`count` confirmed tokens; `ids` are uint32-LE, empty when unknown."""
        ...

    def named(self, start: int, stop: int) -> Prompt:
        """Tokens start..stop as hashable content."""
        ...

    def prompt(self) -> Prompt:
        """Everything so far, for an executor slot."""
        ...


class TokenContent:
    """Token ids in one growing buffer."""

    ids_known = True

    def __init__(self, prompt: TokenIds) -> None:
        self._ids = bytearray(prompt.packed)

    def append(self, ids: bytes, count: int) -> None:
        self._ids += ids

    def named(self, start: int, stop: int) -> TokenIds:
        return TokenIds(bytes(self._ids[4 * start : 4 * stop]))

    def prompt(self) -> TokenIds:
        return TokenIds(bytes(self._ids))

    def tokens(self) -> list[int]:
        return list(memoryview(bytes(self._ids)).cast("I"))


class RunContent:
    """Virtual tokens: the prompt's runs, then the recorded continuation, then ids of its own."""

    ids_known = False

    def __init__(self, prompt: BlockRuns, continuation: BlockRuns | None, unique: str) -> None:
        self._prompt = prompt
        self._continuation = continuation or BlockRuns()
        self._unique = unique
        self._begins = self._length = len(prompt)
        self._whole: BlockRuns | None = None

    def append(self, ids: bytes, count: int) -> None:
        self._length += count

    def named(self, start: int, stop: int) -> BlockRuns:
        begins = self._begins
        if begins <= start and stop <= begins + self._continuation.length:
            return self._continuation.slice(start - begins, stop - begins)
        if self._whole is None:
            self._whole = self._prompt.join(self._continuation)
        if stop <= len(self._whole):
            return self._whole.slice(start, stop)
        # Beyond the recording nothing is shared: ids below zero, distinct per request.
        digest = hashlib.blake2b(self._unique.encode(), digest_size=5).digest()
        base = -(int.from_bytes(digest, "little") << 20) - (1 << 62)
        inside = self._whole.slice(start, len(self._whole))
        first = max(start, len(self._whole))
        return inside.join(BlockRuns.of([(base + first, stop - first)]))

    def prompt(self) -> BlockRuns:
        return self._prompt if self._length == self._begins else self.named(0, self._length)


def content_of(prompt: Prompt, forced: Prompt | None, unique: str) -> Content:
    """The content of a fresh sequence."""
    if isinstance(prompt, TokenIds):
        return TokenContent(prompt)
    return RunContent(prompt, forced if isinstance(forced, BlockRuns) else None, unique)
