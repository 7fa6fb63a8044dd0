"""`Rows`: the ragged batch that models and device drafters are given.

A step computes `counts[i]` consecutive positions, from `starts[i]`, of each of S sequences; all of them lie
one after the other in flat arrays of N tokens. A layer says which layer it is, and `Rows` finds pool, block
tables and lengths of that layer's KV group. What all layers of a group share is computed once per step.

    sequence 0        sequence 1   sequence 2
    [ p p p p p p ]   [ d ]        [ d  x  x ]        p prompt chunk, d last token, x draft
    offsets: 0        6            7           10
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bien.core.errors import PluginFault
from bien.core.executors.trees import Tree, TreeRows, tree_positions
from bien.core.kv.groups import GroupKind
from bien.core.plan import I32

if TYPE_CHECKING:
    from bien.core.executors.pools import Pool
    from bien.core.kernels.base import Kernels

I64 = NDArray[np.int64]
Places = dict[tuple[int, str], tuple[int, int]]
"""(layer, name of a group, "" for the first that has the layer) -> (group, index in the group)."""


@dataclass(slots=True)
class GroupRows:
    """What a kernel needs to know of one KV group in one step. Row i of the table is that of sequence i."""

    pool: Pool
    table: I32  # [S, blocks]: table[i, b] holds positions b*block_tokens .. of sequence i; 0 = none
    starts: I32  # [S] first position computed in this step
    counts: I32  # [S]
    offsets: I64  # [S+1] where a sequence's tokens begin in flat arrays
    device: torch.device
    skip: int = 0  # positions below it have no entries: nobody may look at them
    plans: dict[Any, Any] = field(default_factory=dict)  # kernels keep what they derive per step here
    _mapping: Tensor | None = None

    @property
    def block_tokens(self) -> int:
        return self.pool.group.block_tokens

    @property
    def window(self) -> int:
        return self.pool.group.window

    def entries(self) -> I64:
        """[N] where each token's entry lies in the pool, as block * block_tokens + offset."""
        size = self.block_tokens
        if len(self.counts) == int(self.offsets[-1]):  # one token each
            row, position = np.arange(len(self.counts)), self.starts.astype(np.int64)
        else:
            row = np.repeat(np.arange(len(self.counts)), self.counts)
            position = flat_positions(self.starts, self.counts, self.offsets)
        block, offset = np.divmod(position, size)
        return self.table[row, block].astype(np.int64) * size + offset

    def only(self, members: I64) -> GroupRows:
        """The same of some of the sequences."""
        counts = self.counts[members]
        offsets = np.zeros(len(members) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        table, starts = self.table[members], self.starts[members]
        return GroupRows(self.pool, table, starts, counts, offsets, self.device, self.skip)

    def blank(self, out: Tensor) -> None:
        """Zeros for the tokens before `skip`, which see nothing: out [N, ...]."""
        early = self.plans.get("early")
        if early is None:
            position = flat_positions(self.starts, self.counts, self.offsets)
            early = torch.from_numpy(np.flatnonzero(position < self.skip)).to(self.device)
            self.plans["early"] = early
        if len(early):
            out[early] = 0

    @property
    def mapping(self) -> Tensor:
        """`entries` on the device, [N] int64."""
        if self._mapping is None:
            self._mapping = torch.from_numpy(self.entries()).to(self.device)
        return self._mapping


class Rows:
    """One step's ragged batch. Made by the executor; layers and drafters read it and call it."""

    def __init__(
        self,
        pools: tuple[Pool, ...],
        tables: tuple[I32, ...],
        slots: I32,
        starts: I32,
        counts: I32,
        drafts: I32,
        kernels: Kernels,
        device: torch.device,
        layers: Places | None = None,
        ids: Tensor | None = None,
        skip: int = 0,
        trees: dict[int, Tree] | None = None,
    ) -> None:
        """`tables[g]` is the executor's [slots, blocks] block table of group g; `layers` says where a layer's
        entries are, by default the target model's layers'. `ids`: token ids [N] of the rows. `trees`: by
        sequence, of those whose drafts are no chain."""
        self.pools, self.tables, self.kernels, self.device = pools, tables, kernels, device
        self.slots, self.starts, self.counts = slots, starts, counts
        self.drafts = drafts  # [S] how many of a sequence's last tokens are drafts
        self.layers = target_layers(pools) if layers is None else layers
        self.offsets: I64 = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=self.offsets[1:])
        self.tokens = int(self.offsets[-1])  # N
        self.host_places = flat_positions(starts, counts, self.offsets)  # [N] where tokens and entries lie
        self.trees = trees or {}
        # [N] what a token's position is: nodes of trees are where they would be if they were taken.
        self.host_positions = tree_positions(self) if trees else self.host_places
        self.positions = torch.from_numpy(self.host_positions).to(device)  # [N] int64
        self.shared: dict[Any, Any] = {}  # what layers derive once per step (rotary angles)
        self.kept: dict[int, Tensor] = {}  # STATE group -> [layers, sum(keep), width], when drafts run
        self.skip = skip  # positions below it have no entries where `layers` leads
        self._ids = ids
        self._groups: dict[tuple[int, int], GroupRows] = {}

    @property
    def ids(self) -> Tensor:
        """[N] int64 token ids of the rows. PluginFault where `next` was not told them."""
        if self._ids is None:
            raise PluginFault("these rows have no token ids: `Rows.next` was not given any")
        return self._ids

    @ids.setter
    def ids(self, tokens: Tensor) -> None:
        self._ids = tokens

    @property
    def keep(self) -> I32:
        """[S] how many states `store_states` takes per sequence: those after its last token and, for each
        draft, after the token before it."""
        return self.drafts + 1

    def group(self, index: int) -> GroupRows:
        """The step's view of KV group `index` (plan order)."""
        found = self._groups.get((index, self.skip))
        if found is None:
            table = self.tables[index][self.slots]
            found = GroupRows(
                self.pools[index], table, self.starts, self.counts, self.offsets, self.device, self.skip
            )
            self._groups[index, self.skip] = found
        return found

    def write(self, layer: int, kv: Tensor, name: str = "") -> None:
        """Store every token's entry: kv [N, width]; for attention layers K heads, then V heads. `name`: of
        the group, for a layer that has entries in several; "" is its first."""
        group, index = self.layers[layer, name]
        rows = self.group(group)
        self.kernels.write_kv(rows.pool.flat[index], rows, kv)

    def attend(self, layer: int, query: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Causal attention (inside the group's window) over what `write` stored: query [N, heads, d] ->
        [N, heads * d]. The group's width says how many KV heads there are: width / (2 d). `sinks` [heads]:
        of each head a score beside those of positions, which takes its share and has no value."""
        group, index = self.layers[layer, ""]
        rows = self.group(group)
        if self.trees:
            found: TreeRows | None = self.shared.get(("trees", group))
            if found is None:
                found = self.shared["trees", group] = TreeRows(self, rows)
            return found.attend(self.kernels, query, index, scale, sinks)
        return self.kernels.paged_attention(query, rows, index, scale, sinks)

    def attend_block(
        self,
        layer: int,
        query: Tensor,
        kv: Tensor,
        scale: float,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of a block of queries per sequence: query [S, Q, heads, d] -> [S, Q, heads * d]. All of
        them see what is stored of their sequence before its first row, skip <= p < starts[i], inside the
        group's window of their own position; and of kv [S, K, width], which is not stored, what mask
        [S or 1, Q, K] bool says (None: all of it; a window does not matter there). positions [S, Q] int64
        of the queries, none below starts[i]; None: starts[i] + q. A query that sees nothing gets zeros."""
        group, index = self.layers[layer, ""]
        rows = self.group(group)
        return self.kernels.block_attention(query, kv, rows, index, scale, mask, positions, sinks)

    def attend_latent(
        self, layer: int, query: Tensor, scale: float, rank: int, chosen: Tensor | None = None
    ) -> Tensor:
        """Causal attention over the layer's latents: query [N, heads, width] against the whole entry, the
        first `rank` features of which are also the values -> [N, heads, rank]. `chosen` as `choose` returns
        it: only these positions are looked at."""
        group, index = self.layers[layer, ""]
        return self.kernels.latent_attention(query, self.group(group), index, scale, rank, chosen)

    def choose(self, layer: int, query: Tensor, weights: Tensor, count: int, name: str) -> Tensor:
        """The `count` positions that matter most to each token, by the indexer keys that `write` stored in
        group `name`: query [N, heads, d], weights [N, heads] -> [N, count] int64, -1 where there are less."""
        group, index = self.layers[layer, name]
        return self.kernels.choose(query, weights, self.group(group), index, count)

    def load_states(self, layer: int, name: str = "") -> Tensor:
        """[S, width]: a copy of every sequence's recurrent state before this step (zero at position 0)."""
        group, index = self.layers[layer, name]
        return self.pools[group].data[index].index_select(0, self._live(group))

    def store_states(self, layer: int, states: Tensor, name: str = "") -> None:
        """Put states back: [sum(keep), width] in row order, for each sequence those after its last `keep`
        tokens, oldest first. The executor settles on the accepted one after verification."""
        group, index = self.layers[layer, name]
        pool, keep = self.pools[group], self.keep
        last = states
        if len(states) != len(self.slots):
            kept = self.kept.get(group)
            if kept is None:
                kept = states.new_empty(len(pool.group.layers), *states.shape)
                self.kept[group] = kept
            kept[index] = states
            ends = np.cumsum(keep, dtype=np.int64) - 1
            last = states.index_select(0, torch.from_numpy(ends).to(self.device))
        pool.data[index].index_copy_(0, self._live(group), last.to(pool.data.dtype))

    def load_boundary(self, group: int) -> Tensor:
        """[S, width] of a `boundary_group`: each sequence's state behind the position before its first row,
        as `store_boundary` was given it; zeros where there is none."""
        pool = self.pools[group]
        before = np.maximum(self.starts - 1, 0) // pool.group.block_tokens
        blocks = self.tables[group][self.slots, before].astype(np.int64)
        index = torch.from_numpy(blocks).to(self.device)
        states = pool.data[0].index_select(0, index).flatten(1)[:, : pool.group.width]
        first = np.flatnonzero(self.starts == 0)
        if len(first):
            states[torch.from_numpy(first).to(self.device)] = 0
        return states

    def store_boundary(self, group: int, states: Tensor, confirmed: Tensor) -> None:
        """Keep in a `boundary_group`, of every block that the rows reach, the state behind its last confirmed
        position: states [N, width] of all rows; of sequence i the first confirmed[i] ([S] int64 on the host)
        hold confirmed tokens."""
        pool = self.pools[group]
        size, width = pool.group.block_tokens, pool.group.width
        rows, blocks = [], []
        for i, (start, count) in enumerate(zip(self.starts.tolist(), confirmed.tolist(), strict=True)):
            table, first = self.tables[group][self.slots[i]], int(self.offsets[i])
            for block in range(start // size, -(-(start + count) // size) if count else 0):
                rows.append(first + min((block + 1) * size, start + count) - 1 - start)
                blocks.append(int(table[block]))
        if rows:
            chosen = states.index_select(0, torch.tensor(rows, device=self.device))
            index = torch.tensor(blocks, device=self.device)
            pool.data[0].flatten(1)[index, :width] = chosen.to(pool.data.dtype)

    def redirect(self, group: int, *, skip: int = 0, **named: int) -> Rows:
        """The same rows for layers that read and write `group` (a drafter's own) instead of the target's:
        layer `pools[group].group.layers[j]` is the group's j-th. `named`: where a layer asks for a group by
        this name, it is given that one. `skip`: positions below it have no entries there, and attention
        leaves them out."""
        layers = {
            (layer, name): (g, j)
            for name, g in {"": group, **named}.items()
            for j, layer in enumerate(self.pools[g].group.layers)
        }
        other = Rows.__new__(Rows)
        other.__dict__.update(self.__dict__)
        other.layers, other.skip = layers, skip
        return other

    def next(self, tokens: Tensor | None = None) -> Rows:
        """One row per sequence at the position after its last one. `tokens` [S], the ids there, become the
        rows' `ids`; positions do not depend on them."""
        ones = np.ones(len(self.slots), np.int32)
        starts = (self.starts + self.counts).astype(np.int32)
        return Rows(
            self.pools,
            self.tables,
            self.slots,
            starts,
            ones,
            np.zeros_like(ones),
            self.kernels,
            self.device,
            self.layers,
            tokens,
            self.skip,
        )

    def _live(self, group: int) -> Tensor:
        key = ("live", group)
        if key not in self.shared:
            blocks = self.tables[group][self.slots, 0].astype(np.int64)
            self.shared[key] = torch.from_numpy(blocks).to(self.device)
        return self.shared[key]  # type: ignore[no-any-return]


def flat_positions(starts: I32, counts: I32, offsets: I64) -> I64:
    """[N] the position of every flat token."""
    flat = np.arange(int(offsets[-1]), dtype=np.int64)
    flat += np.repeat(starts.astype(np.int64) - offsets[:-1], counts)
    return flat


def target_layers(pools: tuple[Pool, ...]) -> Places:
    """Where the target model's layers have their entries; drafters' own groups are left out."""
    places: Places = {}
    for g, pool in enumerate(pools):
        if pool.group.kind is not GroupKind.DRAFT:
            for j, layer in enumerate(pool.group.layers):
                places.setdefault((layer, ""), (g, j))
                places[layer, pool.group.name] = (g, j)
    return places
