"""Strict reading of config.json fields, shared by the readers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from bien.core.errors import ModelError

T = TypeVar("T", int, float, str, bool)
ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


class Fields:
    """A config whose deciding fields must be there. Every complaint names model, field and value."""

    def __init__(self, config: Mapping[str, Any], model: str) -> None:
        self.config, self.model = config, model

    def need(self, name: str, kind: type[T]) -> T:
        """The field's value. ModelError when it is absent or of another type."""
        if self.config.get(name) is None:
            raise ModelError(
                f"model {self.model!r}: config.json lacks {name!r}, which decides the architecture"
            )
        value = self.config[name]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(
                f"model {self.model!r}: config.json has {name} = {value!r}; needs {kind.__name__}"
            )
        return value

    def size(self, name: str, most: int = 1 << 31) -> int:
        """A positive int, at most `most`."""
        value = self.need(name, int)
        if not 0 < value <= most:
            needs = "a positive number" if value <= 0 else f"at most {most}"
            raise ModelError(f"model {self.model!r}: config.json has {name} = {value}; needs {needs}")
        return value

    def either(self, *names: str) -> int:
        """A size under the first of these names that the config has: transformers renames fields."""
        return self.size(next((n for n in names if self.config.get(n) is not None), names[0]))

    def layers(self) -> int:
        return self.size("num_hidden_layers", 10_000)

    def count(self, name: str) -> int:
        """An int that may be zero."""
        value = self.need(name, int)
        if value < 0:
            raise ModelError(
                f"model {self.model!r}: config.json has {name} = {value}; needs a number from 0 on"
            )
        return value

    def sigmoid_mixture(self) -> tuple[int, int, int, int]:
        """(width of an expert, experts, chosen, shared) of a mixture with DeepSeek-V3's router."""
        inner, count = self.size("moe_intermediate_size"), self.either("n_routed_experts", "num_experts")
        used = self.size("num_experts_per_tok", count)
        groups = self.size("n_group", count)
        within = count // groups * self.size("topk_group", groups)
        if count % groups or (groups > 1 and count // groups < 2):
            raise ModelError(
                f"model {self.model!r}: n_group = {groups} does not part n_routed_experts = {count} into "
                "groups of two or more"
            )
        if used > within:
            raise ModelError(
                f"model {self.model!r}: num_experts_per_tok = {used}, but the topk_group groups that are "
                f"kept have {within} experts"
            )
        self.need("norm_topk_prob", bool)
        self.need("routed_scaling_factor", float)
        return inner, count, used, self.count("n_shared_experts")

    def only(self, name: str, *choices: object) -> None:
        """Refuse values that the torch module does not implement; an absent field counts as the first."""
        value = self.config.get(name, choices[0])
        if value not in choices:
            valid = ", ".join(repr(c) for c in choices)
            raise ModelError(f"model {self.model!r}: {name} = {value!r} is not supported; valid: {valid}")

    def heads(self) -> tuple[int, int, int]:
        """(heads, kv_heads, head_dim) of grouped-query attention."""
        heads, kv_heads = self.size("num_attention_heads"), self.size("num_key_value_heads")
        if heads % kv_heads:
            raise ModelError(
                f"model {self.model!r}: num_attention_heads = {heads} is no multiple of "
                f"num_key_value_heads = {kv_heads}"
            )
        dim = self.size("head_dim")
        if dim % 2:
            raise ModelError(f"model {self.model!r}: head_dim = {dim} is odd; rotary embedding needs pairs")
        return heads, kv_heads, dim


def nested_text(config: Mapping[str, Any], model: str, *model_types: str) -> dict[str, Any]:
    """`text_config` of a model that sees, with what the whole says of quantization and the end where the text
    model does not; its tensors' names begin with "language_model.". ModelError for another `model_type`."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"model {model!r}: config.json lacks 'text_config', which decides the architecture")
    Fields(text, model).need("model_type", str)
    Fields(text, model).only("model_type", *model_types)
    outer = {n: config[n] for n in ("quantization_config", "eos_token_id") if n in config}
    return {**outer, **text, "weights_prefix": "language_model."}


def rope_parameters(config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and scaling fields from either spelling (`rope_parameters`, or
    `rope_theta` and `rope_scaling`). ModelError for a missing theta or a type that is not implemented."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta"))
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    fields = Fields(rope, model)
    fields.only("rope_type", "default", "llama3", "yarn")
    rope["rope_theta"] = fields.need("rope_theta", float)
    if kind == "llama3":
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            rope[name] = fields.need(name, float)
    if kind == "yarn":
        _yarn(rope, fields)
    return rope


def rotary_dim(config: Mapping[str, Any], model: str, head_dim: int) -> int:
    """Features of a head that are rotated: `partial_rotary_factor` of them, from either spelling."""
    rope = config.get("rope_parameters") or {}
    source = rope if rope.get("partial_rotary_factor") is not None else config
    factor = Fields(source, model).need("partial_rotary_factor", float)
    dim = int(head_dim * factor)
    if not 0 < dim <= head_dim or dim % 2:
        raise ModelError(
            f"model {model!r}: partial_rotary_factor = {factor} of head_dim = {head_dim} rotates {dim} "
            f"features; needs an even number up to {head_dim}"
        )
    return dim


def _yarn(rope: dict[str, Any], fields: Fields) -> None:
    # The factor of cosines and sines, as transformers derives it where the checkpoint does not say it.
    for name in ("factor", "original_max_position_embeddings"):
        rope[name] = fields.need(name, float)
    for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", True)):
        rope[name] = usual if rope.get(name) is None else rope[name]
    if rope.get("attention_factor") is None:
        scale, over = rope.get("mscale"), rope.get("mscale_all_dim")
        ratio = (
            yarn_scale(rope["factor"], scale) / yarn_scale(rope["factor"], over) if scale and over else None
        )
        rope["attention_factor"] = ratio or yarn_scale(rope["factor"])


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    """YaRN's temperature of attention for a context `factor` times as long (Peng et al. 2023)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
