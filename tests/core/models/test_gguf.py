"""Conversion of GGUF files: weights, config and tokenizer as transformers would have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from bien.core.errors import ModelError
from bien.core.models.gguf import NAMES, OUTER, convert
from bien.core.testing.toy import SPECIAL, toy_config, write_toy

CONFIG = toy_config(
    "llama", vocab_size=264, hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4
)
MERGES = ["Ġ t", "h e", "Ġt he", "a b"]
WORDS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]


def to_gguf(folder: Path, path: Path, *, quantize: bool = False, **changes: Any) -> Path:
    """A model folder's weights as llama.cpp lays them out."""
    assert len(WORDS) == 263
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(changes.get("feed_forward", CONFIG["intermediate_size"]))
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list([*WORDS, "<pad>"])
    writer.add_token_types([3] * 3 + [1] * 260 + [3])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(263)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages }}")
    back = {v: k for k, v in NAMES.items()} | {v: k for k, v in OUTER.items()}
    for name, values in load_file(folder / "model.safetensors").items():
        inner = name.removesuffix(".weight")
        part = inner.split(".", 3)[3] if ".layers." in inner else inner
        prefix = f"blk.{inner.split('.')[2]}." if ".layers." in inner else ""
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
        if heads:
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if quantize and values.ndim == 2 else None
        data = gguf.quantize(values, kind) if kind is not None else values
        writer.add_tensor(f"{prefix}{back[part]}.weight", data, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), **{k: v for k, v in CONFIG.items() if k != "model_type"})


def test_weights_come_back(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = to_gguf(source, tmp_path / "m.gguf")
    convert(path, tmp_path, CONFIG, lambda what, done, of: seen.append((done, of)))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert np.array_equal(values, after[name]), name
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    total = sum(v.nbytes for v in before.values())
    assert seen[-1] == (total, total) and len(seen) == len(before)


def test_quantized_weights_are_near(source: Path, tmp_path: Path) -> None:
    convert(to_gguf(source, tmp_path / "m.gguf", quantize=True), tmp_path, CONFIG)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    for name, values in before.items():
        assert after[name].dtype == np.float32
        assert np.linalg.norm(values - after[name]) < 0.01 * np.linalg.norm(values), name


def test_tokenizer(source: Path, tmp_path: Path) -> None:
    convert(to_gguf(source, tmp_path / "m.gguf"), tmp_path, CONFIG)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<|im_start|> the 42 täb\n\n🙂<|im_end|>"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert encoded.tokens[:5] == ["<|im_start|>", "Ġthe", "Ġ", "4", "2"] and encoded.ids[-1] == 2
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages }}"
    named = [config[f"{n}_token"] for n in ("bos", "eos", "pad", "unk")]
    assert named == [SPECIAL[1], SPECIAL[2], "<pad>", SPECIAL[0]]
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 263}


def test_what_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="feed_forward_length is 95, expected 96"):
        convert(to_gguf(source, tmp_path / "a.gguf", feed_forward=95), tmp_path, CONFIG)
    with pytest.raises(ModelError, match="pre-tokenizer 'qwen2' is unknown; valid: 'smollm'"):
        convert(to_gguf(source, tmp_path / "b.gguf", pre="qwen2"), tmp_path, CONFIG)
    whole = to_gguf(source, tmp_path / "c.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(ModelError, match="damaged or not a GGUF file"):
        convert(tmp_path / "cut.gguf", tmp_path, CONFIG)
    (tmp_path / "other.gguf").write_bytes(b"no gguf at all, but long enough for a header")
    with pytest.raises(ModelError, match="damaged or not a GGUF file"):
        convert(tmp_path / "other.gguf", tmp_path, CONFIG)
