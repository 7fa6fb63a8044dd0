"""`Checkpoint`: the safetensors of a model folder (or its GGUF), mapped, checked, taken tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bien.core.errors import ModelError, ResourceError
from bien.core.models.formats import PLAIN, Stored, find_stored
from bien.core.models.gguf import linked
from bien.core.models.gguf_parts import gguf_parts

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Buffers that older checkpoints carry and that follow from the config.
IGNORABLE = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
_SHOWN = 8


class Checkpoint:
    """Open with `Checkpoint.open(...)` as a context; `check` once, then `take`."""

    def __init__(
        self, folder: Path, tensors: dict[str, Stored], files: ExitStack, dtype: Any, device: Any
    ) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self._tensors, self._files = tensors, files

    @classmethod
    def open(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        config: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """`config`: of the model; says how quantized tensors lie, and in `weights_prefix` what stands before
        the model's names where other models' tensors (of images) lie beside them; those are left alone.
        ModelError when a file is missing, cut short, or no safetensors file, or a quantized tensor is
        incomplete."""
        files, parts = ExitStack(), {}
        if (source := linked(folder)) is not None:
            stored = find_stored(gguf_parts(source, config or {}), {}, str(source))
            return cls(folder, stored, files, dtype, device)
        prefix = (config or {}).get("weights_prefix", "")
        try:
            for path in shards(folder):
                try:
                    with _memory(folder):
                        shard = files.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ModelError(f"{path} is damaged or not a safetensors file: {error}") from error
                own = [name for name in shard.keys() if name.startswith(prefix)]  # noqa: SIM118
                parts.update({name.removeprefix(prefix): shard.get_slice(name) for name in own})
            tensors = find_stored(parts, config or {}, f"model folder {folder}")
        except BaseException:
            files.close()
            raise
        return cls(folder, tensors, files, dtype, device)

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str] = frozenset()) -> None:
        """The checkpoint must hold exactly the expected tensors. ModelError lists what is wrong."""
        missing = [n for n in expected if n not in self._tensors]
        extra = [
            n for n in self._tensors if n not in expected and n not in optional and not n.endswith(IGNORABLE)
        ]
        wrong, typed = [], []
        for name, shape in expected.items():
            if name in self._tensors:
                found = self.shape(name)
                if found != tuple(shape):
                    wrong.append(f"{name} is {list(found)}, config says {list(shape)}")
                stored = self._tensors[name]
                kind = stored.parts["levels"].get_dtype()
                if stored.kind == "plain" and kind not in PLAIN:
                    typed.append(f"{name} is {kind}, valid are {', '.join(PLAIN)}")
        clauses = {"missing": missing, "unknown": extra, "wrong shape": wrong, "wrong type": typed}
        problems = [_clause(title, names) for title, names in clauses.items()]
        if any(problems):
            raise ModelError(f"model folder {self.folder}: " + "; ".join(p for p in problems if p))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def take(self, name: str, slices: tuple[slice, ...] = (), *, wide: bool = False) -> Tensor:
        """The tensor (or the slices of it that a rank holds) in the compute dtype, on the device. `wide`: in
        float32 at least, for what decides and must not be rounded."""
        with _memory(self.folder):
            return (
                self._tensors[name]
                .read(slices)
                .to(self.device, torch.promote_types(self.dtype, torch.float32) if wide else self.dtype)
            )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. ModelError when there are none or one is missing."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        lost = [n for n in names if not (folder / n).is_file()]
        if lost:
            raise ModelError(f"model folder {folder} lacks {_clause('shards', lost)}, named in {INDEX}")
        return [folder / n for n in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ModelError(f"model folder {folder} has neither {SINGLE} nor {INDEX}")


@contextmanager
def _memory(folder: Path) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch has no class for it
        if "allocate memory" not in str(error):
            raise
        raise ResourceError(
            f"model folder {folder}: not enough memory for its weights: {error}; free some, or lower the "
            "pool's count"
        ) from error


def _clause(title: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{title}: {', '.join(names[:_SHOWN])}{more}"
