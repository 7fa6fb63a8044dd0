"""Strict reading of config.json fields, shared by the readers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from bien.core.architectures.watched import merged
from bien.core.errors import ModelError
from bien.core.kv.groups import ITEM_BYTES as ITEM_BYTES

T = TypeVar("T", int, float, str, bool)


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
        if kind is float and type(value) is int and abs(value) < 1 << 53:
            value = float(value)
        if type(value) is not kind or value in (math.inf, -math.inf) or value != value:
            raise ModelError(
                f"model {self.model!r}: config.json has {name} = {value!r}; needs {kind.__name__}"
            )
        return value

    def positive(self, name: str) -> float:
        """A number above zero."""
        value = self.need(name, float)
        if value <= 0:
            raise ModelError(f"model {self.model!r}: config.json has {name} = {value}; needs more than 0")
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
        self.aside(*names)
        found = next((n for n in names if self.config.get(n) is not None), None)
        if found is None:
            listed = " and ".join(map(repr, names))
            raise ModelError(
                f"model {self.model!r}: config.json lacks {listed}, one of which decides the architecture"
            )
        return self.size(found)

    def layers(self) -> int:
        return self.size("num_hidden_layers", 10_000)

    def count(self, name: str, most: int = 1 << 31) -> int:
        """An int that may be zero, at most `most`."""
        value = self.need(name, int)
        if not 0 <= value <= most:
            needs = "a number from 0 on" if value < 0 else f"at most {most}"
            raise ModelError(f"model {self.model!r}: config.json has {name} = {value}; needs {needs}")
        return value

    def further(self) -> int:
        """Layers that predict further tokens; none where the field is absent (a checkpoint that has them is
        then refused)."""
        name = "num_nextn_predict_layers"
        return 0 if self.config.get(name) is None else self.count(name, 100)

    def activation(self, *choices: str) -> str:
        """`hidden_act`: nothing else in a checkpoint tells it."""
        value = self.need("hidden_act", str)
        self.only("hidden_act", *choices)
        return value

    def items(self, name: str, kind: type[T]) -> list[T]:
        """A list of this kind."""
        value = self.config.get(name)
        if not isinstance(value, (list, tuple)) or not all(type(item) is kind for item in value):
            raise ModelError(
                f"model {self.model!r}: config.json has {name} = {value!r}; needs a list of {kind.__name__}"
            )
        return list(value)

    def aside(self, *names: str) -> None:
        """Fields that the reader knows, and that decide nothing beside the others of this config."""
        for name in names:
            self.config.get(name)

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
        self.positive("routed_scaling_factor")
        return inner, count, used, self.count("n_shared_experts")

    def only(self, name: str, *choices: object) -> None:
        """Refuse values that the torch module does not implement; an absent field counts as the first."""
        value = self.config.get(name, choices[0])
        if not any(type(value) is type(c) and value == c for c in choices):
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


def nested_text(config: Mapping[str, Any], model: str, *model_types: str) -> Mapping[str, Any]:
    """`text_config` of a model that sees, with what the whole says of quantization and the end where the text
    model does not; its tensors' names begin with "language_model.". ModelError for another `model_type`."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"model {model!r}: config.json lacks 'text_config', which decides the architecture")
    Fields(text, model).need("model_type", str)
    Fields(text, model).only("model_type", *model_types)
    outer = {n: config[n] for n in ("quantization_config", "eos_token_id") if n in config and n not in text}
    return merged(text, {**outer, "weights_prefix": "language_model."})


def rope_parameters(config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and scaling fields from either spelling (`rope_parameters`, or
    `rope_theta` and `rope_scaling`). ModelError for a missing theta or a type that is not implemented."""
    given = next((n for n in ("rope_parameters", "rope_scaling") if config.get(n) is not None), None)
    found = config[given] if given else {}
    if not isinstance(found, Mapping):
        raise ModelError(f"model {model!r}: config.json has {given} = {found!r}; needs an object")
    own = Fields(found, model)
    kind = found.get("type") if found.get("rope_type") is None else found["rope_type"]
    if kind is None:
        if given == "rope_scaling":
            own.need("rope_type", str)  # what is scaled, and how, is not to be guessed
        kind = "default"
    if found.get("rope_theta") is None:
        found = merged(found, {"rope_theta": config.get("rope_theta")})
    fields = Fields(merged(found, {"rope_type": kind}), model)
    fields.only("rope_type", "default", "llama3", "yarn", "linear")
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": fields.positive("rope_theta")}
    if kind == "linear":
        rope["factor"] = fields.positive("factor")
    if kind == "llama3":
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            rope[name] = fields.positive(name)
        if rope["high_freq_factor"] <= rope["low_freq_factor"]:
            raise ModelError(
                f"model {model!r}: config.json has high_freq_factor = {rope['high_freq_factor']}; needs more "
                f"than low_freq_factor = {rope['low_freq_factor']}"
            )
    if kind == "yarn":
        _yarn(rope, fields)
    return rope


def rotary_dim(config: Mapping[str, Any], model: str, head_dim: int) -> int:
    """Features of a head that are rotated: `partial_rotary_factor` of them, from either spelling."""
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"model {model!r}: config.json has rope_parameters = {rope!r}; needs an object")
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
    given = fields.config
    for name in ("factor", "original_max_position_embeddings"):
        rope[name] = fields.positive(name)
    for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        rope[name] = usual if given.get(name) is None else fields.positive(name)
    rope["truncate"] = True if given.get("truncate") is None else fields.need("truncate", bool)
    for name in ("mscale", "mscale_all_dim", "attention_factor"):
        if given.get(name) is not None:
            rope[name] = fields.need(name, float)
    if rope.get("attention_factor") is None:
        scale, over = rope.get("mscale"), rope.get("mscale_all_dim")
        ratio = (
            yarn_scale(rope["factor"], scale) / yarn_scale(rope["factor"], over) if scale and over else None
        )
        rope["attention_factor"] = ratio or yarn_scale(rope["factor"])


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    """YaRN's temperature of attention for a context `factor` times as long (Peng et al. 2023)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
