"""`TokenLogprobs`: log-probabilities of a run of output tokens, packed as they go over the wire."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Natural logarithms under the model's own distribution: before penalties, bias, temperature and
    filters (vLLM's default, `raw_logprobs`), so they do not depend on how a request samples."""

    chosen: bytes = b""  # float32-LE, one per token
    top: int = 0  # alternatives per token
    ids: bytes = b""  # uint32-LE, `top` per token, likeliest first
    values: bytes = b""  # float32-LE, of these
    ranks: bytes = b""  # uint32-LE, one per token of a prompt: 1 = none is likelier

    def __len__(self) -> int:
        """How many tokens."""
        return len(self.chosen) // 4

    def first(self, count: int) -> TokenLogprobs:
        """Those of the first `count` tokens."""
        return self if count >= len(self) else self._part(0, count)

    def behind(self, count: int) -> TokenLogprobs:
        """Those of all but the first `count` tokens."""
        return self if count <= 0 else self._part(count, max(count, len(self)))

    @classmethod
    def joined(cls, parts: list[TokenLogprobs]) -> TokenLogprobs:
        """Of consecutive runs, with equally many alternatives; at least one."""
        return cls(
            b"".join([p.chosen for p in parts]),
            parts[0].top,
            b"".join([p.ids for p in parts]),
            b"".join([p.values for p in parts]),
            b"".join([p.ranks for p in parts]),
        )

    def _part(self, start: int, stop: int) -> TokenLogprobs:
        a, b = 4 * start, 4 * stop
        top = self.top
        return TokenLogprobs(
            self.chosen[a:b],
            top,
            self.ids[a * top : b * top],
            self.values[a * top : b * top],
            self.ranks[a:b],
        )
