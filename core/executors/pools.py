"""`Pool`: the memory of one KV group on one device, and `PoolIO`, through which stores read and write it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bien.core.errors import ResourceError
from bien.core.kv.groups import KVGroup
from bien.core.memory import available_host_bytes

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


@dataclass(slots=True)
class Pool:
    """Blocks 1..blocks of one group; block 0 is the null block, whose contents nobody may rely on.

    A paged group has [layers, blocks+1, block_tokens, width] elements (for attention, a token's K heads and
    then its V heads: width = 2 * kv_heads * d), a STATE group [layers, blocks+1, width].
    """

    group: KVGroup
    data: Tensor
    layers: list[Tensor] = field(default_factory=list)  # data[i], taken apart once
    flat: list[Tensor] = field(default_factory=list)  # the same as [(blocks+1) * block_tokens, width]
    views: dict[Any, Any] = field(default_factory=dict)  # kernels keep views of the layers here

    @classmethod
    def allocate(cls, group: KVGroup, blocks: int, device: torch.device) -> Pool:
        """ResourceError when the device lacks the memory."""
        dtype = DTYPES[group.dtype]
        count = len(group.layers)
        if group.paged:
            shape = (count, blocks + 1, group.block_tokens, group.bytes_per_token // (count * dtype.itemsize))
        else:
            shape = (count, blocks + 1, group.constant_bytes // (count * dtype.itemsize))  # type: ignore[assignment]
        try:
            data = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError for a failed allocation
            need = group.block_bytes * (blocks + 1)
            raise ResourceError(
                f"KV group {group.name!r}: {need:,} bytes for {blocks:,} blocks were refused by {device}: "
                f"{str(error).splitlines()[0]}; lower kv_tokens of the pool"
            ) from error
        layers = list(data.unbind(0))
        flat = [x.view(-1, x.shape[-1]) for x in layers]
        return cls(group, data, layers, flat)


@dataclass(slots=True)
class HostBlocks:
    """Blocks of one group in host memory: what `PoolIO.read` returns."""

    data: Tensor  # [layers, blocks, ...], contiguous

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class PoolIO:
    """`BlockIO` over pools. Blocks that no plan writes may be read and written from any thread."""

    def __init__(self, pools: tuple[Pool, ...]) -> None:
        self.pools = pools

    def read(self, group: int, blocks: list[int]) -> HostBlocks:
        data = self.pools[group].data
        with torch.inference_mode():
            index = torch.tensor(blocks, dtype=torch.int64, device=data.device)
            return HostBlocks(data.index_select(1, index).cpu())

    def write(self, group: int, blocks: list[int], data: Any) -> None:
        pool = self.pools[group].data
        if not isinstance(data, HostBlocks) or data.data.shape[1] != len(blocks):
            raise ValueError(
                f"write of {len(blocks)} blocks of group {group} needs what read returned for them"
            )
        with torch.inference_mode():
            index = torch.tensor(blocks, dtype=torch.int64, device=pool.device)
            pool.index_copy_(1, index, data.data.to(pool.device))


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated: the device's, or the machine's within its control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()
