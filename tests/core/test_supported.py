"""What is said of the parts that can run a model."""

from __future__ import annotations

import msgspec

from bien.core.architectures.registry import read_architecture
from bien.core.plugins import PluginManager
from bien.core.supported import supported


def test_an_architecture_without_a_module_is_simulated_only() -> None:
    known = read_architecture("llama-3.1-8b", 16, "bfloat16")
    about = supported(msgspec.structs.replace(known, name="zebra"), 16, PluginManager.load(only=""))
    assert "torch" not in about["executor"] and "simulated" in about["executor"] and about["weights"] == []
    assert "no torch module for architecture 'zebra'" in about["refused"]["executor torch"]
    assert about["parallel"]["tensor"] == [1]  # which layers it may cut is not guessed
    about = supported(known, 16, PluginManager.load(only=""))
    assert list(about["refused"]) == ["speculator mtp"]  # it has no layers for further tokens
    assert {"eagle3", "dspark", "draft-model", "suffix"} <= set(about["speculator"])
