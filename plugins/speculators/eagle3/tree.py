"""How a tree of drafts grows (EAGLE-2: Li et al. 2024, section 4). Needs torch.

Every level's `top_k` most likely nodes, by the product of probabilities along their paths, are expanded to
their `top_k` most likely children each; of all nodes met, the most likely `limit` make the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bien.core.api import DeviceDraft, Rows
from bien.plugins.speculators.eagle3.network import Network


def grow(
    network: Network, rows: Rows, states: Tensor, last: Tensor, limit: int, depth: int, top_k: int
) -> DeviceDraft:
    """`rows`: of the drafter's group, at the last tokens `last` [S], behind which `states` [S, hidden] were.
    Nodes come in the order of their chance, which is an order of parents first."""
    sequences, wide = len(last), min(top_k, network.form.draft_vocab)
    position = rows.positions
    frontier, entries = _Nodes(states, last, position, 1), None
    mask = torch.ones(1, 1, 1, dtype=torch.bool, device=last.device)
    precise = torch.promote_types(states.dtype, torch.float32)  # what is added up along paths
    chance = torch.zeros(sequences, 1, dtype=precise, device=last.device)  # of the frontier's paths
    above = torch.full((sequences, 1), -1, dtype=torch.int64, device=last.device)  # its nodes' numbers
    # Of all nodes, level by level, [S, nodes of the level] each.
    tokens: list[Tensor] = []
    alongs: list[Tensor] = []
    owns: list[Tensor] = []
    parents: list[Tensor] = []
    for level in range(min(depth, limit)):
        states, logits, entries = _expand(network, rows, frontier, entries, mask)
        chances = torch.log_softmax(logits, -1, dtype=precise).clamp_(max=0)
        own, index = chances.topk(wide, -1)  # [S, Q, wide]
        found = index if network.ids is None else network.ids[index]
        along = chance[:, :, None] + own
        first = sum(t.shape[1] for t in tokens)
        tokens.append(found.flatten(1))
        alongs.append(along.flatten(1))
        owns.append(own.flatten(1))
        parents.append(above.repeat_interleave(wide, 1))
        if level + 1 == min(depth, limit):
            break
        chance, best = along.flatten(1).topk(wide, -1)  # [S, wide]
        above, row = first + best, best // wide
        chosen = states.gather(1, row[:, :, None].expand(-1, -1, states.shape[-1]))
        token = tokens[-1].gather(1, best)
        frontier = _Nodes(chosen.flatten(0, 1), token.flatten(), (position + level + 1), wide)
        # A node sees what its parent saw, and itself.
        seen = mask.expand(sequences, -1, -1).gather(1, row[:, :, None].expand(-1, -1, mask.shape[-1]))
        itself = torch.eye(wide, dtype=torch.bool, device=last.device).expand(sequences, -1, -1)
        mask = torch.cat([seen, itself], -1)
    return _chosen(
        torch.cat(tokens, 1), torch.cat(alongs, 1), torch.cat(owns, 1), torch.cat(parents, 1), limit
    )


class _Nodes:
    # `count` per sequence: states [S * count, hidden] before them, tokens [S * count], positions [S].
    def __init__(self, states: Tensor, tokens: Tensor, position: Tensor, count: int) -> None:
        self.states, self.tokens, self.count = states, tokens, count
        self.positions = position.repeat_interleave(count)


def _expand(
    network: Network, rows: Rows, nodes: _Nodes, entries: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # (states [S, Q, hidden], logits [S, Q, draft vocabulary], entries [S, K, width] of all nodes so far)
    query, entry, residual = network.enter(nodes.states, nodes.tokens, nodes.positions)
    query = query.view(-1, nodes.count, *query.shape[1:])
    entry = entry.view(-1, nodes.count, entry.shape[-1])
    entries = entry if entries is None else torch.cat([entries, entry], 1)
    positions = nodes.positions.view(-1, nodes.count)
    mixed = rows.attend_block(0, query, entries, network.attention.scale, mask, positions)
    states, logits = network.leave(residual, mixed.flatten(0, 1))
    shape = (-1, nodes.count)
    return states.view(*shape, states.shape[-1]), logits.view(*shape, logits.shape[-1]), entries


def _chosen(tokens: Tensor, chances: Tensor, owns: Tensor, parents: Tensor, limit: int) -> DeviceDraft:
    # Stable, and a child is no likelier than its parent, which comes before it: parents are chosen first.
    order = torch.sort(chances, dim=-1, descending=True, stable=True).indices[:, :limit]
    place = torch.full_like(tokens, -1)
    place.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    above = parents.gather(1, order)
    above = torch.where(above < 0, above, place.gather(1, above.clamp(min=0)))
    return DeviceDraft(tokens.gather(1, order), owns.gather(1, order).exp(), above)
