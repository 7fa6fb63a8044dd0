"""What published tables call models, accelerators and formats, in the names that bien knows."""

from __future__ import annotations

import re
from functools import cache

from bien.core.architectures.base import Architecture
from bien.core.architectures.registry import read_architecture
from bien.core.costs.formats import Formats
from bien.core.costs.machine import Machine, load_machine
from bien.core.costs.shapes import load_shape, shapes

# The first pattern that is found in the lower-case name decides.
MODELS = (
    (r"deepseek-v3\.2", "deepseek-v3.2"),
    (r"deepseek-(r1|v3)(?!-?distill|.*distill)", "deepseek-v3"),
    (r"kimi-k2", "kimi-k2"),
    (r"kimi-k3", "kimi-k3"),
    (r"glm-5\.[2-9]", "glm-5.3"),
    (r"glm-5", "glm-5.1"),
    (r"glm-4\.7(?!-flash)", "glm-4.7"),
    (r"gpt-oss-120b", "gpt-oss-120b"),
    (r"llama-3\.[13]-70b", "llama-3.1-70b"),
    (r"llama-3\.1-8b", "llama-3.1-8b"),
    (r"qwen3-32b", "qwen3-32b"),
    (r"qwen3-235b", "qwen3-235b"),
    (r"qwen3-coder-480b", "qwen3-coder-480b"),
    (r"qwen3\.5-397b", "qwen3.5-397b"),
    (r"minimax-m2(?!\d)", "minimax-m2.5"),
)
MACHINES = (
    (r"^gb200", "gb200-nvl72"),
    (r"^gb300", "gb300-nvl72"),
    (r"^b200", "b200"),
    (r"^b300", "b300"),
    (r"^h200", "h200"),
    (r"^h100", "h100"),
    (r"^mi355x", "mi355x"),
)
STAND_IN_MODEL, STAND_IN_MACHINE = "llama-3.1-70b", "h200"
"""Whose costs stand for those of what is unknown: only good beneath a calibration."""


def model_name(text: str) -> str | None:
    return _first(MODELS, text)


def machine_name(text: str) -> str | None:
    return _first(MACHINES, text)


@cache
def architecture(name: str) -> Architecture:
    """Of a known config, or of a shape that only has costs."""
    if name in shapes():
        return load_shape(name).architecture(name, 64, "bfloat16")
    return read_architecture(name, 64, "bfloat16")


@cache
def machine(name: str) -> Machine:
    return load_machine(name)


def formats(model: str, precision: str) -> Formats:
    """What "fp8", "fp4" and the like mean for a model. Caches are in FP8 where weights are narrow."""
    text = precision.lower()
    kv = "fp8" if "fp8" in text or "fp4" in text else "bf16"
    if model == "gpt-oss-120b":
        return Formats("bf16", "fp4", kv)  # its experts are published in MXFP4 and in nothing else
    mixture = any(w.role == "routed" for w in architecture(model).weights)
    if "fp4" in text:
        return Formats("fp8", "fp4", kv) if mixture else Formats("fp4", "", kv)
    if "fp8" in text:
        return Formats("fp8", "", kv)
    if "int4" in text:
        return Formats("bf16", "int4", kv) if mixture else Formats("int4", "", kv)
    if "unstated" in text and mixture:
        return Formats("fp8", "", kv)
    return Formats("bf16", "", kv)


def _first(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    found = (name for pattern, name in table if re.search(pattern, text.lower()))
    return next(found, None)
