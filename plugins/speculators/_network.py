"""What network drafters are made of: a folder's weights, attention, feed-forward.

Flat arrays of N tokens as in the models of the core. Where keys and values go is the drafter's business: it
writes them to its own group (`Rows.write`) or gives them to `Rows.attend_block` beside a query. Imported by
what a factory imports: it needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from bien.core.api import DrafterParts, ModelError, Rotary, Rows, paired
from bien.plugins.speculators._fields import SHOWN
from bien.plugins.speculators._folder import LayerShape, Shapes

_SHOWN = 8


def load_tensors(
    folder: Path, needed: Shapes, spare: Shapes, parts: DrafterParts, kind: str
) -> dict[str, Tensor]:
    """Every needed tensor of a drafter's folder, and the spare ones that it has, by name: in the compute
    dtype, on the device; whole numbers and bools stay what they are. ModelError names what is missing,
    unknown, or of another shape, all at once."""
    with ExitStack() as files:
        held = _stored(folder, files, kind)
        known = needed | spare
        missing = [n for n in needed if n not in held]
        unknown = [n for n in held if n not in known]
        wrong = []
        for name, shape in known.items():
            if name in held and (found := _shape(held[name])) != tuple(shape):
                wrong.append(f"{name} is {list(found)}, config.json says {list(shape)}")
        clauses = {"missing": missing, "unknown": unknown, "wrong shape": wrong}
        problems = [_clause(title, names) for title, names in clauses.items() if names]
        if problems:
            raise ModelError(f"{kind}: {folder}: " + "; ".join(problems))
        return {name: _take(held[name], parts) for name in held}


def vocabulary(
    tensors: Mapping[str, Tensor], count: int, vocab: int, folder: Path, kind: str
) -> Tensor | None:
    """[count] int64: the token of each index of a draft vocabulary; None where the folder has no `d2t`, which
    holds *offsets*: token = index + d2t[index]. `vocab`: of the target. ModelError where it leads outside the
    vocabulary, twice to one token, or where `t2d`, which marks the tokens that have an index, says otherwise.
    """
    offsets, marks = tensors.get("d2t"), tensors.get("t2d")
    if offsets is None:
        return None
    ids = torch.arange(count, device=offsets.device) + offsets.to(torch.int64)
    low, high, problem = int(ids.min()), int(ids.max()), ""
    if offsets.is_floating_point():  # which may have been rounded
        problem = "is of a floating-point type, not of whole numbers"
    elif low < 0 or high >= vocab:
        problem = f"leads to tokens {low} to {high} of {vocab}"
    elif len(torch.unique(ids)) != count:
        problem = "leads to one token from two indices"
    elif marks is not None and (int((marks != 0).sum()) != count or not bool((marks != 0)[ids].all())):
        problem = "leads to tokens that t2d does not mark"
    if problem:
        raise ModelError(
            f"{kind}: d2t of {folder} {problem}; it must hold offsets (token = index + d2t[index])"
        )
    return ids


def _stored(folder: Path, files: ExitStack, kind: str) -> dict[str, Any]:
    index, single, pickled = (
        folder / n for n in ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
    )
    names = [single]
    try:
        if index.is_file():
            names = _parts(index, kind)
        elif not single.is_file() and pickled.is_file():  # as SafeAILab publishes
            loaded = torch.load(pickled, map_location="cpu", mmap=True, weights_only=True)
            if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
                raise ModelError(f"{kind}: {pickled} holds other things than tensors by name")
            return loaded
        opened = [files.enter_context(safe_open(path, framework="pt")) for path in names]
    except (OSError, EOFError, SafetensorError, UnpicklingError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{kind}: the weights of {folder} cannot be read: {error}; valid: {single.name}, its parts, "
            f"or {pickled.name}"
        ) from error
    return {name: shard.get_slice(name) for shard in opened for name in shard.keys()}  # noqa: SIM118


def _parts(index: Path, kind: str) -> list[Path]:
    found = json.loads(index.read_text())
    named = found.get("weight_map") if isinstance(found, dict) else None
    files: list[Any] = list(named.values()) if isinstance(named, dict) else [named]
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(
                f"{kind}: {index} has {repr(file)[:SHOWN]} in weight_map; needs an object that gives each "
                "tensor's name the name of a file of this folder"
            )
    return [index.parent / file for file in sorted(set(files))]


def _shape(stored: Any) -> tuple[int, ...]:
    return tuple(stored.get_shape()) if hasattr(stored, "get_shape") else tuple(stored.shape)


def _take(stored: Any, parts: DrafterParts) -> Tensor:
    tensor: Tensor = stored[...] if hasattr(stored, "get_shape") else stored
    return tensor.to(parts.device, parts.dtype if tensor.is_floating_point() else None)


def _clause(title: str, names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{title}: {', '.join(names[:_SHOWN])}{more}"


class Attention:
    """Grouped-query attention's projections, rotated. `angles`: of the tokens' positions (`Rotary.at`)."""

    def __init__(
        self, tensors: Mapping[str, Tensor], prefix: str, a: LayerShape, parts: DrafterParts
    ) -> None:
        self.kernels, self.shape = parts.kernels, a
        self.scale = a.head_dim**-0.5
        self.rotary = Rotary(a.rope, a.rotated, parts.device)
        names = [f"{prefix}{n}_proj" for n in "qkv"]
        turned = [self._laid_out(tensors[f"{n}.weight"]) for n in names[:2]]
        self.qkv = torch.cat([*turned, tensors[f"{names[2]}.weight"]])
        self.bias = None
        if a.bias:
            turned = [self._laid_out(tensors[f"{n}.bias"]) for n in names[:2]]
            self.bias = torch.cat([*turned, tensors[f"{names[2]}.bias"]])
        self.o, self.o_bias = tensors[f"{prefix}o_proj.weight"], tensors.get(f"{prefix}o_proj.bias")
        self.norms: tuple[Tensor, Tensor] | None = None
        if a.qk_norm:
            q, k = (self._laid_out(tensors[f"{prefix}{n}_norm.weight"]) for n in "qk")
            self.norms = (q, k)

    def project(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, inputs] -> (queries [N, heads, d], entries [N, 2 * kv_heads * d])."""
        a = self.shape
        heads = self._linear(x, 0, len(self.qkv)).view(-1, a.heads + 2 * a.kv_heads, a.head_dim)
        query = self._turned(heads[:, : a.heads], angles, 0)
        return query, self._entries(heads[:, a.heads :], angles)

    def queries(self, x: Tensor, angles: Tensor) -> Tensor:
        """x [N, inputs] -> [N, heads, d]."""
        a = self.shape
        width = a.heads * a.head_dim
        return self._turned(self._linear(x, 0, width).view(-1, a.heads, a.head_dim), angles, 0)

    def entries(self, x: Tensor, angles: Tensor) -> Tensor:
        """x [N, inputs] -> keys and values [N, 2 * kv_heads * d], as groups hold them."""
        a = self.shape
        width = a.heads * a.head_dim
        both = self._linear(x, width, len(self.qkv)).view(-1, 2 * a.kv_heads, a.head_dim)
        return self._entries(both, angles)

    def out(self, mixed: Tensor) -> Tensor:
        """[N, heads * d] -> [N, hidden]."""
        return F.linear(mixed, self.o, self.o_bias)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """What the methods take, for int64 positions [N]."""
        return self.rotary.at(positions, dtype)

    def _linear(self, x: Tensor, begin: int, end: int) -> Tensor:
        bias = None if self.bias is None else self.bias[begin:end]
        return F.linear(x, self.qkv[begin:end], bias)

    def _entries(self, both: Tensor, angles: Tensor) -> Tensor:
        n = self.shape.kv_heads
        return torch.cat([self._turned(both[:, :n], angles, 1), both[:, n:]], 1).flatten(1)

    def _turned(self, heads: Tensor, angles: Tensor, which: int) -> Tensor:
        heads = heads.contiguous()
        if self.norms is not None:
            heads = self.kernels.rms_norm(heads, self.norms[which], self.shape.eps)
        self.kernels.rope(heads[..., : self.shape.rotated], angles)
        return heads

    def _laid_out(self, weight: Tensor) -> Tensor:
        # The core's rotation takes neighbours as pairs; checkpoints have them half a head apart.
        a = self.shape
        heads = weight.view(-1, a.head_dim, *weight.shape[1:])
        part = heads[:, : a.rotated]
        turned = paired(part.flatten(0, 1), a.rotated).view_as(part)
        return torch.cat([turned, heads[:, a.rotated :]], 1).view(weight.shape)


class Mlp:
    """down(silu(gate) * up)."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, parts: DrafterParts) -> None:
        names = [f"{prefix}{n}_proj" for n in ("gate", "up")]
        self._act = parts.kernels.silu_mul
        self._gate_up = torch.cat([tensors[f"{n}.weight"] for n in names])
        biased = f"{names[0]}.bias" in tensors
        self._bias = torch.cat([tensors[f"{n}.bias"] for n in names]) if biased else None
        self._down = tensors[f"{prefix}down_proj.weight"]
        self._down_bias = tensors.get(f"{prefix}down_proj.bias")

    def __call__(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        return F.linear(self._act(F.linear(x, self._gate_up, self._bias)), self._down, self._down_bias)


def chances(logits: Tensor, index: Tensor) -> Tensor:
    """[N] the probabilities, in float32 at least, that logits [N, C] give to index [N] int64."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.softmax(logits, -1, dtype=wide).gather(-1, index[:, None])[:, 0]


def shifted(states: Tensor, before: Tensor, rows: Rows) -> Tensor:
    """The state before every row's: states [N, hidden] of the rows, before [S, hidden] of the positions
    before each sequence's first row (`Rows.load_boundary`) -> [N, hidden]."""
    out = torch.cat([states[:1], states[:-1]])
    first = torch.from_numpy(rows.offsets[:-1]).to(states.device)
    return out.index_copy_(0, first, before.to(states.dtype))
