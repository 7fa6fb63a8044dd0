"""From a Llama-shaped GGUF file to a model folder as transformers writes it. numpy, no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bien.core.errors import ModelError

F32 = NDArray[np.float32]
Progress = Callable[[str, int, int], None]
"""progress(what, done, total), in bytes."""

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def convert(source: Path, folder: Path, config: dict[str, Any], progress: Progress | None = None) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32), tokenizer.json and
    tokenizer_config.json into the existing `folder`. `config` is what config.json shall say.

    ModelError when the file is no GGUF, is damaged, or is not of the config's shape.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelError(f"{source} is damaged or not a GGUF file: {error!r}") from error
    _same_shape(source, fields, config)
    write_safetensors(folder / "model.safetensors", list(_tensors(source, reader, config)), progress)
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")}
    generation = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]}
    tokens = fields["tokenizer.ggml.tokens"]
    text = {
        "bos_token": tokens[ids["bos"]],
        "eos_token": tokens[ids["eos"]],
        "pad_token": tokens[ids["padding"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "add_prefix_space": fields["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_text(folder / "tokenizer.json", json.dumps(tokenizer_json(source, fields), ensure_ascii=False))
    write_text(folder / "tokenizer_config.json", json.dumps(text, indent=1, ensure_ascii=False))
    write_text(folder / "generation_config.json", json.dumps(generation, indent=1))
    write_text(folder / "config.json", json.dumps(config, indent=1))


def _same_shape(source: Path, fields: dict[str, Any], config: dict[str, Any]) -> None:
    expected = {
        "general.architecture": config["model_type"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.vocab_size": config["vocab_size"],
        "llama.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
    }
    for name, value in expected.items():
        if fields.get(name) != value:
            raise ModelError(f"{source}: {name} is {fields.get(name)!r}, expected {value!r}")


def _tensors(source: Path, reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    # (name, shape, function that dequantizes): one tensor in memory at a time.
    for tensor in reader.tensors:
        name = tensor.name
        if name.startswith("blk."):
            _, layer, part, suffix = name.split(".")
            if part not in NAMES:
                raise ModelError(f"{source}: unknown tensor {name!r}")
            full = f"model.layers.{layer}.{NAMES[part]}.{suffix}"
        else:
            part, _, suffix = name.partition(".")
            if part not in OUTER:
                raise ModelError(f"{source}: unknown tensor {name!r}")
            full = f"{OUTER[part]}.{suffix}"
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part)
        count = config[heads] if heads else 0
        shape = tuple(int(n) for n in reversed(tensor.shape))
        yield full, shape, lambda t=tensor, n=count: _dequantize(t, n)


def _dequantize(tensor: Any, heads: int) -> F32:
    import gguf

    values: F32 = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
    if heads:
        # GGUF keeps rotary pairs as neighbours (2j, 2j+1); transformers as halves (j, j + d/2).
        pairs = values.reshape(heads, -1, 2, values.shape[-1])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(values)


def tokenizer_json(source: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The byte-level BPE of a GGUF as tokenizer.json. ModelError for a pre-tokenizer other than SmolLM's
    (every digit alone, then GPT-2's pattern)."""
    if fields["tokenizer.ggml.pre"] != "smollm":
        kind = fields["tokenizer.ggml.pre"]
        raise ModelError(f"{source}: pre-tokenizer {kind!r} is unknown; valid: 'smollm'")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def write_safetensors(
    path: Path, tensors: list[tuple[str, tuple[int, ...], Any]], progress: Progress | None = None
) -> None:
    """Stream float32 tensors (name, shape, function that makes it) into one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, _ in tensors:
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape, make in tensors:
            values = make()
            if values.shape != shape:
                raise ModelError(f"{path}: {name} is {list(values.shape)}, its file says {list(shape)}")
            file.write(values.tobytes())
            done += values.nbytes
            if progress is not None:
                progress("converting the model", done, at)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
