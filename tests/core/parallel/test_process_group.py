"""Collectives over gloo, between threads: groups are not bound to processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined,unused-ignore]

from bien.core.errors import CollectiveError
from bien.core.executors.process_group import ProcessGroup

CPU = torch.device("cpu")


def together(
    folder: Path, world: int, work: Callable[[ProcessGroup], Any], seconds: float = 20.0
) -> list[Any]:
    """What `work` returns or raises, on each rank."""

    def one(rank: int) -> Any:
        store = FileStore(str(folder / "store"), world)
        group = ProcessGroup(store, rank, world, CPU, seconds=seconds, host="127.0.0.1")
        try:
            with torch.inference_mode():
                return work(group)
        except CollectiveError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exchanges(world: int, dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(world, 5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)

    def work(group: ProcessGroup) -> Any:
        sums = [group.sum(x[group.rank].clone()) for _ in range(3)]
        sums.append(group.sum(x[group.rank, :, :4].clone().T))  # not contiguous
        parts = group.gather(x[group.rank])
        assert group.sum(x[group.rank, :0]).shape == (0, 7)
        assert len(group.gather(x[group.rank, :0])) == world
        return sums, parts, group.largest(group.rank * 3)

    for sums, parts, largest in (results := together(tmp_path, world, work)):
        assert torch.equal(torch.stack(parts), x)
        assert largest == 3 * (world - 1)
        for total, want in zip(sums, [x.sum(0)] * 3 + [x.sum(0)[:, :4].T], strict=True):
            assert torch.allclose(total, want, atol=0.1 if dtype is torch.bfloat16 else 1e-6)
        assert all(torch.equal(a, b) for a, b in zip(sums, results[0][0], strict=True)), "the same bits"


@pytest.mark.parametrize("world", [2, 3])
def test_a_peer_that_leaves(world: int, tmp_path: Path) -> None:
    def work(group: ProcessGroup) -> Any:
        group.sum(torch.ones(3))
        return "left" if group.rank == 1 else group.sum(torch.ones(3))

    found = together(tmp_path, world, work)
    assert found[1] == "left"
    for rank in {0, world - 1} - {1}:
        assert f"rank {rank} cannot reach a peer" in str(found[rank])


def test_a_peer_that_is_late(tmp_path: Path) -> None:
    def work(group: ProcessGroup) -> Any:
        if group.rank == 0:
            with pytest.raises(CollectiveError):
                group.sum(torch.ones(3))
            done.set()
        else:
            assert done.wait(20)
        return "ended"

    done = threading.Event()
    assert together(tmp_path, 2, work, seconds=0.3) == ["ended", "ended"]
