"""The tensors of a prepared GGUF folder, as `Checkpoint` takes those of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bien.core.architectures.gguf import GgufFile
from bien.core.models.gguf import GgufTensor, gguf_tensors


class GgufPart:
    """Looks like a slice of `safe_open`: whatever the file's blocks are, it gives float32."""

    def __init__(self, tensor: GgufTensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, slices: Any) -> Tensor:
        values = self._tensor.read(slices if isinstance(slices, tuple) else ())
        return torch.from_numpy(values if values.flags.writeable else values.copy())


def gguf_parts(path: Path, config: Mapping[str, Any]) -> dict[str, GgufPart]:
    """ModelError when the file does not fill the model of `config` exactly."""
    return {name: GgufPart(t) for name, t in gguf_tensors(GgufFile(path), dict(config)).items()}
