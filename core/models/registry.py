"""Which torch module runs an architecture, and what a model must offer to the executor."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from bien.core.architectures.base import Architecture
from bien.core.architectures.weights import expected, predicting
from bien.core.errors import ModelError, nearest
from bien.core.kernels.base import Kernels
from bien.core.models.modules import MODELS
from bien.core.parallel.strategy import ParallelStrategy
from bien.core.quantization.quantizer import Quantizer

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint

Tap = tuple[int, str]
"""(layer, "in" | "out"): a hidden state that a drafter reads."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a model is built with."""

    quantizer: Quantizer
    strategy: ParallelStrategy
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    memo: dict[Any, Any] = field(default_factory=dict)  # what a model's layers share


class CausalModel(Protocol):
    """A loaded decoder. Flat ragged batches only: N tokens of all sequences, described by `Rows`."""

    layers: list[Any]  # layer(hidden [N, H], rows) -> hidden [N, H]; never changes its input

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] int64 -> [N, H]."""
        ...

    def forward(
        self, tokens: Tensor, rows: Rows, wanted: Collection[Tap] = ()
    ) -> tuple[Tensor, dict[Tap, Tensor]]:
        """tokens [N] int64 -> hidden [N, H] of the last layer (before the final norm), and the hidden
        states at the wanted (layer, side)."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Final norm and output head: [R, H] -> logits [R, vocabulary]."""
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm alone: [R, H] -> [R, H]."""
        ...

    def project(self, normed: Tensor) -> Tensor:
        """The output head alone, of normed states."""
        ...


class ModelClass(Protocol):
    """Constructor of a `CausalModel`; takes its tensors from the checkpoint, which has been checked."""

    def __call__(
        self, architecture: Architecture, checkpoint: Checkpoint, parts: ModelParts
    ) -> CausalModel: ...


def model_class(name: str) -> ModelClass:
    """The module for architecture `name`. ModelError with the known names."""
    if name not in MODELS:
        raise ModelError(f"no torch module for architecture {name!r}; {nearest(name, MODELS)}")
    module, _, attribute = MODELS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def load_model(architecture: Architecture, folder: Path, parts: ModelParts) -> CausalModel:
    """Load strictly: ModelError names every missing, unknown or misshapen tensor. Layers for further tokens
    may be there, but only whole (`load_predicting` loads them)."""
    from bien.core.models.loading import Checkpoint

    make = model_class(architecture.name)
    with Checkpoint.open(folder, parts.dtype, parts.device, architecture.config) as checkpoint:
        tied = architecture.config.get("tie_word_embeddings")
        further = predicting(architecture.weights, checkpoint)
        tensors = expected(architecture.weights) | further
        checkpoint.check(tensors, frozenset({"lm_head.weight"} if tied else ()))
        return make(architecture, checkpoint, parts)
