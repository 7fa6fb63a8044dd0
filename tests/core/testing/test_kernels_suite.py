"""`KernelsSuite` accepts torch's kernels and fails each of these, which differ from them in one fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bien.core.kernels.quantized import Int4Linear, Int8Linear
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.testing.kernels import KernelsSuite
from bien.core.testing.suites import failures
from tests.core.testing import faulty_kernels as faulty


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


CAUGHT: dict[type[TorchKernels], str] = {
    faulty.WritesInARun: "write_kv",
    faulty.WritesTheWiderRow: "write_kv",
    faulty.NoWindow: "attention_in_windows",
    faulty.WindowTooWide: "attention_in_windows",
    faulty.SeesTheRowsEnd: "attention_of_every_layout",
    faulty.SeesItsLastBlock: "attention_sees_nothing_else",
    faulty.MergesOnePiece: "attention_over_long_rows",
    faulty.InterleavesHeads: "attention_of_every_head_shape",
    faulty.Straight: "attention_without_the_first_positions",
    faulty.BlocksSeeWhatIsStored: "attention_of_blocks",
    faulty.BlocksForgetTheirWindow: "attention_of_blocks",
    faulty.BlocksWithoutSinks: "attention_of_blocks",
    faulty.IgnoresSinks: "attention_with_sinks",
    faulty.SinksInAnotherOrder: "attention_with_sinks",
    faulty.KeepsTheSinks: "attention_with_sinks",
    faulty.KeepsTheScale: "attention_of_layers_in_one_step",
    faulty.KeepsTheTable: "attention_of_layers_in_one_step",
    faulty.RoundsInCompany: "a_row_does_not_depend_on_its_batch",
    faulty.SixteenWideHeads: "attention_of_every_head_shape",
    faulty.ScalesQueriesInPlace: "attention_leaves_its_inputs_alone",
    faulty.ReadsQueriesAsDense: "attention_of_queries_inside_a_wider_tensor",
    faulty.ValuesAtTheEnd: "latent_attention",
    faulty.IgnoresTheChoice: "latent_attention_over_chosen_positions",
    faulty.FillsTheChoice: "latent_attention_over_chosen_positions",
    faulty.ChoosesTheLastOfEquals: "choice_of_positions",
    faulty.ChoosesByTheSum: "choice_of_positions",
    faulty.FillsUpItsChoice: "choice_of_positions",
    faulty.ChoosesInSixteenBits: "choice_in_half_precision",
    faulty.AlwaysFloat32: "silu_mul",
    faulty.NoEpsilon: "rms_norm",
    faulty.Centred: "rms_norm",
    faulty.NormInPlace: "rms_norm",
    faulty.AddsInPlace: "add_rms_norm",
    faulty.NormsTheUpdate: "add_rms_norm",
    faulty.TurnsHalves: "rope",
    faulty.TurnsBack: "rope",
    faulty.TurnsACopy: "rope",
    faulty.TurnsTheWholeRow: "rope",
    faulty.UpThenGate: "silu_mul",
    faulty.NaiveSigmoid: "silu_mul",
    faulty.SiluInPlace: "silu_mul",
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
    faulty.ClosesEverybody: "objects_are_apart",
}


INT4 = [name for name in dir(KernelsSuite) if name.startswith("test_int4")]


def suite(kernels: type[TorchKernels], **limits: Any) -> type[KernelsSuite]:
    return type("Suite", (KernelsSuite,), {"build": lambda self: kernels(), **limits})


def test_the_plain_formula_conforms() -> None:
    """Torch's kernels do: tests/plugins/test_kernels.py."""
    quick = ("of_every_head_shape", "of_every_layout", "of_layers_in_one_step")
    assert failures(only(suite(faulty.Straight), *(f"test_attention_{name}" for name in quick))) == []


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
