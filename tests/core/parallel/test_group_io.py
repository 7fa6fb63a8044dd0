"""Blocks of several ranks look as those of one, and go back to where each rank keeps its heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bien.core.errors import ExecutorDiedError, ResourceError
from bien.core.executors.group import GroupExecutor
from bien.core.executors.pools import HostBlocks
from bien.core.testing.torch_harness import TorchHarness
from bien.core.testing.toy import write_toy
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from tests.core.parallel.test_group_exactness import group_harness
from tests.core.test_exactness import harness


def filled(h: TorchHarness) -> TorchHarness:
    h.submit("x", list(range(3, 60)), max_tokens=9)
    h.run()
    return h


@pytest.mark.parametrize(
    ("kind", "kv_heads", "world"),
    [("llama", 2, 2), ("llama", 3, 2), ("llama", 1, 3), ("hybrid", 2, 2)],
)
def test_blocks_are_those_of_one_rank(kind: str, kv_heads: int, world: int, tmp_path: Path) -> None:
    heads = {"num_key_value_heads": kv_heads}
    write = write_tiny_hybrid if kind == "hybrid" else write_toy
    folder = write(tmp_path / "model", **heads)
    one, many = filled(harness(folder)), filled(group_harness(folder, world))
    for g, group in enumerate(one.groups):
        blocks = [1, 2, 5]
        found = many.executor.io.read(g, blocks)
        want = one.executor.io.read(g, blocks)
        assert found.nbytes == want.nbytes == group.block_bytes * len(blocks)
        assert float(want.data.abs().max()) > 0.1
        assert torch.allclose(found.data, want.data, rtol=1e-9, atol=1e-9)
        other = HostBlocks(torch.randn_like(want.data))
        many.executor.io.write(g, [9, 3, 11], other)
        assert torch.equal(many.executor.io.read(g, [9, 3, 11]).data, other.data)
        assert torch.equal(many.executor.io.read(g, [3]).data, other.data[:, 1:2])
        assert torch.equal(many.executor.io.read(g, [5]).data, found.data[:, 2:])
        with pytest.raises(ValueError, match="needs what read returned"):
            many.executor.io.write(g, [1], other)
    many.executor.close()


def test_ranks_hold_their_heads_only(tmp_path: Path) -> None:
    h = group_harness(write_toy(tmp_path / "model", num_key_value_heads=3), 2)
    group: GroupExecutor = h.executor
    (whole,) = group.groups
    assert group.local.pools[0].data.nbytes * 3 == whole.block_bytes * 65, "one of three heads"
    assert group.local.model.embedding.shape[0] == 144
    group.close()


def test_pools_that_do_not_fit_all_ranks_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them alone would."""
    h = group_harness(write_toy(tmp_path / "model"), 2)
    group: GroupExecutor = h.executor
    need = 101 * group.groups[0].block_bytes
    monkeypatch.setattr("bien.core.executors.group.available_bytes", lambda device: need - 1)
    with pytest.raises(ResourceError, match=f"of 2 ranks on this machine need {need:,} bytes"):
        group.allocate((100,), 4, 256)
    group._remotes[0].host = "elsewhere"
    group.allocate((100,), 4, 256)
    group.close()


def test_blocks_of_a_rank_that_is_gone(tmp_path: Path) -> None:
    h = group_harness(write_toy(tmp_path / "model"), 2)
    h.executor.close()
    with pytest.raises(ExecutorDiedError, match="rank 1 is gone"):
        h.executor.io.write(0, [1], HostBlocks(torch.zeros(3, 1, 8, 32, dtype=torch.float64)))
