"""Config reading: exact shapes, no guesses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bien.core.architectures.builtin import SMOLLM2
from bien.core.architectures.registry import read_architecture
from bien.core.errors import ModelError, UserError
from bien.core.kv.groups import GroupKind
from bien.core.testing.toy import toy_config


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_builtin_needs_no_files() -> None:
    a = read_architecture(SMOLLM2, 16, "float32")
    assert (a.name, a.layers, a.hidden_size, a.heads, a.kv_heads, a.head_dim) == ("llama", 30, 576, 9, 3, 64)
    assert a.parameters == 134_515_008
    assert a.eos_token_ids == (2,)
    (group,) = a.groups
    assert (group.kind, group.bytes_per_token, group.block_bytes) == (GroupKind.FULL, 46080, 46080 * 16)
    assert read_architecture(SMOLLM2, 16, "bfloat16", 1000).max_context == 1000


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_parameters_are_counted(kind: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    from bien.core.testing.toy import write_toy

    for name, changes in (("plain", {}), ("biased", {"attention_bias": True})):
        folder = write_toy(tmp_path / name, kind, **changes)
        total = sum(t.size for t in load_file(folder / "model.safetensors").values())
        assert read_architecture(folder, 16, "float32").parameters == total


def test_sliding_layers_form_a_group_of_their_own(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    config = toy_config("qwen3", layer_types=types, sliding_window=32, use_sliding_window=True)
    full, window = read_architecture(write(tmp_path, config), 16, "float64").groups
    assert (full.layers, full.window, window.layers, window.window) == ((0,), 0, (1, 2), 32)
    assert full.bytes_per_token * 2 == window.bytes_per_token == 2 * 2 * 2 * 12 * 8


REQUIRED = {
    "llama": [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
        "tie_word_embeddings",
    ],
    "qwen3": ["head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings"],
}


@pytest.mark.parametrize(("kind", "field"), [(k, f) for k, fields in REQUIRED.items() for f in fields])
def test_a_missing_deciding_field_is_named(kind: str, field: str, tmp_path: Path) -> None:
    config = toy_config(kind)
    del config[field]
    with pytest.raises(ModelError, match=f"lacks '{field}'"):
        read_architecture(write(tmp_path, config), 16, "float32")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; valid: 'silu'"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"hidden_size": "48"}, "hidden_size = '48'; needs int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; needs at most 10000"),
        ({"num_key_value_heads": 4}, "no multiple"),
        ({"head_dim": 9}, "head_dim = 9 is odd"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type = 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks 'low_freq_factor'"),
        ({"layer_types": ["sliding_attention"] * 3}, "lacks 'sliding_window'"),
        ({"layer_types": ["full_attention"]}, "layer_types = 1"),
        ({"use_sliding_window": True}, "lacks 'layer_types'"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=match):
        read_architecture(write(tmp_path, toy_config(**changes)), 16, "float32")


def test_bad_arguments(tmp_path: Path) -> None:
    write(tmp_path, toy_config())
    for arguments, match in (
        ((tmp_path, 16, "float23"), "did you mean 'float32'"),
        ((tmp_path, 0, "float32"), "block_tokens is 0"),
        ((tmp_path, 16, "float32", 1025), "1 to 1024"),
        ((tmp_path, 16, "float32", 0), "1 to 1024"),
    ):
        with pytest.raises(UserError, match=match):
            read_architecture(*arguments)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        read_architecture("smollm2-135", 16, "float32")
    with pytest.raises(ModelError, match="has no config.json"):
        read_architecture(tmp_path, 16, "float32")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_architecture(tmp_path, 16, "float32")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="needs an object"):
        read_architecture(tmp_path, 16, "float32")


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    write(tmp_path, toy_config(eos_token_id=2))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_architecture(tmp_path, 16, "float32").eos_token_ids == (7, 9)


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys; from bien.core.architectures.registry import read_architecture; "
        "import bien.core.models.fetch, bien.core.testing.toy; "
        "read_architecture('smollm2-135m', 16, 'float32'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
