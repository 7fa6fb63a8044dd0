"""Strict reading of configs: every field of a known one is needed, checked, or known to decide nothing; what
nothing reads is listed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from bien.core.architectures.builtin import config, known
from bien.core.architectures.registry import known_models, read_architecture
from bien.core.architectures.watched import SILENT, Watched, merged, plain, unread
from bien.core.errors import BienError, ModelError

JUNK: list[Any] = [None, "x", -1, 0, 1.5, True, [], {}, [1], ["a"], float("inf"), 10**30, {"a": 1}]
# May be absent: what the architecture has in every published model, or what the checkpoint's tensors tell.
IMPLIED = {
    "attention_bias",
    "head_dim",  # of the Llama shape, which implies it
    "index_topk_pattern",
    "indexer_rope_interleave",
    "mlp_bias",
    "mlp_layer_types",  # first_k_dense_replace says the same
    "first_k_dense_replace",  # mlp_layer_types says the same
    "intermediate_size",  # where no layer is dense
    "mlp_only_layers",
    "moe_layer_freq",
    "moe_router_dtype",
    "num_key_value_heads",  # of latent attention: as many as heads
    "num_nextn_predict_layers",
    "qk_head_dim",
    "rope_interleave",
    "rope_parameters.rope_type",
    "rope_scaling",
    "scoring_func",
    "swiglu_alpha",
    "topk_method",
    "use_grouped_topk",
    "use_sliding_window",
    "index_share_for_mtp_iteration",
    "eos_token_id",  # generation_config.json has it
    *(f"rope_scaling.{n}" for n in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
}


def read(folder: Path, fields: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_architecture(folder, 16, "bfloat16")


def paths(fields: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


def holder(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path[:-1]:
        fields = fields[name]
    return fields


def short(fields: dict[str, Any]) -> dict[str, Any]:
    """The same with few layers: these tests read it hundreds of times."""
    own = fields.get("text_config", fields)
    whole, few = own["num_hidden_layers"], 8
    own["num_hidden_layers"] = few
    for name, value in own.items():
        if isinstance(value, list) and len(value) == whole:
            own[name] = value[:few]
    for name, value in own.get("linear_attn_config", {}).items():
        if isinstance(value, list):
            own["linear_attn_config"][name] = [i for i in value if i <= few]
    return fields


@pytest.mark.parametrize("name", known())
def test_a_field_that_is_dropped_is_missed(name: str, tmp_path: Path) -> None:
    fields = short(config(name))
    read(tmp_path, fields)
    unnoticed = []
    for path in paths(fields):
        changed = deepcopy(fields)
        del holder(changed, path)[path[-1]]
        what = ".".join(path).removeprefix("text_config.")
        try:
            read(tmp_path, changed)
        except ModelError as error:
            assert path[-1] in str(error) or what.startswith(("text_config", "rope")), str(error)
        else:
            unnoticed.append(what)
    asides = {
        "kimi-linear-48b": {"rope_theta", "head_dim"},  # nothing is rotated there
        "glm-5.1": {"index_topk_freq"},  # 1, as of GLM-5, whose config says nothing of a schedule
    }.get(name, set())
    first = {"rope_scaling.type", "rope_scaling.rope_type"}
    assert not {*unnoticed} & first
    assert {*unnoticed} <= IMPLIED | SILENT | asides


@pytest.mark.parametrize("name", known())
def test_values_that_cannot_be_are_refused_as_such(name: str, tmp_path: Path) -> None:
    """Whatever stands in a field: it is read, or there is an error of ours that says what is wrong."""
    fields = short(config(name))
    for path in paths(fields):
        for junk in JUNK:
            changed = deepcopy(fields)
            holder(changed, path)[path[-1]] = junk
            try:
                read(tmp_path, changed)
            except BienError as error:
                assert name in str(error) or str(tmp_path) in str(error)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("llama-3.1-8b", {"rms_norm_eps": 0}, "rms_norm_eps = 0.0; needs more than 0"),
        ("llama-3.1-8b", {"rms_norm_eps": float("inf")}, "rms_norm_eps = inf; needs float"),
        ("llama-3.1-8b", {"rope_theta": -5e5}, "rope_theta = -500000.0; needs more than 0"),
        ("llama-3.1-8b", {"rope_scaling": {"factor": 2.0}}, "lacks 'rope_type'"),
        ("llama-3.1-8b", {"rope_scaling": [1]}, r"rope_scaling = \[1\]; needs an object"),
        ("llama-3.1-8b", {"head_dim": 0}, "head_dim = 0"),
        ("llama-3.1-8b", {"attention_bias": 0}, "attention_bias = 0 is not supported; valid: False, True"),
        ("llama-3.1-8b", {"eos_token_id": -1}, "eos_token_id = -1"),
        ("qwen3-coder-480b", {"num_experts_per_tok": 161}, "num_experts_per_tok = 161; needs at most 160"),
        ("qwen3-coder-480b", {"mlp_only_layers": True}, "mlp_only_layers = True; needs a list of int"),
        ("qwen3-coder-480b", {"use_sliding_window": "no"}, "use_sliding_window = 'no'; needs bool"),
        ("gpt-oss-120b", {"layer_types": 3}, "layer_types = 3; needs a list of str"),
        ("gpt-oss-120b", {"swiglu_limit": -7.0}, "swiglu_limit = -7.0; needs more than 0"),
        ("glm-5.3", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers = 1000000000; needs at m"),
        ("glm-5.3", {"index_topk_freq": None}, "lacks 'index_topk_freq'"),
        ("glm-5.3", {"qk_head_dim": 192}, "qk_head_dim = 192 is not supported; valid: 256"),
        ("glm-5.3", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype = 'bfloat16'"),
        ("deepseek-v3", {"routed_scaling_factor": 0.0}, "routed_scaling_factor = 0.0; needs more than 0"),
    ],
)
def test_what_is_wrong_is_said(name: str, changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=match):
        read(tmp_path, config(name) | changes)


def test_fields_that_nothing_reads_are_listed(tmp_path: Path) -> None:
    for name in known_models():
        assert read_architecture(name, 16, "bfloat16").unread == (), name
    fields = config("deepseek-v3") | {"depth_gain": 2, "use_cache": True, "absent": None}
    fields["rope_scaling"] = fields["rope_scaling"] | {"twist": 1}
    assert read(tmp_path, fields).unread == ("depth_gain", "rope_scaling.twist")
    fields = config("kimi-k3")
    fields |= {"vision_config": {"depth": 3}}
    fields["text_config"] |= {"gain": 2}
    fields["text_config"]["linear_attn_config"] |= {"decay": 1}
    listed = ("text_config.gain", "text_config.linear_attn_config.decay", "vision_config")
    assert read(tmp_path, fields).unread == listed


def test_spellings_that_say_it_twice_are_known(tmp_path: Path) -> None:
    twice = config("gpt-oss-120b") | {"experts_per_token": 4, "num_experts": 128}
    assert read(tmp_path, twice).unread == ()
    with pytest.raises(ModelError, match="experts_per_token = 5 is not supported; valid: 4"):
        read(tmp_path, twice | {"experts_per_token": 5})
    flags = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "sliding_window": None}
    assert read(tmp_path, config("qwen3-coder-480b") | flags).unread == ()
    with pytest.raises(ModelError, match="shared_expert_intermediate_size = 64"):
        read(tmp_path, config("qwen3-coder-480b") | {"shared_expert_intermediate_size": 64})
    both = config("kimi-linear-48b") | {"model_max_length": 4096, "max_position_embeddings": 4096}
    assert read(tmp_path, both).unread == ()


def test_loading_lists_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from bien.core.providers import Context
    from bien.core.testing.toy import write_toy
    from bien.plugins.executors.torch import make
    from bien.plugins.parallel.single import Single
    from bien.plugins.quantizers.none import NoQuantizer

    folder = write_toy(tmp_path / "toy", "llama", depth_gain=2)
    ctx = Context(architecture=read_architecture(folder, 16, "float32"))
    ctx.parts = {"quantizer": NoQuantizer(), "parallel": Single()}
    with caplog.at_level(logging.WARNING):
        make(None, ctx).close()  # type: ignore[arg-type]
    assert "does not read fields of its config.json: depth_gain" in caplog.text


def test_a_watched_config_notes_what_is_asked_for() -> None:
    given = {"a": {"b": 1, "c": 2}, "d": [{"e": 3}], "f": 4, "g": None}
    watched = Watched(given)
    assert watched.get("h", 5) == 5 and watched["a"]["b"] == 1
    assert unread(given, watched.seen) == ("a.c", "d", "f")
    assert merged(watched, {"i": 6})["f"] == 4 and unread(given, watched.seen) == ("a.c", "d")
    assert plain({"a": watched}) == {"a": given} and type(plain(watched)) is dict
    assert merged({"a": 1}, {"a": 2}) == {"a": 2}
