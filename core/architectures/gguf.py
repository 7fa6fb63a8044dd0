"""What a GGUF file says of its model: found, opened, and read strictly into the fields of a config.json.

numpy, no torch. Only the header is read; tensors stay where they are until they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bien.core.errors import ModelError, nearest

# What reading a header runs into where lengths, types or texts are not what was written.
DAMAGE = (ValueError, OSError, IndexError, KeyError, TypeError, OverflowError, MemoryError)
LINK = "model.gguf"  # in a prepared folder: a link to the file that holds the weights
_LLAMA3 = (1.0, 4.0, 8192)  # low and high frequency factor, original context: the same in every Llama 3.x

# Field of a GGUF behind "llama." and its like -> field of config.json. All of them are needed.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_DENSE = {"feed_forward_length": "intermediate_size"}
_MIXTURE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Read by hand, or said again by tensors.
_OTHER = {
    "attention.key_length",
    "attention.value_length",
    "expert_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
}
# What other models of these architectures may be, and those that are read here are not.
_ONLY: dict[str, Any] = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_gating_func": 1,  # softmax
    "expert_shared_count": 0,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
}
# general.architecture -> (model_type, its own fields, what every model of it has).
ARCHITECTURES: dict[str, tuple[str, Mapping[str, str], Mapping[str, Any]]] = {
    "llama": ("llama", _DENSE, {"mlp_bias": False}),
    "qwen3": ("qwen3", _DENSE, {}),
    "qwen3moe": (
        "qwen3_moe",
        _MIXTURE,
        {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    ),
}


class GgufFile:
    """`fields` by name, read when asked for; `tensors` by name, as the `gguf` package gives them."""

    def __init__(self, path: Path) -> None:
        """ModelError when the file is no GGUF, damaged, or one of several parts."""
        import gguf

        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
            self.fields: Mapping[str, Any] = _Contents(path, self._reader.fields)
            self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
            self.architecture = self.fields.get("general.architecture")
        except DAMAGE as error:
            raise ModelError(f"{path} is damaged or not a GGUF file: {error!r}") from error
        if self.fields.get("split.count", 0) > 1:
            raise ModelError(
                f"{path} is one of {self.fields['split.count']} parts; merge them into one file first"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """As config.json's models have it, outputs first. ModelError without the tensor."""
        if name not in self.tensors:
            raise ModelError(f"{self.path} lacks the tensor {name!r}")
        return tuple(int(n) for n in reversed(self.tensors[name].shape))


class _Contents(Mapping[str, Any]):
    # Contents of a field are parsed when it is asked for: vocabularies are long.
    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path, self._fields, self._known = path, fields, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            field = self._fields[name]
            try:
                self._known[name] = field.contents()
            except DAMAGE as error:
                raise ModelError(f"{self._path} is damaged: its field {name}: {error!r}") from error
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def find_gguf(name: str | Path) -> Path | None:
    """The GGUF file that a model's name means: itself, or the only one in a folder without config.json."""
    path = Path(name)
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise ModelError(f"{path} holds {', '.join(p.name for p in found)}; name the one to load")
    return found[0] if found else None


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """config.json of the file's model. ModelError for an architecture, a field or a scaling that is not
    known here, and for a field that is missing."""
    own = _architecture(file)
    kind, more, usual = ARCHITECTURES[own]
    names = {**_FIELDS, **more}
    head = f"{own}."
    given = {n.removeprefix(head): file.fields[n] for n in file.fields if n.startswith(head)}
    unknown = sorted(n for n in given if n not in names and n not in _OTHER and n not in _ONLY)
    if unknown:
        raise ModelError(f"{file.path}: fields of {own!r} that are not known here: {', '.join(unknown)}")
    for name, value in _ONLY.items():
        if given.get(name, value) != value:
            raise ModelError(f"{file.path}: {head}{name} = {given[name]!r} is not read; valid: {value!r}")
    lacking = [head + n for n in names if n not in given]
    if lacking:
        raise ModelError(f"{file.path} lacks {', '.join(lacking)}, which decide the architecture")
    if more is _DENSE and given.get("expert_count", 0):
        raise ModelError(f"{file.path}: {own!r} with {given['expert_count']} experts is not read; valid: 0")
    config = {"model_type": kind, **{to: _plain(given[name]) for name, to in names.items()}}
    config |= {
        "head_dim": _head_dim(file, given, config),
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **usual,
    }
    scaling = _scaling(file, given, config)
    return {**config, "rope_scaling": scaling} if scaling else config


def _architecture(file: GgufFile) -> str:
    own = file.architecture
    if own not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: general.architecture {own!r} is not read from GGUF; "
            f"{nearest(str(own), ARCHITECTURES)}"
        )
    return str(own)


def _head_dim(file: GgufFile, given: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    heads = config["num_attention_heads"]
    found = {
        n: given[n]
        for n in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        if n in given
    }
    if "attention.key_length" not in found and config["model_type"] == "llama":
        found["embedding_length / head_count"] = config["hidden_size"] // heads
    if not found:
        raise ModelError(f"{file.path} lacks {file.architecture}.attention.key_length, the size of a head")
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {value}" for name, value in found.items())
        raise ModelError(f"{file.path}: heads must have one size that is rotated whole; it says {listed}")
    return int(next(iter(found.values())))


def _scaling(file: GgufFile, given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = given.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, config)
    if kind == "none":
        return None
    if kind != "yarn":
        raise ModelError(f"{file.path}: rope.scaling.type {kind!r} is not read; valid: none, yarn")
    names = ("rope.scaling.factor", "rope.scaling.original_context_length")
    lacking = [n for n in names if n not in given]
    if lacking:
        raise ModelError(f"{file.path} lacks {', '.join(lacking)}, which decide the architecture")
    factor, original = (_plain(given[n]) for n in names)
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _llama3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    # The file holds the divisor of each frequency, not what it was made from; what is said here is held
    # against it.
    found = np.asarray(file.tensors["rope_freqs.weight"].data, np.float32).reshape(-1)
    low, high, original = _LLAMA3
    factor, dim = float(found.max()), config["head_dim"]
    wanted = []
    for i in range(dim // 2):
        turns = original / (2 * math.pi * config["rope_theta"] ** (2 * i / dim))
        part = min(1.0, max(0.0, (turns - low) / (high - low)))
        wanted.append(1 / ((1 - part) / factor + part))
    if len(found) != len(wanted) or not np.allclose(found, wanted, rtol=1e-3):
        raise ModelError(
            f"{file.path}: rope_freqs.weight is not Llama 3's scaling (frequency factors {low} and {high}, "
            f"original context {original}), the only one that is read"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _plain(value: Any) -> Any:
    # Floats are stored in 32 bits: the shortest decimal that gives the same one is what was meant.
    return float(str(np.float32(value))) if isinstance(value, float) else value
