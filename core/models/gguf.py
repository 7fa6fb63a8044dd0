"""GGUF files as models: their tensors by the names that the models know, dequantized where they are read.

A file is prepared once: a folder with config.json and the text files that follow from it, and a link to the
file. `convert` also writes the weights as float32, for a small model whose file is not kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bien.core.architectures.gguf import LINK, GgufFile, gguf_config
from bien.core.architectures.registry import reader_for
from bien.core.architectures.weights import expected
from bien.core.errors import ModelError
from bien.core.text.gguf_vocab import end_tokens, gguf_text_config, gguf_tokenizer

F32 = NDArray[np.float32]
Progress = Callable[[str, int, int], None]
"""progress(what, done, total), in bytes."""

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TOLD = ("rope_freqs.weight",)  # what the config says already
_SHOWN = 16


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the model. `read` dequantizes the rows that are wanted, and no others."""

    shape: tuple[int, ...]
    data: Any  # mapped from the file: rows of blocks
    kind: Any  # how they are quantized
    order: NDArray[np.int64] | None = None  # where the file has each row, if not in its place

    def read(self, slices: tuple[slice, ...] = ()) -> F32:
        import gguf

        data = self.data
        if len(self.shape) > 1 and (slices or self.order is not None):
            rows = slices[0] if slices else slice(None)
            data = data[rows] if self.order is None else data[self.order[rows]]
            slices = (slice(None), *slices[1:])
        values: F32 = np.asarray(gguf.dequantize(data, self.kind), np.float32)
        return np.ascontiguousarray(values[slices] if slices else values)


def gguf_tensors(file: GgufFile, config: dict[str, Any]) -> dict[str, GgufTensor]:
    """ModelError listing what the file has and the model of `config` has not, and the other way round."""
    found: dict[str, GgufTensor] = {}
    unknown = []
    for name, tensor in file.tensors.items():
        shape = file.shape(name)
        full = _full_name(name)
        if full is None:
            unknown += [] if name in TOLD else [name]
        elif "{}" in full:
            for i in range(shape[0]):
                found[full.format(i)] = GgufTensor(shape[1:], tensor.data[i], tensor.tensor_type)
        else:
            order = _order(full, shape, config)
            found[full] = GgufTensor(shape, tensor.data, tensor.tensor_type, order)
    wanted = _wanted(file, config)
    clauses = {
        "missing": [n for n in wanted if n not in found],
        "unknown": unknown + [n for n in found if n not in wanted],
        "wrong shape": [
            f"{n} is {list(found[n].shape)}, its fields say {list(shape)}"
            for n, shape in wanted.items()
            if n in found and found[n].shape != shape
        ],
    }
    problems = [f"{title}: {_listed(names)}" for title, names in clauses.items() if names]
    if problems:
        raise ModelError(f"{file.path} does not fill the model: {'; '.join(problems)}")
    return found


def prepare(source: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and a link to the
    file into the existing `folder`. ModelError when the file is no model that is read here."""
    file = GgufFile(source)
    config = gguf_config(file)
    gguf_tensors(file, config)
    _write_texts(file, folder, config)
    (folder / LINK).symlink_to(source.resolve())


def convert(source: Path, folder: Path, config: dict[str, Any], progress: Progress | None = None) -> None:
    """As `prepare`, with model.safetensors (float32) in place of the link. `config` is what config.json shall
    say; ModelError when the file is not of its shape."""
    file = GgufFile(source)
    for name, value in gguf_config(file).items():
        if config.get(name) != value:
            raise ModelError(f"{source}: {name} is {value!r}, expected {config.get(name)!r}")
    write_safetensors(folder / "model.safetensors", gguf_tensors(file, config), progress)
    _write_texts(file, folder, config)


def linked(folder: Path) -> Path | None:
    """The GGUF file of a prepared folder. ModelError when it is gone."""
    link = folder / LINK
    if not link.is_symlink():
        return None
    if not link.is_file():
        raise ModelError(f"model folder {folder}: {os.readlink(link)} is gone, which holds its weights")
    return link.resolve()


def write_safetensors(path: Path, tensors: dict[str, GgufTensor], progress: Progress | None = None) -> None:
    """Stream float32 tensors into one safetensors file, one of them in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = 4 * int(np.prod(tensor.shape))
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            values = tensor.read()
            file.write(values.tobytes())
            done += values.nbytes
            if progress is not None:
                progress("converting the model", done, at)
        file.flush()
        os.fsync(file.fileno())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _full_name(name: str) -> str | None:
    # "{}" in it stands for the number of an expert.
    if not name.startswith("blk."):
        part, _, suffix = name.partition(".")
        return f"{OUTER[part]}.{suffix}" if part in OUTER else None
    if name.count(".") < 3:
        return None
    _, layer, part, suffix = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if part in EXPERTS:
        return f"{prefix}mlp.experts.{{}}.{EXPERTS[part]}.{suffix}"
    return f"{prefix}{NAMES[part]}.{suffix}" if part in NAMES else None


def _order(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> NDArray[np.int64] | None:
    # Llama's files keep rotary pairs as neighbours (2j, 2j+1); transformers as halves (j, j + d/2).
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None or shape[0] % (2 * config[heads]):
        return None  # of another shape than the model's, which is said elsewhere
    return np.arange(shape[0]).reshape(config[heads], -1, 2).swapaxes(1, 2).reshape(-1)


def _wanted(file: GgufFile, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    reader = reader_for(config["model_type"], str(file.path))
    return expected(reader.read(config, model=str(file.path), block_tokens=16, dtype="float32").weights)


def _write_texts(file: GgufFile, folder: Path, config: dict[str, Any]) -> None:
    fields = file.fields
    library = gguf_tokenizer(fields, str(file.path))
    ends = end_tokens(fields)
    generation: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    for name, field in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (id := fields.get(f"tokenizer.ggml.{field}_token_id")) is not None:
            generation[name] = id
    text = {**gguf_text_config(fields), "model_max_length": config["max_position_embeddings"]}
    _write(folder / "tokenizer.json", library.to_str())
    _write(folder / "tokenizer_config.json", json.dumps(text, indent=1, ensure_ascii=False))
    _write(folder / "generation_config.json", json.dumps(generation, indent=1))
    _write(folder / "config.json", json.dumps(config, indent=1))


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
