"""`LatentLaws`: the part of `KernelsSuite` about attention over latents and the choice of positions."""

from __future__ import annotations

import torch
from torch import Tensor

from bien.core.executors.pools import DTYPES
from bien.core.testing.paged import LAYERS, PagedBatch
from bien.core.testing.products import ProductLaws, normal, seeded

SPANS = [(0, 1), (37, 1), (5, 3), (0, 20), (70, 2), (300, 1), (41, 17)]
SIZES = [(3, 24, 16), (1, 40, 32), (4, 72, 64), (2, 6, 3)]  # query heads, width of an entry, rank


class LatentLaws(ProductLaws):
    """Entries of one latent per position, that of values and keys alike."""

    def test_latent_attention(self) -> None:
        kernels = self.build()
        for dtype, (heads, width, rank), block in self.each(SIZES, (1, 16, 64)):
            batch, query = _latents(heads, width, block, dtype)
            before = query.clone()
            for layer, scale in ((1, 0.3), (0, 0.1)):
                found = kernels.latent_attention(query, batch.rows(), layer, scale, rank, None)
                exact = _attention(batch, query, layer, scale, rank, None)
                self.near(found, exact, f"attention over latents of {width}, blocks of {block}", dtype)
            assert torch.equal(query, before), "the queries have changed"

    def test_latent_attention_over_chosen_positions(self) -> None:
        """In any order, fewer than there is room for, more than a row has positions."""
        kernels = self.build()
        for dtype, (heads, width, rank), count in self.each(SIZES, (1, 8, 400)):
            batch, query = _latents(heads, width, 16, dtype)
            chosen = torch.full((len(query), count), -1)
            for flat, _, position in batch.tokens():
                some = torch.randperm(position + 1, generator=seeded(flat))[: max(1, count - flat % 3)]
                chosen[flat, : len(some[:count])] = some[:count]
            found = kernels.latent_attention(query, batch.rows(), 1, 0.3, rank, chosen)
            exact = _attention(batch, query, 1, 0.3, rank, chosen)
            self.near(found, exact, f"attention over {count} chosen latents", dtype)

    def test_choice_of_positions(self) -> None:
        """Whole numbers: sums are exact, many are equal, and the lowest position comes first."""
        kernels = self.build()
        for dtype, heads, count in self.each((3, 1, 4), (1, 7, 400)):
            batch, _ = _latents(heads, 8, 16, dtype)
            for i, (start, new) in enumerate(batch.spans):
                batch.put(i, _whole(-1, 2, LAYERS, start + new, 8, seed=i, dtype=dtype))
            query = _whole(-1, 2, batch.size, heads, 8, seed=7, dtype=dtype)
            weights = _whole(-1, 4, batch.size, heads, seed=8, dtype=dtype)
            found = kernels.choose(query, weights, batch.rows(), 1, count)
            assert found.dtype == torch.int64 and found.shape == (len(query), count)
            for flat, i, position in batch.tokens():
                key = batch.kv[i][1, : position + 1].double()
                sums = (weights[flat].double() @ torch.relu(query[flat].double() @ key.T)).tolist()
                best = [p for _, p in sorted((-s, p) for p, s in enumerate(sums))][:count]
                want = best + [-1] * (count - len(best))
                where = f"position {position} of row {batch.spans[i]} in {dtype}"
                assert found[flat].tolist() == want, f"the best {count} for {where}: {found[flat].tolist()}"

    def test_choice_in_half_precision(self) -> None:
        """Sums are not rounded to 16 bits, in which most of many positions would be equal."""
        kernels = self.build()
        if "bfloat16" not in self.dtypes:
            return
        batch, _ = _latents(4, 16, 16, "bfloat16")
        query, weights = normal("bfloat16", batch.size, 4, 16), normal("bfloat16", batch.size, 4)
        found = kernels.choose(query, weights.float(), batch.rows(), 1, 20)
        for flat, i, position in batch.tokens():
            key = batch.kv[i][1, : position + 1].double()
            sums = weights[flat].double() @ torch.relu(query[flat].double() @ key.T)
            best, chosen = sums.sort(descending=True).values[:20], found[flat][found[flat] >= 0]
            error = (sums[chosen] - best).abs().max() / sums.abs().max().clamp(min=1)
            assert error < 1e-5, f"positions chosen for {position} of row {batch.spans[i]}: {chosen.tolist()}"


def _latents(heads: int, width: int, block: int, dtype: str) -> tuple[PagedBatch, Tensor]:
    batch = PagedBatch(SPANS, kv_heads=1, share=heads, d=width // 2, block=block, dtype=dtype)
    return batch, normal(dtype, batch.size, heads, width)


def _whole(low: int, high: int, *shape: int, seed: int, dtype: str) -> Tensor:
    return torch.randint(low, high, shape, generator=seeded(seed)).to(DTYPES[dtype])


def _attention(
    batch: PagedBatch, query: Tensor, layer: int, scale: float, rank: int, chosen: Tensor | None
) -> Tensor:
    out = []
    for flat, i, position in batch.tokens():
        entries = batch.kv[i][layer, : position + 1].double()
        if chosen is not None:
            entries = entries[chosen[flat][chosen[flat] >= 0]]
        weights = (query[flat].double() @ entries.T * scale).softmax(-1)
        out.append(weights @ entries[:, :rank])
    return torch.stack(out)
