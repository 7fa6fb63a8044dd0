"""`GroupIO`: the pools of all ranks as one. Blocks look as those of an executor of one rank, so that either
can take what the other has saved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bien.core.errors import ExecutorDiedError
from bien.core.executors.link import LinkClosed
from bien.core.executors.plan_wire import Verdict, pack_verdict
from bien.core.executors.pools import HostBlocks
from bien.core.executors.rank import as_bytes
from bien.core.executors.rank_messages import Blocks, Fault, ReadBlocks, WriteBlocks
from bien.core.executors.ranks import RemoteRank
from bien.core.executors.torch_executor import TorchExecutor
from bien.core.kv.groups import KVGroup
from bien.core.parallel.shards import headed


@dataclass(frozen=True, slots=True)
class LastStep:
    """The last step that rank 0 has sampled, and its yield if the others may not have heard of it."""

    step: int
    verdict: Verdict | None


class GroupIO:
    """See `BlockIO`. A group whose entries are heads is gathered from the ranks and scattered to them; every
    other one is the same on each rank."""

    def __init__(
        self,
        local: TorchExecutor,
        remotes: list[RemoteRank],
        groups: tuple[KVGroup, ...],
        heads: range,
        kv_heads: int,
        last: Callable[[], LastStep],
    ) -> None:
        self._local, self._remotes, self._groups = local, remotes, groups
        self._heads, self._kv_heads, self._last = heads, kv_heads, last
        self._lock = threading.Lock()  # over the links

    def read(self, group: int, blocks: list[int]) -> HostBlocks:
        if not headed(self._groups[group]):
            return self._local.io.read(group, blocks)
        last = self._last()
        request = ReadBlocks(group, blocks, last.step, *pack_verdict(last.verdict))
        own = self._local.io
        with self._lock:
            for remote in self._remotes:
                self._send(remote, request)
            parts = [(self._heads, own.read(group, blocks))]
            pool = self._local.pools[group]
            for remote in self._remotes:
                data = self._answer(remote)
                layers, _, size, width = pool.data.shape
                width = width // len(self._heads) * len(remote.heads)
                flat = torch.frombuffer(bytearray(data), dtype=pool.data.dtype)
                parts.append((remote.heads, HostBlocks(flat.view(layers, len(blocks), size, width))))
        by_head: dict[int, Tensor] = {}
        for heads, part in parts:
            for i, head in enumerate(heads):
                by_head.setdefault(head, _heads(part.data, len(heads))[..., i, :])
        whole = torch.stack([by_head[head] for head in range(self._kv_heads)], -2)
        return HostBlocks(whole.flatten(-3))

    def write(self, group: int, blocks: list[int], data: Any) -> None:
        if not isinstance(data, HostBlocks) or data.data.shape[1] != len(blocks):
            raise ValueError(
                f"write of {len(blocks)} blocks of group {group} needs what read returned for them"
            )
        last = self._last()
        verdict = pack_verdict(last.verdict)
        with self._lock:
            for remote in self._remotes:
                part = as_bytes(self._part(group, data, remote.heads))
                self._send(remote, WriteBlocks(group, blocks, last.step, *verdict, part))
            self._local.io.write(group, blocks, self._part(group, data, self._heads))
            for remote in self._remotes:
                self._answer(remote)

    def _part(self, group: int, blocks: HostBlocks, heads: range) -> HostBlocks:
        if not headed(self._groups[group]):
            return blocks
        part = _heads(blocks.data, self._kv_heads)[..., heads.start : heads.stop, :]
        return HostBlocks(part.flatten(-3).contiguous())

    def _send(self, remote: RemoteRank, message: ReadBlocks | WriteBlocks) -> None:
        try:
            remote.blocks.send(message)
        except LinkClosed:
            raise ExecutorDiedError(f"{remote} is gone") from None

    def _answer(self, remote: RemoteRank) -> bytes:
        try:
            answer = remote.blocks.receive()
        except LinkClosed:
            raise ExecutorDiedError(f"{remote} is gone") from None
        if isinstance(answer, Fault):
            raise answer.failure.revive()
        assert isinstance(answer, Blocks)
        return answer.data


def _heads(data: Tensor, heads: int) -> Tensor:
    # [layers, blocks, block_tokens, 2 * heads * d] as [..., 2, heads, d]: keys, then values
    return data.view(*data.shape[:-1], 2, heads, -1)
