"""Layers for further tokens, against transformers' own decoder layer with what surrounds it written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bien.core.architectures.deepseek import drafting_groups
from bien.core.architectures.registry import read_architecture
from bien.core.errors import ModelError
from bien.core.executors.pools import Pool
from bien.core.executors.rows import Rows, target_layers
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.kv.groups import GroupKind
from bien.core.models.mtp import load_predicting
from bien.core.models.registry import ModelParts, load_model
from bien.core.plan import i32
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.none import NoQuantizer
from tests.core.executors.driver import Driver
from tests.core.executors.latent_models import INDEXER, SHAPE, save

LAYERS, BLOCK = 2, 8
EXTRA = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
KINDS = {
    "deepseek-v3": ("DeepseekV3", {}),
    "glm-4.7": (
        "Glm4Moe",
        {
            "head_dim": 12,
            "num_key_value_heads": 2,
            "use_qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.34},
        },
    ),
    "glm-5": ("GlmMoeDsa", {"indexer_types": ["full", "shared", "full"], **INDEXER}),
}


def write(folder: Path, kind: str) -> Any:
    """A model of one layer more than it says, the last one made a layer for further tokens; returns
    transformers' model with that layer as its last."""
    name, changes = KINDS[kind]
    save(folder, name, num_hidden_layers=LAYERS + 1, first_k_dense_replace=1, **changes)
    from transformers import AutoModelForCausalLM

    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    full.extra = {}
    torch.manual_seed(3)
    for part in EXTRA:
        shape = (48, 96) if part == "eh_proj" else (48,)
        full.extra[part] = torch.randn(shape) * 0.2 + (0 if part == "eh_proj" else 1)

    def change(tensors: dict[str, Any]) -> None:
        tensors.update({f"model.layers.{LAYERS}.{n}.weight": t for n, t in full.extra.items()})

    rewrite(folder, change)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    for field in ("indexer_types", "mlp_layer_types", "layer_types"):
        if field in config:
            config[field] = config[field][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return full


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def oracle(full: Any, tokens: list[int]) -> tuple[Any, Any]:
    """Logits of the target, and of the layer for further tokens, after every position but the last."""
    base, extra = full.model, full.extra

    def norm(x: Any, weight: Any) -> Any:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + SHAPE["rms_norm_eps"]) * weight

    entered: list[Any] = []
    hook = base.layers[LAYERS].register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    with torch.inference_mode():
        full(torch.tensor([tokens]))
        hook.remove()
        state = norm(entered[0], base.norm.weight)
        words = norm(base.embed_tokens(torch.tensor([tokens[1:]])), extra["enorm"])
        both = torch.cat([words, norm(state[:, :-1], extra["hnorm"])], -1)
        length = len(tokens) - 1
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        positions = torch.arange(length)[None]
        out = base.layers[LAYERS](
            both @ extra["eh_proj"].T,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=base.rotary_emb(both, positions),
        )
        out = norm(out[0] if isinstance(out, tuple) else out, extra["shared_head.norm"])
        return full.lm_head(state)[0], full.lm_head(out)[0]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write(folder, request.param)


@torch.inference_mode()
def test_further_tokens_are_predicted(model: tuple[Path, Any]) -> None:
    """In chunks and one by one, in blocks without order, behind the target, whose entries are its own."""
    folder, full = model
    a = read_architecture(folder, BLOCK, "float32")
    parts = ModelParts(NoQuantizer(), Single(), TorchKernels(), torch.float32, torch.device("cpu"))
    target = load_model(a, folder, parts)
    (further,) = load_predicting(a, folder, target, parts)  # type: ignore[arg-type]
    tokens = np.random.default_rng(1).integers(0, 288, 40).tolist()
    exact, ahead = oracle(full, tokens)
    groups = (*a.groups, *drafting_groups(a))
    assert [g.kind for g in groups[len(a.groups) :]] == [GroupKind.DRAFT] * len(a.groups)
    pools = tuple(Pool.allocate(g, 5, parts.device) for g in groups)
    tables = tuple((np.random.default_rng(g).permutation(5) + 1).astype(np.int32)[None] for g in range(4))
    own = len(a.groups)
    names = {g.name: own + j for j, g in enumerate(a.groups)}
    at = 0
    for count in (20, 3, *[1] * 5, 11):
        rows = Rows(
            pools,
            tables[: len(pools)],
            i32([0]),
            i32([at]),
            i32([count]),
            i32([0]),
            parts.kernels,
            parts.device,
            target_layers(pools),
        )
        hidden, _ = target.forward(torch.tensor(tokens[at : at + count]), rows)
        near(target.head(hidden), exact[at : at + count])
        state = further(
            further.first_state(hidden),
            torch.tensor(tokens[at + 1 : at + count + 1]),
            rows.redirect(own, **names),
        )
        near(further.head(state), ahead[at : at + count])
        at += count


def near(found: Any, want: Any) -> None:
    assert found.shape == want.shape
    assert (found - want).abs().max() <= 1e-4 * want.abs().max()


def test_a_folder_may_lack_them_or_have_them_whole(model: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = model
    prefix = f"model.layers.{LAYERS}."
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    prompt = [5, 6, 7]
    want = generate(tmp_path, prompt)
    table = torch.zeros(288, 48)
    copies = {f"{prefix}embed_tokens.weight": table, f"{prefix}shared_head.head.weight": table.clone()}
    rewrite(tmp_path, lambda t: t.update(copies))
    assert generate(tmp_path, prompt) == want
    rewrite(tmp_path, lambda t: t.pop(f"{prefix}hnorm.weight"))
    with pytest.raises(ModelError, match=f"missing: {prefix}hnorm.weight$"):
        Driver(tmp_path)
    rewrite(tmp_path, lambda t: [t.pop(n) for n in list(t) if n.startswith(prefix)])
    assert generate(tmp_path, prompt) == want
    a = read_architecture(tmp_path, BLOCK, "float32")
    with pytest.raises(ModelError, match="has no layers that predict further tokens"):
        load_predicting(a, tmp_path, None, ModelParts(*[None] * 3, torch.float32, torch.device("cpu")))  # type: ignore
    rewrite(tmp_path, lambda t: t.update({f"model.layers.{LAYERS + 1}.enorm.weight": torch.ones(48)}))
    with pytest.raises(ModelError, match=f"unknown: model.layers.{LAYERS + 1}.enorm.weight"):
        Driver(tmp_path)


def generate(folder: Path, prompt: list[int]) -> list[int]:
    driver = Driver(folder)
    return driver.generate(driver.add(prompt), 8)
