"""`bien model inspect` and `list`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bien.core.architectures.inspect import describe
from bien.core.architectures.registry import known_models, read_architecture
from bien.core.testing.toy import write_toy
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from bien.replay.cli import make_app

# Published counts: total and active parameters (the embedding counted), KV bytes per token in bfloat16.
COUNTS = {
    "llama-3.1-8b": (8.03e9, 8.03e9, 131_072),
    "llama-3.1-70b": (70.55e9, 70.55e9, 327_680),
    "qwen3-coder-480b": (480.15e9, 35.47e9, 253_952),
    "glm-4.7": (352.8e9, 33.6e9, 376_832),
    "glm-5.1": (743.91e9, 41.78e9, 109_824),
    "glm-5.3": (743.38e9, 41.25e9, 95_232),
    "deepseek-v3": (671.03e9, 37.55e9, 70_272),
    "deepseek-v3.2": (671.88e9, 38.4e9, 85_888),
    "kimi-k2": (1026.41e9, 32.86e9, 70_272),
    "kimi-linear-48b": (49.12e9, 3.484e9, 8_064),
    "kimi-k3": (2779.5e9, 105.36e9, 27_648),
    "gpt-oss-120b": (116.83e9, 5.71e9, 36_864),
    "smollm2-135m": (134.515e6, 134.515e6, 23_040),
}


def inspect(*arguments: str) -> dict:
    done = CliRunner().invoke(make_app(), ["model", "inspect", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_known_models(name: str) -> None:
    total, active, kv = COUNTS[name]
    about = inspect(name)
    assert about["parameters"]["total"] == pytest.approx(total, rel=1e-3)
    assert about["parameters"]["active"] == pytest.approx(active, rel=1e-3)
    assert about["kv_bytes_per_token"] == kv
    further = about["weight_bytes"].pop("mtp", 0)  # layers for further tokens, counted apart
    assert sum(about["weight_bytes"].values()) == 2 * about["parameters"]["total"]
    assert bool(further) is (name in ("glm-4.7", "glm-5.1", "glm-5.3", "deepseek-v3", "deepseek-v3.2"))


def test_constants_of_models_with_states_and_windows() -> None:
    """What a sequence holds whatever its length: states in float32, convolutions, windows."""
    k3 = inspect("kimi-k3")
    assert k3["parameters"]["active_without_embedding"] == pytest.approx(104.2e9, rel=1e-3)
    constant = {g["name"]: g["constant_bytes"] for g in k3["groups"]}
    assert constant["state"] == pytest.approx(434.1e6, rel=1e-3)
    assert k3["kv_constant_bytes"] == pytest.approx(434.1e6 + 15.3e6, rel=1e-3)
    assert inspect("gpt-oss-120b")["kv_constant_bytes"] == pytest.approx(4.7e6, rel=1e-2)


def test_flops_grow_with_the_context() -> None:
    about = inspect("llama-3.1-8b")
    # Two per parameter of the products, four per head, feature and position of attention.
    assert about["flops"]["linear"] == pytest.approx(15.0e9, rel=1e-2)
    assert about["flops"]["per_token"]["100000"] - about["flops"]["linear"] == 32 * 4 * 32 * 128 * 100_000


def test_a_folder_with_windows_and_states(tmp_path: Path) -> None:
    folder = write_tiny_hybrid(tmp_path / "model")
    about = inspect(str(folder), "--dtype", "float32")
    window, state = (next(g for g in about["groups"] if g["kind"] == k) for k in ("window", "state"))
    assert window["constant_bytes"] == 24 * window["bytes_per_token"]
    assert about["kv_constant_bytes"] == window["constant_bytes"] + state["constant_bytes"]
    full = next(g for g in about["groups"] if g["kind"] == "full")
    assert about["kv_bytes_per_token"] == full["bytes_per_token"]


@pytest.mark.parametrize("name", known_models())
def test_every_known_model_is_shown(name: str) -> None:
    shown = CliRunner().invoke(make_app(), ["model", "inspect", name])
    assert shown.exit_code == 0 and f"{name}: " in shown.output
    listed = CliRunner().invoke(make_app(), ["model", "list"])
    assert name in listed.output.split()


def test_parameters_are_those_of_the_files(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    folder = write_toy(tmp_path / "toy", "qwen3")
    stored = load_file(folder / "model.safetensors")
    a = read_architecture(folder, 16, "float32")
    about = describe(a, "float32")
    assert about["parameters"]["total"] == sum(t.size for t in stored.values())
    assert sum(about["weight_bytes"].values()) == sum(t.nbytes for t in stored.values())


def test_what_runs_a_model_is_said(tmp_path: Path) -> None:
    llama, glm = inspect("llama-3.1-8b")["supported"], inspect("glm-5.3")["supported"]
    assert {"torch", "simulated"} <= {*llama["executor"]} and {"torch", "simulated"} <= {*glm["executor"]}
    assert {"none", "int8", "int4"} <= {*glm["quantizer"]} and {"torch", "native"} <= {*glm["kernels"]}
    assert llama["parallel"] == {"single": [1], "tensor": [1, 2, 4, 8, 16]}
    assert glm["parallel"] == {"single": [1], "tensor": [1]}
    assert "early-exit" in llama["speculator"] and "early-exit" not in glm["speculator"]
    assert "mtp" in glm["speculator"] and "mtp" not in llama["speculator"]
    assert "not full attention" in glm["refused"]["speculator early-exit"]
    assert {"safetensors", "fp8", "gguf"} <= {*llama["weights"]} and "gguf" not in glm["weights"]
    shown = CliRunner().invoke(make_app(), ["model", "inspect", "glm-5.3"]).output
    assert "tensor (1 devices)" in shown and "early-exit: " in shown


def test_fields_that_nothing_reads_are_shown(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy", "llama", depth_gain=2)
    assert inspect(str(folder))["unread_fields"] == ["depth_gain"]
    assert "depth_gain" in CliRunner().invoke(make_app(), ["model", "inspect", str(folder)]).output


def test_inspecting_needs_no_torch() -> None:
    code = (
        "import sys; from bien.replay.cli import make_app; from typer.testing import CliRunner; "
        "done = CliRunner().invoke(make_app(), ['model', 'inspect', 'kimi-k3', '--json']); "
        "sys.exit(done.exit_code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_and_dtype(tmp_path: Path) -> None:
    for arguments, text in (
        (["lama-3.1-8b"], "llama-3.1-8b"),
        (["smollm2-135m", "--dtype", "int3"], "bfloat16"),
        ([str(tmp_path)], "config.json"),
    ):
        done = CliRunner().invoke(make_app(), ["model", "inspect", *arguments])
        assert done.exit_code != 0 and text in str(done.exception)
