"""GGUF files as models: tensors, config and text as transformers would have written them, or a refusal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers

from bien.core.architectures.gguf import LINK
from bien.core.architectures.registry import read_architecture
from bien.core.architectures.weights import expected
from bien.core.errors import ModelError
from bien.core.models.fetch import resolve_model
from bien.core.models.gguf import EXPERTS, NAMES, OUTER, convert
from bien.core.models.loading import Checkpoint
from bien.core.testing.toy import SPECIAL, toy_config
from bien.core.text.model import TextModel
from tests.core.executors.driver import Driver

MERGES = ["Ġ t", "h e", "Ġt he", "a b"]
WORDS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(m.replace(" ", "") for m in MERGES),
    "<pad>",
]
TYPES = [3] * 3 + [1] * 260 + [3]
SIZES = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
LLAMA = toy_config("llama", **SIZES, head_dim=16)
QWEN3 = toy_config("qwen3", **SIZES, head_dim=32)
MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
CONFIGS = {"llama": LLAMA, "qwen3": QWEN3, "qwen3moe": MOE}
Edit = Callable[[dict[str, Any]], None]


def write_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A model as its publisher has it, with random weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    rng = np.random.default_rng(0)
    weights = expected(read_architecture(folder, 16, "float32").weights)
    save_file(
        {n: rng.normal(size=s).astype(np.float32) for n, s in weights.items()}, folder / "model.safetensors"
    )
    return folder


def to_gguf(
    folder: Path, path: Path, *, quantize: bool = False, edit: Edit | None = None, tensors: Edit | None = None
) -> Path:
    """A model folder as llama.cpp lays it out. `edit` changes fields, `tensors` what is stored."""
    config = json.loads((folder / "config.json").read_text())
    own = {"qwen3_moe": "qwen3moe"}.get(config["model_type"], config["model_type"])
    fields = {
        f"{own}.block_count": config["num_hidden_layers"],
        f"{own}.context_length": config["max_position_embeddings"],
        f"{own}.embedding_length": config["hidden_size"],
        f"{own}.feed_forward_length": config["intermediate_size"],
        f"{own}.attention.head_count": config["num_attention_heads"],
        f"{own}.attention.head_count_kv": config["num_key_value_heads"],
        f"{own}.attention.key_length": config["head_dim"],
        f"{own}.attention.value_length": config["head_dim"],
        f"{own}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{own}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 263,
        "tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>",
    }
    if own == "qwen3moe":
        fields |= {
            f"{own}.expert_count": config["num_experts"],
            f"{own}.expert_used_count": config["num_experts_per_tok"],
            f"{own}.expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if edit:
        edit(fields)
    stored = dict(_stored(load_file(folder / "model.safetensors"), config))
    if tensors:
        tensors(stored)
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture", own))
    for name, value in fields.items():
        kind = {
            float: "add_float32",
            int: "add_uint32",
            str: "add_string",
            list: "add_array",
            bool: "add_bool",
        }
        getattr(writer, kind[type(value)])(name, value)
    for name, values in stored.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if quantize and values.ndim > 1 else None
        data = gguf.quantize(values, kind) if kind is not None else values
        writer.add_tensor(name, data, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


def _stored(tensors: dict[str, Any], config: dict[str, Any]) -> Any:
    back = {v: k for k, v in NAMES.items()} | {v: k for k, v in OUTER.items()}
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    for name, values in tensors.items():
        inner = name.removesuffix(".weight")
        if ".experts." in inner:
            continue
        part = inner.split(".", 3)[3] if ".layers." in inner else inner
        prefix = f"blk.{inner.split('.')[2]}." if ".layers." in inner else ""
        if config["model_type"] == "llama" and part in heads:
            count = config[heads[part]]
            values = values.reshape(count, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        yield f"{prefix}{back[part]}.weight", np.ascontiguousarray(values)
    for layer in range(config["num_hidden_layers"]):
        for stack, part in EXPERTS.items():
            rows = [tensors.get(f"model.layers.{layer}.mlp.experts.{e}.{part}.weight") for e in range(4)]
            if rows[0] is not None:
                yield f"blk.{layer}.{stack}.weight", np.stack(rows)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("sources")
    return {name: write_folder(home / name, config) for name, config in CONFIGS.items()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def opened(folder: Path) -> Checkpoint:
    config = read_architecture(folder, 16, "float32").config
    return Checkpoint.open(folder, torch.float32, torch.device("cpu"), config)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_file_is_the_model_that_it_was_made_of(sources: dict[str, Path], tmp_path: Path, kind: str) -> None:
    path = to_gguf(sources[kind], tmp_path / "m.gguf")
    before, after = read_architecture(sources[kind], 16, "float32"), read_architecture(path, 16, "float32")
    assert after.weights == before.weights and after.groups == before.groups
    assert after.eos_token_ids == (2,)
    said = {
        k: v for k, v in before.config.items() if k not in ("architectures", "bos_token_id", "eos_token_id")
    }
    if kind == "qwen3moe":
        del said["intermediate_size"]  # every layer has experts
    assert {k: after.config[k] for k in said} == said
    folder = resolve_model(path)
    assert read_architecture(folder, 16, "float32").config == after.config
    with opened(sources[kind]) as old, opened(folder) as new:
        new.check(expected(before.weights))
        for name, shape in expected(before.weights).items():
            assert torch.equal(new.take(name), old.take(name)), name
            part = tuple(slice(n // 4, n // 2) for n in shape)
            assert torch.equal(new.take(name, part), old.take(name, part)), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_quantized_weights_are_near_and_parts_of_them_the_same(
    sources: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    folder = resolve_model(to_gguf(sources[kind], tmp_path / "m.gguf", quantize=True))
    with opened(sources[kind]) as old, opened(folder) as new:
        for name, shape in expected(read_architecture(folder, 16, "float32").weights).items():
            was, now = old.take(name), new.take(name)
            assert torch.linalg.norm(was - now) < 0.01 * torch.linalg.norm(was), name
            part = tuple(slice(n // 4, n // 2) for n in shape)
            assert torch.equal(new.take(name, part), now[part]), name


def test_the_text_side_comes_from_the_file(sources: dict[str, Path], tmp_path: Path) -> None:
    def edit(fields: dict[str, Any]) -> None:
        fields["tokenizer.ggml.eot_token_id"] = 1
        fields["tokenizer.chat_template.tool_use"] = "{{ tools[0].name }}<|im_start|>"

    folder = resolve_model(to_gguf(sources["llama"], tmp_path / "m.gguf", edit=edit))
    text = "<|im_start|> the 42 täb\n\n🙂<|im_end|>"
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = library.encode(text)
    assert library.decode(encoded.ids, skip_special_tokens=False) == text
    assert encoded.tokens[:5] == ["<|im_start|>", "Ġthe", "Ġ", "4", "2"] and encoded.ids[-1] == 2
    model, talk = TextModel.load(folder), [{"role": "user", "content": "<|im_end|>"}]
    ids = list(model.encode_chat(talk).ids())
    assert [i for i in ids if i in model.tokenizer.control.ids] == [2] and len(ids) > 5
    assert list(model.encode_chat(talk, tools=[{"name": "a"}]).ids()) == [WORDS.index("a"), 1]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [config[f"{n}_token"] for n in ("bos", "eos", "pad", "unk")]
    assert named == [SPECIAL[1], SPECIAL[2], "<pad>", SPECIAL[0]]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 1], "pad_token_id": 263}


def test_a_folder_with_one_file_is_that_file_and_it_is_prepared_once(
    sources: dict[str, Path], tmp_path: Path, cache: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    path = to_gguf(sources["llama"], home / "m.gguf")
    folder = resolve_model(home)
    assert folder.parent == cache and resolve_model(str(path)) == folder
    assert (folder / LINK).resolve() == path and not (folder / "model.safetensors").exists()
    assert read_architecture(home, 16, "float32").layers == 3
    stamp = path.stat().st_mtime_ns
    os.utime(path, ns=(stamp, stamp + 10**9))
    assert resolve_model(home) != folder  # a file that has changed is another model
    (home / "n.gguf").touch()
    with pytest.raises(ModelError, match=r"holds m.gguf, n.gguf; name the one to load"):
        resolve_model(home)
    path.unlink()
    with pytest.raises(ModelError, match=r"m\.gguf is gone, which holds its weights"):
        opened(folder)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_found_in_its_frequencies(
    sources: dict[str, Path], tmp_path: Path, factor: float
) -> None:
    config = {**LLAMA, "rope_theta": 500000.0}
    frequencies = 500000.0 ** (np.arange(0, 16, 2) / 16)
    waves = 2 * math.pi * frequencies
    smooth = (8192 / waves - 1) / 3
    middle = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(waves < 8192 / 4, 1, np.where(waves > 8192, factor, middle)).astype(np.float32)
    assert 1 < divisors[4] < factor and divisors[0] == 1 and divisors[-1] == factor
    source = write_folder(tmp_path / "source", config)

    def store(tensors: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = divisors

    path = to_gguf(source, tmp_path / "m.gguf", tensors=store)
    assert read_architecture(path, 16, "float32").config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    resolve_model(path)
    divisors[4] *= 1.1
    with pytest.raises(ModelError, match="rope_freqs.weight is not Llama 3's scaling"):
        read_architecture(to_gguf(source, tmp_path / "n.gguf", tensors=store), 16, "float32")


def test_yarn_is_read(sources: dict[str, Path], tmp_path: Path) -> None:
    def edit(fields: dict[str, Any]) -> None:
        fields["qwen3.rope.scaling.type"] = "yarn"
        fields["qwen3.rope.scaling.factor"] = 4.0
        fields["qwen3.rope.scaling.original_context_length"] = 256

    config = read_architecture(
        to_gguf(sources["qwen3"], tmp_path / "m.gguf", edit=edit), 16, "float32"
    ).config
    assert (config["rope"]["rope_type"], config["rope"]["factor"]) == ("yarn", 4.0)
    assert config["rope"]["original_max_position_embeddings"] == 256.0


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        (
            "llama",
            {"general.architecture": "gemma"},
            "general.architecture 'gemma' is not read.*valid: llama",
        ),
        ("llama", {"llama.rope.freq_base": None}, r"lacks llama\.rope\.freq_base, which decide"),
        ("qwen3", {"qwen3.attention.key_length": None}, "lacks qwen3.attention.key_length, the size"),
        ("qwen3moe", {"qwen3moe.expert_used_count": None}, "lacks qwen3moe.expert_used_count"),
        (
            "llama",
            {"llama.attention.sliding_window": 64},
            "llama.attention.sliding_window = 64 is not read; valid: 0",
        ),
        ("llama", {"llama.pooling_type": 1}, "fields of 'llama' that are not known here: pooling_type"),
        ("llama", {"llama.expert_count": 8}, "'llama' with 8 experts is not read"),
        ("llama", {"llama.rope.dimension_count": 8}, "one size that is rotated whole; .*dimension_count 8"),
        (
            "llama",
            {"llama.rope.scaling.type": "linear"},
            "scaling.type 'linear' is not read; valid: none, yarn",
        ),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "lacks rope.scaling.factor"),
        (
            "llama",
            {"llama.feed_forward_length": 95},
            r"does not fill.*wrong shape: .*gate_proj.weight is \[96, 64\]",
        ),
        ("llama", {"llama.block_count": 4}, r"does not fill the model: missing: model\.layers\.3\."),
        ("llama", {"llama.block_count": 2}, r"does not fill the model: unknown: .*model\.layers\.2\."),
        ("llama", {"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model 'llama' is not read; valid: gpt2"),
        ("llama", {"tokenizer.ggml.pre": "qwen"}, "pre-tokenizer 'qwen' is unknown; .*did you mean 'qwen2'"),
        ("llama", {"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ("llama", {"tokenizer.ggml.merges": ["a zz"]}, "vocabulary and merges do not fit"),
        ("llama", {"tokenizer.ggml.merges": ["a b c"]}, "merge 'a b c' is no pair"),
        ("llama", {"split.count": 3}, "is one of 3 parts; merge them"),
    ],
)
def test_what_is_refused(
    sources: dict[str, Path], tmp_path: Path, cache: Path, kind: str, changes: dict[str, Any], why: str
) -> None:
    def edit(fields: dict[str, Any]) -> None:
        for name, value in changes.items():
            if value is None:
                del fields[name]
                fields.pop(name.replace("key_length", "value_length"), None)
            else:
                fields[name] = value

    path = to_gguf(sources[kind], tmp_path / "m.gguf", edit=edit)
    with pytest.raises(ModelError, match=why):
        resolve_model(path)
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]


def test_tensors_that_the_model_lacks_are_listed(sources: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        del tensors["blk.1.ffn_up.weight"]
        tensors["blk.0.attn_q.bias"] = np.zeros(64, np.float32)
        tensors["blk.0.new.weight"] = np.zeros(8, np.float32)

    path = to_gguf(sources["llama"], tmp_path / "m.gguf", tensors=change)
    with pytest.raises(ModelError) as caught:
        resolve_model(path)
    text = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight;" in text
    assert "unknown: blk.0.new.weight, model.layers.0.self_attn.q_proj.bias" in text


def test_damaged_files_are_named(sources: dict[str, Path], tmp_path: Path) -> None:
    whole = to_gguf(sources["llama"], tmp_path / "c.gguf").read_bytes()
    for name, data in (
        ("cut", whole[: len(whole) // 3]),
        ("other", b"no gguf at all, but long enough for it"),
    ):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelError, match=f"{name}.gguf is damaged or not a GGUF file"):
            read_architecture(path, 16, "float32")


def test_damage_inside_is_named(sources: dict[str, Path], tmp_path: Path) -> None:
    """Texts, lengths and names that are not what was written: an error of ours, whatever reads them."""
    whole = to_gguf(sources["llama"], tmp_path / "whole.gguf").read_bytes()
    for old, new in (
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0ll\xffma"),
        (b"<|endoftext|>", b"<|\xff\xff\xfff\xfftext|>"),
        (b"blk.0.attn_q.weight", b"blk.0+attn_q+weight"),
    ):
        assert old in whole and len(old) == len(new)
        path = tmp_path / "c.gguf"
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(ModelError, match=r"c\.gguf"):
            read_architecture(path, 16, "float32")
            resolve_model(str(path))


def test_a_projection_of_another_shape_is_said(sources: dict[str, Path], tmp_path: Path) -> None:
    name = "blk.0.attn_q.weight"
    path = to_gguf(sources["llama"], tmp_path / "s.gguf", tensors=lambda t: t.update({name: t[name][:-3]}))
    with pytest.raises(ModelError, match="wrong shape: model.layers.0.self_attn.q_proj.weight"):
        resolve_model(str(path))


def test_conversion_writes_the_weights_and_holds_the_file_against_a_config(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    path, config = to_gguf(sources["llama"], tmp_path / "m.gguf"), {**LLAMA, "mlp_bias": False}
    convert(path, tmp_path, config, lambda what, done, of: seen.append((done, of)))
    before, after = (
        load_file(sources["llama"] / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert np.array_equal(values, after[name]), name
    assert json.loads((tmp_path / "config.json").read_text()) == config
    total = sum(v.nbytes for v in before.values())
    assert seen[-1] == (total, total) and len(seen) == len(before)
    with pytest.raises(ModelError, match="intermediate_size is 96, expected 95"):
        convert(path, tmp_path, {**config, "intermediate_size": 95})


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_file_computes_what_its_folder_computes(
    sources: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    found = []
    for name in (sources[kind], to_gguf(sources[kind], tmp_path / "m.gguf")):
        driver = Driver(name)
        slot = driver.add(list(range(3, 40)))
        driver.step({slot: 37})
        found.append(driver.logits[slot])
    assert np.array_equal(found[0], found[1]) and np.isfinite(found[0]).all()
