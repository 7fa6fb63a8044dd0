"""`Tree`: the drafts of one row that are no chain, and `TreeRows`: how attention runs over such rows.

    drafts   0  1  2  3  4        parents  -1 -1 0 0 2        depth  0 0 1 1 2
    position p  p+1 ...           p: the first behind the known tokens

A node's entry is stored at its own position p + index; it is rotated as the token at p + depth, which it will
be if it is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bien.core.errors import PluginFault
from bien.core.plan import I32, ExecutorPlan
from bien.core.speculation.draft import ROOT
from bien.core.speculation.lengths import depths

if TYPE_CHECKING:
    from bien.core.executors.rows import GroupRows, Rows
    from bien.core.kernels.base import Kernels


@dataclass(slots=True)
class Tree:
    parents: list[int]  # of each node, an earlier one or ROOT
    depth: list[int]  # 0: behind the last known token

    @classmethod
    def of(cls, parents: list[int]) -> Tree:
        """PluginFault where a node comes before its parent."""
        if any(not ROOT <= parent < node for node, parent in enumerate(parents)):
            raise PluginFault(f"a tree of drafts has parents {parents}; valid: {ROOT}, or an earlier node")
        return cls(parents, [d - 1 for d in depths(len(parents), parents)])

    def path(self, node: int) -> list[int]:
        """The node and those above it, topmost first; none for ROOT."""
        out: list[int] = []
        while node != ROOT:
            out.append(node)
            node = self.parents[node]
        return out[::-1]

    def walk(self, tokens: list[int], taken: list[int]) -> list[int]:
        """The nodes, topmost first, that the tokens `taken` go along; tokens: of all nodes. Of siblings with
        the same token the first."""
        node, out = ROOT, []
        for token in taken:
            node = self.child(tokens, node, token)
            if node == ROOT:
                break
            out.append(node)
        return out

    def child(self, tokens: list[int], node: int, token: int) -> int:
        """The node below `node` that is `token`; ROOT: none."""
        for other in range(node + 1, len(self.parents)):
            if self.parents[other] == node and tokens[other] == token:
                return other
        return ROOT

    def first_path(self) -> list[int]:
        """From the top always the first child."""
        node, out = ROOT, []
        for other in range(len(self.parents)):
            if self.parents[other] == node:
                out.append(other)
                node = other
        return out

    def ancestors(self) -> NDArray[np.bool_]:
        """[n, n] True where the second is the first or above it."""
        above = np.zeros((len(self.parents),) * 2, bool)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                above[node] = above[parent]
            above[node, node] = True
        return above


def trees_of(plan: ExecutorPlan) -> dict[int, Tree]:
    """By row, of those whose drafts are no chain. PluginFault for parents that do not fit the plan."""
    if not len(plan.parents):
        return {}
    if len(plan.parents) != int(plan.drafts.sum()):
        raise PluginFault(f"{len(plan.parents)} parents of {int(plan.drafts.sum())} drafts")
    out, at, parents = {}, 0, plan.parents.tolist()
    for i, drafts in enumerate(plan.drafts.tolist()):
        own = parents[at : at + drafts]
        at += drafts
        if own != list(range(ROOT, drafts + ROOT)):
            out[i] = Tree.of(own)
    return out


def tree_positions(rows: Rows) -> NDArray[np.int64]:
    """[N] positions of the rows, nodes at their depth."""
    positions = rows.host_places.copy()
    for i, tree in rows.trees.items():
        end, many = int(rows.offsets[i + 1]), len(tree.parents)
        positions[end - many : end] = positions[end - many] + np.array(tree.depth)
    return positions


class TreeRows:
    """Attention over one group in a step some of whose rows are trees: those run as blocks of queries, padded
    to the longest; the others as always."""

    def __init__(self, rows: Rows, group: GroupRows) -> None:
        trees = np.array(sorted(rows.trees))
        chains = np.setdiff1d(np.arange(len(rows.slots)), trees)
        self.pool, device = group.pool, rows.device
        self.chains = group.only(chains) if len(chains) else None
        self.trees = group.only(trees)
        self.chained = torch.from_numpy(_tokens(rows, chains)).to(device)
        counts = rows.counts[trees].astype(np.int64)
        most = int(counts.max())
        column = np.arange(most)
        real = column < counts[:, None]
        flat = rows.offsets[trees][:, None] + np.minimum(column, counts[:, None] - 1)
        positions = rows.host_positions[flat]
        mask = np.zeros((len(trees), most, most), bool)
        for row, i in enumerate(trees.tolist()):
            mask[row] = _mask(rows.trees[i], int(rows.counts[i]), most)
        if group.window:
            mask &= positions[:, None] > positions[:, :, None] - group.window
        self.flat = torch.from_numpy(flat).to(device)  # [T, Q] each query's place among all tokens
        self.real = torch.from_numpy(np.flatnonzero(real)).to(device)  # of them those that are no padding
        self.positions = torch.from_numpy(positions).to(device)
        self.mask = torch.from_numpy(mask).to(device)
        self.entries = group.mapping[self.flat.view(-1)]  # where their keys and values lie

    def attend(
        self, kernels: Kernels, query: Tensor, layer: int, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """As `Kernels.paged_attention`."""
        tokens, heads, d = query.shape
        out = query.new_empty(tokens, heads * d)
        if self.chains is not None:
            own = query.index_select(0, self.chained)
            out[self.chained] = kernels.paged_attention(own, self.chains, layer, scale, sinks)
        many, most = self.flat.shape
        kv = self.pool.flat[layer].index_select(0, self.entries).view(many, most, -1)
        own = query.index_select(0, self.flat.view(-1)).view(many, most, heads, d)
        found = kernels.block_attention(
            own, kv, self.trees, layer, scale, self.mask, self.positions, sinks
        ).view(many * most, -1)
        out[self.flat.view(-1)[self.real]] = found.index_select(0, self.real)
        return out


def _mask(tree: Tree, count: int, most: int) -> NDArray[np.bool_]:
    # The row's known tokens are a chain, of which every node sees all.
    known = count - len(tree.parents)
    out = np.zeros((most, most), bool)
    out[:count, :known] = np.tri(count, known, dtype=bool)
    out[known:count, known:count] = tree.ancestors()
    return out


def _tokens(rows: Rows, members: NDArray[np.int64]) -> NDArray[np.int64]:
    parts = [np.arange(rows.offsets[i], rows.offsets[i + 1]) for i in members.tolist()]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def paths_of(
    trees: dict[int, Tree], plan: ExecutorPlan, tokens: NDArray[np.int64], accepted: I32, gained: I32
) -> dict[int, list[int]]:
    """By row, the nodes that were taken, from what a step yielded; tokens: those of all drafts, in row
    order."""
    first, ends = np.cumsum(plan.drafts) - plan.drafts, np.cumsum(accepted)
    out = {}
    for i, tree in trees.items():
        own = tokens[first[i] : first[i] + plan.drafts[i]].tolist()
        taken = gained[ends[i] - accepted[i] : max(ends[i] - 1, ends[i] - accepted[i])].tolist()
        out[i] = tree.walk(own, taken)
    return out
