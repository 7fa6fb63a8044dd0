"""Rotary position embedding: angles, once per step for all layers, and how weights are laid out for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.registry import ModelParts


class Rotary:
    """Angles of `dim` rotated features per head.

    bien keeps the two members of a rotated pair next to each other (see `paired`), so that the rotation
    is one complex product. Frequencies and angles are float32 whatever the model's dtype, as in
    transformers: checkpoints were trained with that rounding.
    """

    def __init__(self, rope: dict[str, Any], dim: int, device: torch.device) -> None:
        """`rope`: what `rope_parameters` read."""
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        frequency = 1.0 / (rope["rope_theta"] ** exponent)
        self.scale = 1.0  # of cosine and sine
        if rope["rope_type"] == "llama3":
            frequency = _llama3(frequency, rope)
        elif rope["rope_type"] == "linear":
            frequency = frequency / rope["factor"]
        elif rope["rope_type"] == "yarn":
            frequency, self.scale = _yarn(frequency, rope, dim), rope["attention_factor"]
        self.frequency = frequency.to(device)

    def angles(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """[N, 1, dim / 2] complex cos + i sin of the rows' positions, the same for every head."""
        found: Tensor | None = rows.shared.get(self)
        if found is None:
            found = rows.shared[self] = self.at(rows.positions, dtype)
        return found

    def at(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """The same of any positions [N]."""
        angle = positions.float()[:, None, None] * self.frequency
        if dtype is torch.float64:
            angle = angle.double()
        return torch.polar(torch.full_like(angle, self.scale), angle)


def _llama3(frequency: Tensor, rope: dict[str, Any]) -> Tensor:
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * frequency / factor + smooth * frequency
    stretched = torch.where(wavelength > original / low, frequency / factor, frequency)
    inside = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(inside, between, stretched)


def _yarn(frequency: Tensor, rope: dict[str, Any], dim: int) -> Tensor:
    # Peng et al., "YaRN" (2023): features that turn less than `beta_slow` times over the original context
    # are stretched by `factor`, those that turn more than `beta_fast` times kept, a ramp lies between.
    def feature(turns: float) -> float:
        original, theta = rope["original_max_position_embeddings"], rope["rope_theta"]
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = feature(rope["beta_fast"]), feature(rope["beta_slow"])
    if rope["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched: Tensor = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    blended: Tensor = frequency / rope["factor"] * stretched + frequency * (1 - stretched)
    return blended


def paired(weight: Tensor, dim: int) -> Tensor:
    """Rows of a query or key projection (or a norm over a head) reordered so that the halves' members
    (j, j + d/2) become neighbours (2j, 2j+1). Products of queries and keys do not change."""
    halves = weight.view(-1, 2, dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def rotary(rope: dict[str, Any], dim: int, parts: ModelParts) -> Rotary:
    """The rotary angles of a model's layers; one object for all that turn alike."""
    key = ("rotary", dim, tuple(sorted((k, v) for k, v in rope.items() if not isinstance(v, (list, dict)))))
    found: Rotary | None = parts.memo.get(key)
    if found is None:
        found = parts.memo[key] = Rotary(rope, dim, parts.device)
    return found
