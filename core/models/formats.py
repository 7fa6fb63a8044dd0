"""How tensors lie in a checkpoint: plain, or quantized in one of the formats that publishers use.

A quantized tensor is several stored ones (levels, scales); `Stored` reads the part that is wanted of it and
dequantizes that. Formats are told by names and data types:

    X.weight F8_E4M3, X.weight_scale_inv              blocks (DeepSeek, GLM: quant_method "fp8")
    X.weight F8_E4M3 | I8, X.weight_scale             tensor, channel or blocks (compressed-tensors, ModelOpt)
    X.weight U8, X.weight_scale F8_E4M3, _scale_2     NVFP4, the global scale a multiplier (ModelOpt)
    X.weight_packed U8, X.weight_scale                MXFP4 (E8M0); NVFP4 with weight_global_scale, a divisor
    X.weight_packed I32, X.weight_scale, _shape       4 or 8 bits in groups (compressed-tensors)
    X_blocks U8, X_scales U8                          MXFP4 experts (gpt-oss), transposed

FP4 codes are E2M1, the low half of a byte first; E8M0 is a power of two (OCP Microscaling v1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bien.core.errors import ModelError, nearest
from bien.core.models.modules import METHODS

PLAIN = ("F64", "F32", "F16", "BF16")
# What a quantized checkpoint has beside weights, and who computes in full precision does not need.
SURPLUS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".weight_shape")
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MX_GROUP = 32  # values that share a scale in MXFP4
Part = Any  # what `safe_open(...).get_slice` returns


@dataclass(slots=True)
class Stored:
    """One tensor of the model. `read(rows, columns)` gives float32 (plain ones: their own type)."""

    shape: tuple[int, ...]
    kind: str  # "plain", or the format
    parts: dict[str, Part] = field(default_factory=dict)  # by what they are: levels, scale, ...
    block: tuple[int, int] = (1, 1)  # rows and columns that share a scale
    bits: int = 4

    def read(self, slices: tuple[slice, ...] = ()) -> Tensor:
        if self.kind == "plain":
            part = self.parts["levels"]
            return part[slices] if slices else _all(part)
        if self.kind == "experts":
            return self._expert_values(slices)
        rows, columns = (*slices, *(slice(0, n) for n in self.shape))[:2] if slices else self._whole()
        # Scales are per block: whole blocks are read, and what is too much is cut off again.
        up, left = rows.start // self.block[0] * self.block[0], columns.start // self._step * self._step
        right = min(self.shape[1], -(-columns.stop // self._step) * self._step)
        values = self._values(slice(up, rows.stop), slice(left, right))
        return values[rows.start - up :, columns.start - left : columns.stop - left]

    def _expert_values(self, slices: tuple[slice, ...]) -> Tensor:
        # Stored [experts, outputs, groups of inputs, half of a group]; the model has inputs before outputs.
        given = (*slices, *[slice(None)] * 3)[:3]
        expert, inputs, outputs = (slice(*s.indices(n)[:2]) for s, n in zip(given, self.shape, strict=True))
        held = expert, outputs, slice(inputs.start // MX_GROUP, -(-inputs.stop // MX_GROUP))
        values = _fp4(self.parts["levels"][held].flatten(-2))
        values *= _spread(_e8m0(self.parts["scale"][held]), MX_GROUP)
        left = inputs.start % MX_GROUP
        return values[..., left : left + inputs.stop - inputs.start].transpose(1, 2)

    def _whole(self) -> tuple[slice, slice]:
        return slice(0, self.shape[0]), slice(0, self.shape[1])

    @property
    def _step(self) -> int:
        across = self.block[1] if self.block[1] < self.shape[1] else 1
        return max(across, 32 // self.bits)

    def _values(self, rows: slice, columns: slice) -> Tensor:
        levels = self._levels(rows, columns)
        scale = self._scales(rows, columns, levels.shape)
        if "zero" in self.parts:
            zero = _unpack(self.parts["zero"][:].t(), self.bits).t()[rows]  # packed along the outputs
            levels = levels - _spread(zero, self.block[1])[:, columns.start : columns.stop].to(levels.dtype)
        return levels * scale

    def _levels(self, rows: slice, columns: slice) -> Tensor:
        part = self.parts["levels"]
        if self.kind in ("float8", "int8"):
            return part[rows, columns].float()  # type: ignore[no-any-return]
        if self.kind == "fp4":
            return _fp4(part[rows, columns.start // 2 : -(-columns.stop // 2)])
        per = 32 // self.bits
        packed = part[rows, columns.start // per : -(-columns.stop // per)]
        values = _unpack(packed, self.bits)[:, : columns.stop - columns.start]
        return values.float() if "zero" in self.parts else values.float() - (1 << (self.bits - 1))

    def _scales(self, rows: slice, columns: slice, shape: torch.Size) -> Tensor:
        part = self.parts["scale"]
        if len(part.get_shape()) == 2 and tuple(part.get_shape()) != (1, 1):
            down, across = self.block
            part = part[
                rows.start // down : -(-rows.stop // down),
                columns.start // across : -(-columns.stop // across),
            ]
            scale = _e8m0(part) if part.dtype == torch.uint8 else part.float()
            scale = scale.repeat_interleave(down, 0)[: shape[0]].repeat_interleave(across, 1)[:, : shape[1]]
        else:
            scale = _all(part).float().reshape(-1)
            scale = scale[rows, None] if len(scale) > 1 else scale
        if "global" in self.parts:
            scale = scale * _all(self.parts["global"]).float().reshape(())
        if "divisor" in self.parts:
            scale = scale / _all(self.parts["divisor"]).float().reshape(())
        return scale


def find_stored(parts: Mapping[str, Part], config: Mapping[str, Any], where: str) -> dict[str, Stored]:
    """The tensors of a checkpoint whose stored ones are `parts`, by the names that the model knows.

    `config`: of the model, its quantization_config tells block sizes. ModelError for a quantized tensor
    whose companions are missing or do not fit.
    """
    found: dict[str, Stored] = {}
    blocks = _block_size(config)
    for name, part in parts.items():
        if name.endswith("_blocks"):
            found[name.removesuffix("_blocks")] = _experts(parts, name, where)
        elif name.endswith(".weight_packed"):
            found[name.removesuffix("_packed")] = _packed(parts, name, where)
        elif name.endswith(SURPLUS) or _accompanies(name, parts):
            continue
        elif part.get_dtype() not in PLAIN and {f"{name}_scale", f"{name}_scale_inv"} & parts.keys():
            found[name] = _scaled(parts, name, blocks, where)
        else:
            found[name] = Stored(tuple(part.get_shape()), "plain", {"levels": part})
    return found


def check_readable(config: Mapping[str, Any], model: str) -> None:
    """ModelError when `quantization_config` names a method whose tensors are not known here."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method is not None and method not in METHODS:
        raise ModelError(
            f"model {model!r}: quantization method {method!r} is unknown; {nearest(method, METHODS)}"
        )


_COMPANIONS = (
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
)


def _accompanies(name: str, parts: Mapping[str, Part]) -> bool:
    # What belongs to nothing quantized is left among the tensors, where no model expects it.
    if name.endswith("_scales"):
        return f"{name.removesuffix('_scales')}_blocks" in parts
    end = next((end for end in _COMPANIONS if name.endswith(end)), None)
    if end is None:
        return False
    weight = f"{name.removesuffix(end)}.weight"
    return f"{weight}_packed" in parts or (weight in parts and parts[weight].get_dtype() not in PLAIN)


def _experts(parts: Mapping[str, Part], name: str, where: str) -> Stored:
    base, size = name.removesuffix("_blocks"), list(parts[name].get_shape())
    held = _parts(parts, where, levels=name, scale=f"{base}_scales")
    scales = list(held["scale"].get_shape())
    if len(size) != 4 or size[3] != MX_GROUP // 2 or scales != size[:3]:
        raise ModelError(
            f"{where}: {base}_scales {scales} do not fit {name} of {size}; valid: [experts, outputs, groups] "
            f"for [experts, outputs, groups, {MX_GROUP // 2}]"
        )
    experts, outputs, groups = scales
    return Stored((experts, groups * MX_GROUP, outputs), "experts", held)


def _packed(parts: Mapping[str, Part], name: str, where: str) -> Stored:
    base, part = name.removesuffix("_packed"), parts[name]
    rows, width = part.get_shape()
    if part.get_dtype() == "U8":
        held = _parts(parts, where, levels=name, scale=f"{base}_scale")
        if f"{base}_global_scale" in parts:
            held["divisor"] = parts[f"{base}_global_scale"]
        return _grouped((rows, 2 * width), "fp4", held, name, where)
    held = _parts(parts, where, levels=name, scale=f"{base}_scale", shape=f"{base}_shape")
    if f"{base}_g_idx" in parts:
        raise ModelError(f"{where}: {base}_g_idx: weights quantized in activation order are not read")
    shape = tuple(int(n) for n in held.pop("shape")[:])
    bits = next((b for b in (4, 8) if -(-shape[1] * b // 32) == width and shape[0] == rows), 0)
    if not bits:
        raise ModelError(
            f"{where}: {name} is {[rows, width]}; {base}_shape says {list(shape)} of 4 or 8 bits"
        )
    if f"{base}_zero_point" in parts:
        held["zero"] = parts[f"{base}_zero_point"]
    return _grouped(shape, "packed", held, name, where, bits)


def _scaled(parts: Mapping[str, Part], name: str, blocks: tuple[int, int] | None, where: str) -> Stored:
    part, shape = parts[name], tuple(parts[name].get_shape())
    kind = {"F8_E4M3": "float8", "I8": "int8", "U8": "fp4"}.get(part.get_dtype())
    if kind is None or len(shape) != 2:
        valid = ", ".join((*PLAIN, "F8_E4M3", "I8", "U8"))
        raise ModelError(f"{where}: {name} {list(shape)} is {part.get_dtype()}; valid: {valid}")
    scale = f"{name}_scale_inv" if f"{name}_scale_inv" in parts else f"{name}_scale"
    held = _parts(parts, where, levels=name, scale=scale)
    if kind == "fp4":
        held |= _parts(parts, where, **{"global": f"{name}_scale_2"})
        return _grouped((shape[0], 2 * shape[1]), kind, held, name, where)
    size = tuple(held["scale"].get_shape())
    if size in ((), (1,), (1, 1)):
        return Stored(shape, kind, held, bits=8)
    if size in ((shape[0],), (shape[0], 1)):
        return Stored(shape, kind, held, (1, shape[1]), bits=8)
    if blocks is None or size != (-(-shape[0] // blocks[0]), -(-shape[1] // blocks[1])):
        raise ModelError(
            f"{where}: {scale} is {list(size)} for a weight {list(shape)}; valid: one scale, one per row, or "
            f"one per block of the size that quantization_config states ({blocks})"
        )
    return Stored(shape, kind, held, blocks, bits=8)


def _grouped(
    shape: tuple[int, ...], kind: str, held: dict[str, Part], name: str, where: str, bits: int = 4
) -> Stored:
    rows, groups = held["scale"].get_shape()
    if rows != shape[0] or shape[1] % groups:
        raise ModelError(f"{where}: scales {[rows, groups]} do not fit {name} of {list(shape)}")
    return Stored(shape, kind, held, (1, shape[1] // groups), bits)


def _parts(parts: Mapping[str, Part], where: str, **names: str) -> dict[str, Part]:
    lacking = [n for n in names.values() if n not in parts]
    if lacking:
        raise ModelError(f"{where}: a quantized tensor lacks {', '.join(lacking)}")
    return {what: parts[n] for what, n in names.items()}


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    about = config.get("quantization_config") or {}
    groups = (about.get("config_groups") or {}).values()
    sizes = [
        about.get("weight_block_size"),
        *((g.get("weights") or {}).get("block_structure") for g in groups),
    ]
    for size in sizes:
        if isinstance(size, (list, tuple)) and len(size) == 2:
            return int(size[0]), int(size[1])
    return None


def _all(part: Part) -> Tensor:
    return part[:] if part.get_shape() else part[...]  # type: ignore[no-any-return]


def _fp4(packed: Tensor) -> Tensor:
    # [..., n] bytes -> [..., 2 n] values.
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return _E2M1[codes.long()]


def _e8m0(codes: Tensor) -> Tensor:
    return torch.exp2(codes.float() - 127)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    # [rows, n] int32 -> [rows, n * 32 / bits] unsigned levels, the lowest bits first.
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _spread(values: Tensor, size: int) -> Tensor:
    return values.repeat_interleave(size, -1)
