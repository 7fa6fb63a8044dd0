"""`Kernels`: the operations that a faster implementation may replace. Torch is the oracle.

A provider of kind "kernels" makes one per executor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from bien.core.executors.rows import GroupRows
    from bien.core.quantization.quantizer import LinearMethod


class Kernels(Protocol):
    """One object per executor, used by one thread; every tensor lies on one device. N = tokens of the step.
    What a kernel derives from `rows` for all layers of a step it may keep in `rows.plans`."""

    def write_kv(self, flat: Tensor, rows: GroupRows, kv: Tensor) -> None:
        """flat[rows.mapping[i]] = kv[i]: flat [(blocks+1) * block_tokens, width], kv [N, width]."""
        ...

    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Softmax attention of every token over the positions <= its own (and > its own - window, and
        >= rows.skip) of its sequence: query [N, heads, d], rows.pool.layers[layer] [blocks+1, block_tokens,
        2 * kv_heads * d] -> [N, heads * d]; zeros for a token before rows.skip. `sinks` [heads]: of each
        head a score that takes its share and has no value."""
        ...

    def block_attention(
        self,
        query: Tensor,
        kv: Tensor,
        rows: GroupRows,
        layer: int,
        scale: float,
        mask: Tensor | None,
        positions: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Softmax attention of a block of queries per sequence: query [S, Q, heads, d] over the sequence's
        stored positions p, rows.skip <= p < rows.starts[i] (and, in a window, p > positions[i, q] - window),
        and over the given kv [S, K, 2 * kv_heads * d], which is not stored, as far as mask [S or 1, Q, K]
        (bool; None: all) lets each query see it -> [S, Q, heads * d]. positions [S, Q] int64 of the queries,
        none below starts[i]; None: starts[i] + q. A query that sees nothing gets zeros. `sinks` as above."""
        ...

    def latent_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, rank: int, chosen: Tensor | None
    ) -> Tensor:
        """Multi-head attention over one latent per position: query [N, heads, width] with
        rows.pool.layers[layer] [blocks+1, block_tokens, width], whose first `rank` features are the values,
        over the positions <= a token's own and >= rows.skip; of these only chosen [N, K] (int64, -1 = none)
        if it is given -> [N, heads, rank]; zeros for a token before rows.skip."""
        ...

    def choose(self, query: Tensor, weights: Tensor, rows: GroupRows, layer: int, count: int) -> Tensor:
        """The `count` positions <= a token's own and >= rows.skip with the largest sums over heads of
        weights * relu(query . key), of equal ones the lowest: query [N, heads, d], weights [N, heads]
        (query's dtype or wider), keys rows.pool.layers[layer] [blocks+1, block_tokens, d] -> [N, count]
        int64, largest first, -1 where there are fewer. Sums are float32 at least."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + update, rms_norm of that), all [N, width]. Neither argument changes."""
        ...

    def rope(self, x: Tensor, angles: Tensor) -> None:
        """Rotate pairs (x[..., 2j], x[..., 2j+1]) in place: x [N, heads, d], angles [N, 1, d/2] complex
        cos + i sin."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [N, 2 * width] = gate then up."""
        ...

    def int8_linear(self, levels: Tensor, scale: Tensor, bias: Tensor | None) -> LinearMethod:
        """x @ (levels * scale).T + bias: levels [out, in] int8, scale [out]. x is quantized like the weights,
        symmetrically, with a scale per token; the product of the levels is exact."""
        ...

    def int4_linear(self, levels: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> LinearMethod:
        """x @ (scale * levels + offset).T + bias: levels [out, in] uint8 of 0..15, scale and offset
        [out, in / group] in the compute dtype, values that float16 holds. x may be quantized to int8 with a
        scale per token and group, not coarser."""
        ...

    def close(self) -> None: ...
