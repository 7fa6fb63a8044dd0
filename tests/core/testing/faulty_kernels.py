"""Kernels that differ from torch's in one fault each, for the tests of `KernelsSuite`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.executors.rows import GroupRows
from bien.core.kernels.torch_kernels import TorchKernels


class WritesInARun(TorchKernels):
    """Takes for granted that a step's entries follow one another."""

    def write_kv(self, flat: Tensor, rows: GroupRows, kv: Tensor) -> None:
        first = int(rows.mapping[0])
        flat[first : first + len(kv)] = kv[: len(flat) - first]


class WritesTheWiderRow(TorchKernels):
    """Reads kv as if it were contiguous."""

    def write_kv(self, flat: Tensor, rows: GroupRows, kv: Tensor) -> None:
        dense = kv.as_strided(kv.shape, (kv.shape[1], 1), kv.storage_offset())
        super().write_kv(flat, rows, dense)


class Straight(TorchKernels):
    """The formula, token by token, with hooks for faults."""

    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        d = query.shape[-1]
        flat = rows.pool.flat[layer]
        kv_heads = flat.shape[1] // (2 * d)
        out = query.new_empty(query.shape)
        for i, (start, count) in enumerate(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)):
            blocks = torch.from_numpy(rows.table[i]).long()
            for token in range(count):
                at = torch.arange(*self.seen(rows, start, count, start + token))
                entries = blocks[at // rows.block_tokens] * rows.block_tokens + at % rows.block_tokens
                key, value = flat[entries].view(len(at), 2, kv_heads, d).unbind(1)
                head = torch.arange(query.shape[1])
                of = self.shared(head, query.shape[1], kv_heads)
                q = query[int(rows.offsets[i]) + token]
                scores = torch.einsum("hd,lhd->hl", q, key[:, of]) * self.scale(rows, scale)
                weights = self.weights(scores, rows)
                out[int(rows.offsets[i]) + token] = torch.einsum("hl,lhd->hd", weights, value[:, of])
        return out.flatten(1)

    def seen(self, rows: GroupRows, start: int, count: int, position: int) -> tuple[int, int]:
        return (max(0, position - rows.window + 1) if rows.window else 0), position + 1

    def shared(self, head: Tensor, heads: int, kv_heads: int) -> Tensor:
        return head // (heads // kv_heads)

    def scale(self, rows: GroupRows, scale: float) -> float:
        return scale

    def weights(self, scores: Tensor, rows: GroupRows) -> Tensor:
        return scores.softmax(-1)


class NoWindow(Straight):
    def seen(self, rows: GroupRows, start: int, count: int, position: int) -> tuple[int, int]:
        return 0, position + 1


class WindowTooWide(Straight):
    def seen(self, rows: GroupRows, start: int, count: int, position: int) -> tuple[int, int]:
        return (max(0, position - rows.window) if rows.window else 0), position + 1


class SeesTheRowsEnd(Straight):
    """No causal mask inside a row of a few tokens."""

    def seen(self, rows: GroupRows, start: int, count: int, position: int) -> tuple[int, int]:
        first, last = super().seen(rows, start, count, position)
        return first, start + count if count < 16 else last


class SeesItsLastBlock(Straight):
    """Up to the end of the block."""

    def seen(self, rows: GroupRows, start: int, count: int, position: int) -> tuple[int, int]:
        first, last = super().seen(rows, start, count, position)
        return first, -(-last // rows.block_tokens) * rows.block_tokens


class MergesOnePiece(Straight):
    """Forgets the keys behind the 512th."""

    def seen(self, rows: GroupRows, start: int, count: int, position: int) -> tuple[int, int]:
        first, last = super().seen(rows, start, count, position)
        return (first, min(last, 512)) if not rows.window else (first, last)


class InterleavesHeads(Straight):
    def shared(self, head: Tensor, heads: int, kv_heads: int) -> Tensor:
        return head % kv_heads


class IgnoresSinks(TorchKernels):
    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return super().paged_attention(query, rows, layer, scale)


class SinksInAnotherOrder(TorchKernels):
    """As if the heads of a KV head lay apart."""

    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        kv_heads = rows.pool.layers[layer].shape[-1] // (2 * query.shape[-1])
        other = None if sinks is None else sinks.view(-1, kv_heads).t().flatten()
        return super().paged_attention(query, rows, layer, scale, other)


class KeepsTheSinks(TorchKernels):
    """In layers that have none, too."""

    kept: Tensor | None = None

    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        self.kept = self.kept if sinks is None else sinks
        return super().paged_attention(query, rows, layer, scale, self.kept)


class KeepsTheScale(Straight):
    """The first layer's, for all of a step."""

    def scale(self, rows: GroupRows, scale: float) -> float:
        return float(rows.plans.setdefault("scale", scale))


class RoundsInCompany(Straight):
    """Another arithmetic where there is more than one row."""

    def weights(self, scores: Tensor, rows: GroupRows) -> Tensor:
        exact = scores.softmax(-1)
        return exact if len(rows.counts) == 1 else exact * (1 - 1e-5)


class SixteenWideHeads(TorchKernels):
    """Computes heads in whole vectors."""

    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        query = query.clone()
        query[..., query.shape[-1] // 16 * 16 :] = 0
        return super().paged_attention(query, rows, layer, scale)


class ScalesQueriesInPlace(TorchKernels):
    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return super().paged_attention(query.mul_(scale), rows, layer, 1.0)


class ReadsQueriesAsDense(TorchKernels):
    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        _, heads, d = query.shape
        dense = query.as_strided(query.shape, (heads * d, d, 1), query.storage_offset())
        return super().paged_attention(dense, rows, layer, scale)


class KeepsTheTable(TorchKernels):
    """The first step's blocks, for ever."""

    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        self.table = getattr(self, "table", rows.table)
        rows.table = self.table[: len(rows.table)] % len(rows.pool.layers[layer])
        return super().paged_attention(query, rows, layer, scale)


class ValuesAtTheEnd(TorchKernels):
    """Takes the last `rank` features for the values."""

    def latent_attention(self, query: Tensor, rows: GroupRows, layer: int, *given: Any) -> Tensor:
        scale, rank, chosen = given
        width = query.shape[-1]
        return super().latent_attention(query, rows, layer, scale, width, chosen)[..., width - rank :]


class IgnoresTheChoice(TorchKernels):
    def latent_attention(self, query: Tensor, rows: GroupRows, layer: int, *given: Any) -> Tensor:
        return super().latent_attention(query, rows, layer, *given[:2], None)


class FillsTheChoice(TorchKernels):
    """Takes position 0 where there is none."""

    def latent_attention(self, query: Tensor, rows: GroupRows, layer: int, *given: Any) -> Tensor:
        scale, rank, chosen = given
        chosen = None if chosen is None else chosen.clamp(min=0)
        return super().latent_attention(query, rows, layer, scale, rank, chosen)


class ChoosesInSixteenBits(TorchKernels):
    """Sums in the dtype of the queries, whatever it is."""

    later = 1

    def choose(self, query: Tensor, weights: Tensor, rows: GroupRows, layer: int, count: int) -> Tensor:
        found = super().choose(query, weights, rows, layer, 1000)
        spans = zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)
        rows_of = [(i, start + j) for i, (start, new) in enumerate(spans) for j in range(new)]
        flat = rows.pool.flat[layer]
        for token, (i, position) in enumerate(rows_of):
            at = torch.arange(position + 1)
            blocks = torch.from_numpy(rows.table[i]).long()[at // rows.block_tokens]
            keys = flat[blocks * rows.block_tokens + at % rows.block_tokens]
            sums = (weights[token].to(query.dtype) @ torch.relu(query[token] @ keys.T)).tolist()
            best = sorted(range(position + 1), key=lambda p: (-sums[p], self.later * p))
            found[token, : position + 1] = torch.tensor(best)
        return found[:, :count]


class ChoosesTheLastOfEquals(ChoosesInSixteenBits):
    later = -1


class ChoosesByTheSum(TorchKernels):
    """No relu."""

    def choose(self, query: Tensor, weights: Tensor, rows: GroupRows, layer: int, count: int) -> Tensor:
        mixed = (weights[..., None] * query).sum(1, keepdim=True)
        both = torch.cat([mixed, -mixed], 1)  # relu(a) - relu(-a) = a
        signs = torch.tensor([1.0, -1.0], dtype=query.dtype).expand(len(query), 2)
        return super().choose(both, signs, rows, layer, count)


class FillsUpItsChoice(TorchKernels):
    def choose(self, query: Tensor, weights: Tensor, rows: GroupRows, layer: int, count: int) -> Tensor:
        return super().choose(query, weights, rows, layer, count).clamp(min=0)


class AlwaysFloat32(TorchKernels):
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return super().silu_mul(gate_up.float()).to(gate_up.dtype)


class NoEpsilon(TorchKernels):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x, weight, 1e-30)


class Centred(TorchKernels):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, None, eps)


class NormInPlace(TorchKernels):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.copy_(super().rms_norm(x, weight, eps))


class AddsInPlace(TorchKernels):
    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x.add_(update), super().rms_norm(x, weight, eps)


class NormsTheUpdate(TorchKernels):
    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x + update, super().rms_norm(update, weight, eps)


class TurnsHalves(TorchKernels):
    """Pairs (j, j + d/2)."""

    def rope(self, x: Tensor, angles: Tensor) -> None:
        a, b = x.double().chunk(2, -1)
        x.copy_(torch.cat([a * angles.real - b * angles.imag, b * angles.real + a * angles.imag], -1))


class TurnsBack(TorchKernels):
    def rope(self, x: Tensor, angles: Tensor) -> None:
        super().rope(x, angles.conj().resolve_conj())


class TurnsACopy(TorchKernels):
    """Of what is not contiguous."""

    def rope(self, x: Tensor, angles: Tensor) -> None:
        super().rope(x.contiguous(), angles)


class TurnsTheWholeRow(TorchKernels):
    def rope(self, x: Tensor, angles: Tensor) -> None:
        tokens, _, d = x.shape
        super().rope(x.as_strided((tokens, x.stride(0) // d, d), x.stride(), 0), angles)


class UpThenGate(TorchKernels):
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return super().silu_mul(gate_up.roll(gate_up.shape[1] // 2, 1))


class NaiveSigmoid(TorchKernels):
    """exp(g) / (1 + exp(g)) overflows."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return gate * gate.exp() / (1 + gate.exp()) * up


class SiluInPlace(TorchKernels):
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate, inplace=True) * up


class ClosesEverybody(TorchKernels):
    """Objects share one state, and the first to close ends it."""

    closed = False

    def close(self) -> None:
        ClosesEverybody.closed = True

    def paged_attention(
        self, query: Tensor, rows: GroupRows, layer: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return super().paged_attention(query, rows, layer, scale if not ClosesEverybody.closed else 0.0)


class BlocksSeeWhatIsStored(TorchKernels):
    """What the pool holds behind a sequence's first row is seen beside what is given."""

    def block_attention(self, query: Tensor, kv: Tensor, rows: GroupRows, *how: Any) -> Tensor:
        ahead = GroupRows(rows.pool, rows.table, rows.starts + 1, rows.counts, rows.offsets, rows.device)
        return super().block_attention(query, kv, ahead, *how)


class BlocksForgetTheirWindow(TorchKernels):
    def block_attention(self, query: Tensor, kv: Tensor, rows: GroupRows, *how: Any) -> Tensor:
        layer, scale, mask, positions, sinks = how
        positions = torch.zeros(query.shape[:2], dtype=torch.int64)
        return super().block_attention(query, kv, rows, layer, scale, mask, positions, sinks)


class BlocksWithoutSinks(TorchKernels):
    def block_attention(self, query: Tensor, kv: Tensor, rows: GroupRows, *how: Any) -> Tensor:
        return super().block_attention(query, kv, rows, *how[:4], None)
