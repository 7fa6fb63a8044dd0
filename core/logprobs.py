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

    def first(self, count: int) -> TokenLogprobs:
        """Those of the first `count` tokens."""
        if 4 * count >= len(self.chosen):
            return self
        end = 4 * count * self.top
        return TokenLogprobs(self.chosen[: 4 * count], self.top, self.ids[:end], self.values[:end])
