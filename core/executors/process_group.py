"""`ProcessGroup`: a communicator between processes, over gloo on CPUs and NCCL on CUDA devices."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
        host: str | None = None,
    ) -> None:
        """`store`: a torch.distributed store that all ranks share. `seconds` until a peer that is not
        there is given up. `host`: the address to be reached at; None: what gloo finds (it reads
        GLOO_SOCKET_IFNAME)."""
        self.rank, self.world, self.device = rank, world, device
        patience = timedelta(seconds=seconds)
        store.set_timeout(patience)
        self._sum = dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp.SUM
        self._largest = dist.AllreduceOptions()
        self._largest.reduceOp = dist.ReduceOp.MAX
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            self._group = dist.ProcessGroupNCCL(store, rank, world, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = patience
            where = {} if host is None else {"hostname": host}
            options._devices = [
                dist.ProcessGroupGloo.create_device(**where)
                if where
                else dist.ProcessGroupGloo.create_default_device()
            ]
            self._group = dist.ProcessGroupGloo(store, rank, world, options)
        # Two ranks on gloo: one message each way takes a third of the time of its ring.
        self._pair = world == 2 and device.type != "cuda"

    def sum(self, x: Tensor) -> Tensor:
        if self.world == 1 or not x.numel():
            return x
        x = x.contiguous()
        if self._pair:
            return x.add_(self._swap(x))
        self._group.allreduce([x], self._sum).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        if self.world == 1 or not x.numel():
            return [x] * self.world
        x = x.contiguous()
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
