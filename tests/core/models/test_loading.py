"""Strict loading: a folder fills the model exactly, or says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from bien.core.errors import ModelError, ResourceError
from bien.core.models.loading import Checkpoint
from bien.core.testing.toy import write_toy
from tests.core.executors.driver import Driver

Q = "model.layers.1.self_attn.q_proj.weight"


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop(name: str) -> Any:
    return lambda t: t.pop(name)


def put(name: str, *shape: int, dtype: Any = np.float32) -> Any:
    return lambda t: t.__setitem__(name, np.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (drop(Q), rf"missing: {Q}$"),
        (put("model.layers.3.mlp.up_proj.weight", 80, 48), "unknown: model.layers.3.mlp.up_proj.weight"),
        (put(Q, 48, 47), rf"wrong shape: {Q} is \[48, 47\], config says \[48, 48\]"),
        (put(Q, 48, 48, dtype=np.int32), f"wrong type: {Q} is I32, valid are F64, F32, F16, BF16"),
    ],
)
def test_tensors_that_do_not_fit(change: Any, match: str, tmp_path: Path) -> None:
    rewrite(write_toy(tmp_path), change)
    with pytest.raises(ModelError, match=match):
        Driver(tmp_path)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    rewrite(write_toy(tmp_path), lambda t: (drop(Q)(t), put("odd", 3)(t), put("model.norm.weight", 2)(t)))
    with pytest.raises(ModelError, match="missing: .*; unknown: odd; wrong shape: model.norm.weight"):
        Driver(tmp_path)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    rewrite(write_toy(tmp_path), lambda t: [t.pop(n) for n in list(t) if "layers.1" in n])
    with pytest.raises(ModelError, match="and 1 more$"):
        Driver(tmp_path)


def test_known_extras_are_ignored(tmp_path: Path) -> None:
    """A tied head that was saved all the same, and buffers of old checkpoints."""
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(write_toy(tmp_path), lambda t: (put("lm_head.weight", 288, 48)(t), put(buffer, 4)(t)))
    driver = Driver(tmp_path)
    assert len(driver.generate(driver.add([5, 6, 7]), 4)) == 4


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    rewrite(write_toy(tmp_path, tie_word_embeddings=False), drop("lm_head.weight"))
    with pytest.raises(ModelError, match="missing: lm_head.weight"):
        Driver(tmp_path)


def test_shards(tmp_path: Path) -> None:
    whole = write_toy(tmp_path / "whole")
    parts = write_toy(tmp_path / "parts")
    tensors = load_file(parts / "model.safetensors")
    (parts / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {n: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, parts / file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (parts / "model.safetensors.index.json").write_text(index)
    texts = []
    for folder in (whole, parts):
        driver = Driver(folder)
        texts.append(driver.generate(driver.add([9, 8, 7, 6]), 12))
    assert texts[0] == texts[1]
    (parts / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks shards: model-00002-of-00002.safetensors"):
        Driver(parts)
    (parts / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        Driver(parts)


def test_damaged_files(tmp_path: Path) -> None:
    path = write_toy(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged or not a safetensors file"):
        Driver(tmp_path)
    path.unlink()
    with pytest.raises(ModelError, match="has neither model.safetensors nor"):
        Driver(tmp_path)


def test_tensors_are_mapped_not_copied(tmp_path: Path) -> None:
    """Workers share the pages of what they use as it is, the embedding first of all."""
    write_toy(tmp_path)
    with Checkpoint.open(tmp_path, torch.float32, torch.device("cpu")) as checkpoint:
        tensor = checkpoint.take("model.embed_tokens.weight")
        address = tensor.data_ptr()
        inside = [
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if str(tmp_path) in line and _within(address, line.split()[0])
        ]
    assert inside
    values = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensor, torch.from_numpy(values))


def _within(address: int, span: str) -> bool:
    first, last = (int(x, 16) for x in span.split("-"))
    return first <= address < last


def test_the_quantizer_must_read_the_checkpoint(tmp_path: Path) -> None:
    write_toy(tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelError, match="'awq'"):
        Driver(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_half_precision_is_near(kind: str, tmp_path: Path) -> None:
    write_toy(tmp_path, kind)
    logits = []
    for dtype in ("float32", "bfloat16"):
        driver = Driver(tmp_path, dtype=dtype)
        slot = driver.add(list(range(3, 60)))
        driver.step({slot: 30})
        driver.step({slot: 27})
        logits.append(driver.logits[slot][0])
        driver.step({slot: 1})
    error = np.linalg.norm(logits[0] - logits[1]) / np.linalg.norm(logits[0])
    assert error < 0.05


def test_memory_that_lacks_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, framework: str) -> None:
        raise RuntimeError(f"unable to mmap 538090408 bytes from file <{path}>: Cannot allocate memory (12)")

    monkeypatch.setattr("bien.core.models.loading.safe_open", refuse)
    with pytest.raises(ResourceError, match="not enough memory for its weights: unable to mmap"):
        Checkpoint.open(write_toy(tmp_path), torch.float32, torch.device("cpu"))
