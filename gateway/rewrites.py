"""`Rewrites`: finds templates that write a conversation's earlier turns in another way once it goes on.

A prompt is that of a conversation going on if its messages are those of a prompt before, and more, of which
the first is an answer; tools and what else the template is told are the same. What was computed is then
used again up to the first token that differs from the prompt and the answer before.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

import msgspec
import numpy as np

from bien.core.request import TokenIds
from bien.core.worker.threads import lock
from bien.gateway.notes import Rewrite, Turn

MAX_BYTES = 64 << 20  # some 80 conversations of 200k tokens
_ENTRY = 300  # bytes of a turn beside its ids


class Rewrites:
    """Any number of threads may call it. Turns that were written longest ago give way."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max = max_bytes
        self._turns: dict[bytes, tuple[bytes, bytes]] = {}  # ids of prompt and answer
        self._secret = token_bytes(32)
        self._lock = lock()
        self.held = 0  # bytes, as counted against `max_bytes`

    def begin(
        self, owner: str, told: Any, messages: list[dict[str, Any]], prompt: TokenIds
    ) -> tuple[Turn | None, Rewrite | None]:
        """A prompt of `messages`, and whether it is not what its turn before was, and more. `told`: all that
        the template had beside them. Blocks for a long one. No turn: it holds numbers
        beyond 64 bits."""
        try:
            keys = list(self._keys(owner, told, messages))
        except OverflowError:
            return None, None
        for at in range(len(messages) - 1, 0, -1):
            if messages[at]["role"] == "assistant":
                with self._lock:
                    found = self._turns.get(keys[at - 1])
                if found is not None:
                    return Turn(keys[-1], prompt.packed, keys[at - 1]), _compared(*found, prompt.packed)
        return Turn(keys[-1], prompt.packed, None), None

    def end(self, turn: Turn, answer: bytes) -> None:
        """The turn has its answer: ids that are text, uint32-LE; those that are not known may be left out."""
        with self._lock:
            for key in (turn.before, turn.key):
                if key is not None:
                    self._drop(key)
            if (size := _size(turn.prompt, answer)) <= self._max:
                self._turns[turn.key] = (turn.prompt, answer)
                self.held += size
            while self.held > self._max:
                self._drop(next(iter(self._turns)))

    def _drop(self, key: bytes) -> None:
        if (old := self._turns.pop(key, None)) is not None:
            self.held -= _size(*old)

    def _keys(self, owner: str, told: Any, messages: list[dict[str, Any]]) -> Iterator[bytes]:
        """One for the conversation up to each message."""
        digest = blake2b(key=self._secret, digest_size=16)
        for part in (owner, told):
            data = msgspec.msgpack.encode(part)
            digest.update(b"%d:" % len(data) + data)
        for message in messages:
            digest.update(msgspec.msgpack.encode(message))
            yield digest.copy().digest()


def _compared(prompt: bytes, answer: bytes, now: bytes) -> Rewrite | None:
    before = prompt + answer
    if now.startswith(before):
        return None
    n = min(len(before), len(now)) // 4
    differ = np.frombuffer(before, "<u4", n) != np.frombuffer(now, "<u4", n)
    at = int(differ.argmax()) if differ.any() else n
    return Rewrite(at, "prompt" if at < len(prompt) // 4 else "answer")


def _size(prompt: bytes, answer: bytes) -> int:
    return len(prompt) + len(answer) + _ENTRY
