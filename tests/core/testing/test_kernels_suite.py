"""`KernelsSuite` accepts torch's kernels and fails each of these, which differ from them in one fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bien.core.executors.rows import GroupRows
from bien.core.kernels.quantized import Int4Linear, Int8Linear
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.testing.kernels import KernelsSuite
from bien.core.testing.suites import failures


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

    def paged_attention(self, query: Tensor, rows: GroupRows, layer: int, scale: float) -> Tensor:
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

    def paged_attention(self, query: Tensor, rows: GroupRows, layer: int, scale: float) -> Tensor:
        query = query.clone()
        query[..., query.shape[-1] // 16 * 16 :] = 0
        return super().paged_attention(query, rows, layer, scale)


class ScalesQueriesInPlace(TorchKernels):
    def paged_attention(self, query: Tensor, rows: GroupRows, layer: int, scale: float) -> Tensor:
        return super().paged_attention(query.mul_(scale), rows, layer, 1.0)


class ReadsQueriesAsDense(TorchKernels):
    def paged_attention(self, query: Tensor, rows: GroupRows, layer: int, scale: float) -> Tensor:
        _, heads, d = query.shape
        dense = query.as_strided(query.shape, (heads * d, d, 1), query.storage_offset())
        return super().paged_attention(dense, rows, layer, scale)


class KeepsTheTable(TorchKernels):
    """The first step's blocks, for ever."""

    def paged_attention(self, query: Tensor, rows: GroupRows, layer: int, scale: float) -> Tensor:
        self.table = getattr(self, "table", rows.table)
        rows.table = self.table[: len(rows.table)] % len(rows.pool.layers[layer])
        return super().paged_attention(query, rows, layer, scale)


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


def eight(method: type[Any]) -> type[TorchKernels]:
    """Kernels with this int8 product."""
    return type(method.__name__, (TorchKernels,), {"int8_linear": lambda self, *given: method(*given)})


def four(method: type[Any]) -> type[TorchKernels]:
    return type(method.__name__, (TorchKernels,), {"int4_linear": lambda self, *given: method(*given)})


class NoBias8(Int8Linear):
    def __init__(self, levels: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(levels, scale, None)


class OneScaleForAllTokens(Int8Linear):
    def __call__(self, x: Tensor) -> Tensor:
        if not x.numel():
            return super().__call__(x)
        most = x.abs().max().clamp(min=1e-30) / 127
        return super().__call__((x / most).round() * most)


class RoundsDown(Int8Linear):
    def __call__(self, x: Tensor) -> Tensor:
        if not x.numel():
            return super().__call__(x)
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return super().__call__((x / step).trunc() * step)


class SumsInSixteenBits(Int8Linear):
    def _product(self, levels: Tensor) -> Tensor:
        return super()._product(levels).clamp(-32768, 32767)


class InFours(Int8Linear):
    """Leaves out inputs beyond a multiple of four."""

    def _product(self, levels: Tensor) -> Tensor:
        levels = levels.clone()
        levels[:, levels.shape[1] // 4 * 4 :] = 0
        return super()._product(levels)


class TwoDimensions(Int8Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.reshape(-1, x.shape[-1]))


class AnswersInItsOwnDtype(Int8Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.to(self._scale.dtype))


class ReadsRowsAsDense(Int8Linear):
    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() == 2 and x.numel():
            x = x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())
        return super().__call__(x)


class NoOffset(Int4Linear):
    def __init__(self, levels: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> None:
        super().__init__(levels, scale, torch.zeros_like(offset), bias)


class SwapsNibbles(Int4Linear):
    def __init__(self, levels: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> None:
        super().__init__(levels.unflatten(1, (-1, 2)).flip(-1).flatten(1), scale, offset, bias)


class GroupOf32(Int4Linear):
    """Reads the scales of groups of 32 whatever the group is."""

    def __init__(self, levels: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> None:
        groups = -(-levels.shape[1] // 32)
        index = torch.arange(groups).clamp(max=scale.shape[1] - 1)
        if levels.shape[1] % 32 == 0:
            scale, offset = scale[:, index], offset[:, index]
        super().__init__(levels, scale, offset, bias)


class RoundsTokens4(Int4Linear):
    """x in int8 with one scale per token."""

    def __call__(self, x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return super().__call__((x / step).round() * step)


class RoundsTo4Bits(Int4Linear):
    def __call__(self, x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
        return super().__call__((x / step).round() * step)


class EatsItsWeights(Int4Linear):
    def __init__(self, levels: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> None:
        super().__init__(levels, scale, offset, bias)
        levels.zero_()


class ClosesEverybody(TorchKernels):
    """Objects share one state, and the first to close ends it."""

    closed = False

    def close(self) -> None:
        ClosesEverybody.closed = True

    def paged_attention(self, query: Tensor, rows: GroupRows, layer: int, scale: float) -> Tensor:
        return super().paged_attention(query, rows, layer, scale if not ClosesEverybody.closed else 0.0)


CAUGHT: dict[type[TorchKernels], str] = {
    WritesInARun: "write_kv",
    WritesTheWiderRow: "write_kv",
    NoWindow: "attention_in_windows",
    WindowTooWide: "attention_in_windows",
    SeesTheRowsEnd: "attention_of_every_layout",
    SeesItsLastBlock: "attention_sees_nothing_else",
    MergesOnePiece: "attention_over_long_rows",
    InterleavesHeads: "attention_of_every_head_shape",
    KeepsTheScale: "attention_of_layers_in_one_step",
    KeepsTheTable: "attention_of_layers_in_one_step",
    RoundsInCompany: "a_row_does_not_depend_on_its_batch",
    SixteenWideHeads: "attention_of_every_head_shape",
    ScalesQueriesInPlace: "attention_leaves_its_inputs_alone",
    ReadsQueriesAsDense: "attention_of_queries_inside_a_wider_tensor",
    AlwaysFloat32: "silu_mul",
    NoEpsilon: "rms_norm",
    Centred: "rms_norm",
    NormInPlace: "rms_norm",
    AddsInPlace: "add_rms_norm",
    NormsTheUpdate: "add_rms_norm",
    TurnsHalves: "rope",
    TurnsBack: "rope",
    TurnsACopy: "rope",
    TurnsTheWholeRow: "rope",
    UpThenGate: "silu_mul",
    NaiveSigmoid: "silu_mul",
    SiluInPlace: "silu_mul",
    eight(NoBias8): "int8_of_whole_levels",
    eight(OneScaleForAllTokens): "int8_rounds_each_token",
    eight(RoundsDown): "int8_rounds_each_token",
    eight(SumsInSixteenBits): "int8_of_whole_levels",
    eight(InFours): "int8_of_whole_levels",
    eight(TwoDimensions): "products_keep_shape_and_dtype",
    eight(AnswersInItsOwnDtype): "products_keep_shape_and_dtype",
    eight(ReadsRowsAsDense): "products_take_any_layout",
    four(NoOffset): "int4",
    four(SwapsNibbles): "int4",
    four(GroupOf32): "int4",
    four(RoundsTokens4): "int4_groups_of_inputs_keep_their_precision",
    four(RoundsTo4Bits): "int4",
    four(EatsItsWeights): "products_leave_weights_alone",
    ClosesEverybody: "objects_are_apart",
}


INT4 = [name for name in dir(KernelsSuite) if name.startswith("test_int4")]


def suite(kernels: type[TorchKernels], **limits: Any) -> type[KernelsSuite]:
    return type("Suite", (KernelsSuite,), {"build": lambda self: kernels(), **limits})


def test_the_plain_formula_conforms() -> None:
    """Torch's kernels do: tests/plugins/test_kernels.py."""
    quick = ("of_every_head_shape", "of_every_layout", "of_layers_in_one_step")
    assert failures(only(suite(Straight), *(f"test_attention_{name}" for name in quick))) == []


@pytest.mark.parametrize("fault", CAUGHT, ids=lambda c: c.__name__)
def test_fault_is_caught(fault: type[TorchKernels]) -> None:
    name = f"test_{CAUGHT[fault]}"
    (line,) = failures(only(suite(fault), name))
    assert line.startswith(f"{name}: AssertionError")


def test_a_tolerance_below_the_format_is_caught() -> None:
    class InInt8(Int4Linear):
        """Rounds x as finely as the contract allows."""

        def __call__(self, x: Tensor) -> Tensor:
            parts = x.unflatten(-1, (self._scale.shape[1], -1))
            step = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
            return super().__call__(((parts / step).round() * step).flatten(-2))

    assert failures(only(suite(four(InInt8)), *INT4)) == []
    strict = only(suite(four(InInt8), int4_tolerance=1e-6), "test_int4")
    assert failures(strict) != []


def only(suite: type[KernelsSuite], *names: str) -> type[KernelsSuite]:
    """These tests of the suite."""
    others = [n for n in dir(suite) if n.startswith("test_") and n not in names]
    return type("Some", (suite,), dict.fromkeys(others, lambda self: None))
