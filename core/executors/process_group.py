"""`ProcessGroup`: a communicator between processes, over gloo on CPUs and NCCL on CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bien.core.errors import CollectiveError


class ProcessGroup:
    """See `Communicator`. The group is its own, apart from torch's global one."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        device: torch.device,
        *,
        seconds: float,
        meet_seconds: float = 60.0,
        host: str | None = None,
    ) -> None:
        """`store`: a torch.distributed store that all ranks share. Peers are given up that do not come here
        within `meet_seconds`, later that do not exchange within `seconds`. `host`: the address to be reached
        at; None: what gloo finds (it reads GLOO_SOCKET_IFNAME)."""
        self.rank, self.world, self.device = rank, world, device
        patience = timedelta(seconds=seconds)
        store.set_timeout(timedelta(seconds=meet_seconds))
        self._sum, self._largest = dist.AllreduceOptions(), dist.AllreduceOptions()
        operations: Any = dist.ReduceOp
        self._sum.reduceOp, self._largest.reduceOp = operations.SUM, operations.MAX
        # Two ranks on gloo: one message each way takes a third of the time of its ring.
        self._pair = world == 2 and device.type != "cuda"
        options: Any
        self._group: Any
        with _peers(rank):
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = patience
                self._group = dist.ProcessGroupNCCL(store, rank, world, options)
            else:
                gloo: Any = dist.ProcessGroupGloo
                options = gloo._Options()
                options._timeout = patience
                options._devices = [
                    gloo.create_default_device() if host is None else gloo.create_device(hostname=host)
                ]
                self._group = gloo(store, rank, world, options)

    def sum(self, x: Tensor) -> Tensor:
        if self.world == 1 or not x.numel():
            return x
        x = x.contiguous()
        with _peers(self.rank):
            if self._pair:
                return x.add_(self._swap(x))
            self._group.allreduce([x], self._sum).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        if self.world == 1 or not x.numel():
            return [x] * self.world
        x = x.contiguous()
        with _peers(self.rank):
            if self._pair:
                other = self._swap(x)
                return [other, x] if self.rank else [x, other]
            parts = [torch.empty_like(x) for _ in range(self.world)]
            self._group.allgather([parts], [x]).wait()
        return parts

    def largest(self, value: int) -> int:
        if self.world == 1:
            return value
        x = torch.tensor([value], dtype=torch.int64, device=self.device)
        with _peers(self.rank):
            self._group.allreduce([x], self._largest).wait()
        return int(x)

    def close(self) -> None:
        if self._group is not None:
            # Left to its destructor, a group whose peer is gone ends the process at exit.
            self._group.abort()
            self._group = None

    def _swap(self, x: Tensor) -> Tensor:
        other = torch.empty_like(x)
        sent = self._group.send([x], 1 - self.rank, 0)
        self._group.recv([other], 1 - self.rank, 0).wait()
        sent.wait()
        return other


@contextmanager
def _peers(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"rank {rank} cannot reach a peer: {str(error).splitlines()[0]}") from error
