"""The estimate before workers start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bien.core.compose import Composition, compose
from bien.core.deployment import parse_deployment
from bien.core.errors import ResourceError
from bien.core.plugins import PluginManager
from bien.core.testing.toy import write_toy
from bien.core.worker.memory import check_memory


def composed(model: Path | str, **pool: Any) -> Composition:
    raw = {"model": {"name": str(model)}, "pool": [{"kv_tokens": 1600, **pool}]}
    return compose(parse_deployment(raw), PluginManager.load(""))


def needed(composition: Composition) -> int:
    """The least memory that is enough, to the byte."""
    low, high = 0, 1 << 50
    while low < high:
        middle = (low + high) // 2
        try:
            check_memory(composition, composition.model, middle)
            high = middle
        except ResourceError:
            low = middle + 1
    return low


def test_each_worker_has_weights_and_kv_of_its_own(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    # Float32 in the file as in memory, but for the file's header; 3 layers, K and V of 2 heads of 8.
    one = needed(composed(toy))
    kv = (1600 + 16) * 3 * 2 * 2 * 8 * 4
    size = (toy / "model.safetensors").stat().st_size
    assert size - 5000 < one - kv < size
    assert needed(composed(toy, count=3)) == 3 * one
    assert needed(composed(toy, kv_tokens=3200)) == one + 1600 * 3 * 2 * 2 * 8 * 4
    assert (needed(composed(toy, quantizer="int8")) - kv) * 8 == one - kv, "half a byte instead of four"


def test_the_numbers_and_what_to_lower_are_said() -> None:
    composition = composed("smollm2-135m", count=50, kv_tokens=16_000)
    said = (
        r"need 63,\d{3} MB of memory at least \(pool 'main': 50 x \(539 MB of weights \+ 739 MB of KV\)\), "
        r"8,000 MB are available; lower count, kv_tokens"
    )
    with pytest.raises(ResourceError, match=said):
        check_memory(composition, composition.model, 8_000_000_000)


@pytest.mark.parametrize("pool", [{"device": "cuda"}, {"executor": "simulated"}])
def test_what_does_not_take_this_machines_memory_is_not_counted(pool: dict[str, Any]) -> None:
    assert needed(composed("smollm2-135m", count=1000, **pool)) == 0
