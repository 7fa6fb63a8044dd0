"""Conformance of kernels. Subclass `KernelsSuite` with `build()`:

    class TestMine(KernelsSuite):
        int4_tolerance = 0.02

        def build(self) -> Kernels:
            return make(NoParameters(), Context())

Every operation is held against its formula in float64. Errors count in units of the dtype's epsilon, relative
to the largest value of the exact result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bien.core.executors.pools import DTYPES
from bien.core.kernels.base import Kernels
from bien.core.testing.latents import LatentLaws
from bien.core.testing.paged import PagedBatch
from bien.core.testing.products import ProductLaws, int8_weights, normal, seeded

# Rows of one token, of a few, and chunks; at the beginning, over a prefix, and over more than 256 positions.
MIXED = [(0, 1), (37, 1), (5, 3), (0, 15), (0, 16), (21, 40), (63, 2)]
LONG = [(700, 1), (255, 1), (256, 3), (509, 5), (0, 300), (600, 20), (3, 1)]
HEADS = [(1, 1, 64), (2, 3, 32), (3, 3, 64), (2, 1, 16), (1, 4, 128), (2, 2, 8), (2, 3, 24), (1, 2, 40)]
WIDE_HEADS = [(1, 8, 80), (2, 2, 96), (1, 2, 256), (1, 3, 48), (1, 2, 12)]


class KernelsSuite(LatentLaws, ProductLaws):
    """What models rely on, for tensors on the processor."""

    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16")
    tolerance = 32.0  # of everything but quantized products
    batch_tolerance = 16.0  # between a row alone and in company; 0: the same bits
    int8_tolerance = 0.01  # relative to the norms of x and weights: what rounding x to int8 costs
    int4_tolerance = 0.01  # the same; 1e-6 where x stays as it is

    def build(self) -> Kernels:
        """Fresh kernels. unittest.SkipTest where this machine cannot run them."""
        raise NotImplementedError

    # -- the KV pool

    def test_write_kv(self) -> None:
        """Where the tables say, from rows of a wider tensor too, and nowhere else."""
        kernels = self.build()
        for dtype, order, block in self.each(("random", "ascending", "halves"), (1, 4, 64)):
            for spans in ([(9, 1)], [(6, 40)], MIXED):
                batch = PagedBatch(spans, order=order, block=block, dtype=dtype)
                want = batch.pool.data[1].clone()
                new = -batch.new_kv(1)
                for i, (start, count) in enumerate(spans):
                    where = batch.entries(i, torch.arange(start, start + count).numpy())
                    want.view(-1, want.shape[-1])[where] = batch.part(new, i)
                kv = torch.cat([torch.full((len(new), 24), 7.0, dtype=new.dtype), new], 1)[:, 24:]
                kernels.write_kv(batch.pool.flat[1], batch.rows(), kv)
                assert torch.equal(kv, new), "kv has changed"
                found, other = batch.pool.data[1], PagedBatch(spans, order=order, block=block, dtype=dtype)
                assert torch.equal(found, want), f"{spans}, blocks of {block} {order}, {dtype}: wrong entries"
                assert torch.equal(batch.pool.data[0], other.pool.data[0]), "another layer has changed"

    def test_attention_of_every_head_shape(self) -> None:
        kernels = self.build()
        for kv_heads, share, d in HEADS + WIDE_HEADS:
            self._attend(kernels, PagedBatch(MIXED, kv_heads=kv_heads, share=share, d=d), f"width {d}")

    def test_attention_of_every_layout(self) -> None:
        kernels = self.build()
        for dtype, order, block in self.each(("random", "ascending", "halves"), (1, 3, 16, 64)):
            batch = PagedBatch(MIXED, order=order, block=block, dtype=dtype)
            self._attend(kernels, batch, f"blocks of {block}, {order}")

    def test_attention_in_windows(self) -> None:
        kernels = self.build()
        for dtype, window, d in self.each((1, 3, 16, 40, 300), (12, 64)):
            for spans in (MIXED, LONG):
                batch = PagedBatch(spans, window=window, d=d, dtype=dtype, kv_heads=1, share=2)
                self._attend(kernels, batch, f"window {window}")

    def test_attention_over_long_rows(self) -> None:
        kernels = self.build()
        for dtype, order in self.each(("random", "ascending", "halves")):
            batch = PagedBatch(LONG, order=order, block=16, dtype=dtype)
            self._attend(kernels, batch, f"long rows, {order}")
        for span in [*LONG, (1023, 1), (1024, 1), (767, 2)]:
            self._attend(kernels, PagedBatch([span], d=64, block=16), f"row {span} alone")

    def test_attention_with_sinks(self) -> None:
        """Over every layout and window, of a step that other layers attend in without."""
        kernels = self.build()
        for dtype, window, order in self.each((0, 3, 40), ("random", "halves")):
            for spans in (MIXED, LONG, LONG[:1], [(64, 20)], [(0, 33)], [(700, 3)]):
                batch = PagedBatch(spans, window=window, order=order, block=16, dtype=dtype)
                sinks = 3 * normal(dtype, batch.heads)
                before, rows = sinks.clone(), batch.rows()
                found = kernels.paged_attention(batch.query, rows, 1, 0.3, sinks)
                assert found.dtype == batch.query.dtype
                self.near(found, batch.exact(1, 0.3, sinks), f"sinks, {spans}, window {window}", dtype)
                assert torch.equal(sinks, before), "the sinks have changed"
                found = kernels.paged_attention(batch.query, rows, 0, 0.3)
                self.near(found, batch.exact(0, 0.3), "a layer without sinks", dtype)

    def test_attention_without_the_first_positions(self) -> None:
        """They have no entries: whatever lies there is not seen, and who sees nothing gets zeros."""
        kernels = self.build()
        for dtype, skip, window in self.each((1, 2), (0, 3)):
            for spans in (MIXED, [(0, 20)], [(700, 1)]):
                batch = PagedBatch(spans, window=window, dtype=dtype)
                found = kernels.paged_attention(batch.query, batch.rows(skip), 1, 0.3)
                what = f"{spans} without the first {skip} positions, window {window}"
                self.near(found, batch.exact(1, 0.3, skip=skip), what, dtype)

    def test_attention_of_blocks(self) -> None:
        """With the step's own keys and values given beside what is stored, and a causal mask, it is that of
        the step; what the pool holds behind a sequence's first row is not seen."""
        kernels = self.build()
        for dtype, window, order in self.each((0, 3, 40), ("random", "ascending")):
            for spans in (MIXED, [(700, 5), (20, 2)], [(0, 4)]):
                batch = PagedBatch(spans, window=window, order=order, dtype=dtype)
                most = int(batch.counts.max())
                query = batch.query.new_zeros(len(spans), most, batch.heads, batch.d)
                new = batch.new_kv(1)
                kv = new.new_zeros(len(spans), most, new.shape[-1])
                seen = torch.ones(most, most, dtype=torch.bool).tril()
                if window:
                    seen &= ~torch.ones(most, most, dtype=torch.bool).tril(-window)
                for i, (_, count) in enumerate(spans):
                    query[i, :count], kv[i, :count] = batch.part(batch.query, i), batch.part(new, i)
                for sinks in (None, normal(dtype, batch.heads)):
                    rows = batch.rows()
                    out = kernels.block_attention(query, kv, rows, 1, 0.3, seen[None], None, sinks)
                    found = torch.cat([out[i, :count] for i, (_, count) in enumerate(spans)])
                    self.near(found, batch.exact(1, 0.3, sinks), f"blocks, {spans}, window {window}", dtype)

    def test_attention_of_queries_inside_a_wider_tensor(self) -> None:
        kernels = self.build()
        for dtype, d in self.each((24, 64)):
            batch = PagedBatch(MIXED, d=d, dtype=dtype)
            wide = torch.full((len(batch.query), batch.heads + 4, d), 1e30, dtype=batch.query.dtype)
            wide[:, : batch.heads] = batch.query
            found = kernels.paged_attention(wide[:, : batch.heads], batch.rows(), 1, 0.3)
            self.near(found, batch.exact(1, 0.3), "attention of a slice")

    def test_attention_of_layers_in_one_step(self) -> None:
        """Layers share a step, not their scale; a second step over the same pool is a new one."""
        kernels = self.build()
        batch = PagedBatch(MIXED)
        rows = batch.rows()
        for layer, scale in ((0, 0.7), (1, 0.2), (0, 0.05)):
            found = kernels.paged_attention(batch.query, rows, layer, scale)
            self.near(found, batch.exact(layer, scale), f"layer {layer} with scale {scale}")
        other = PagedBatch([(2, 1), (30, 17)])
        found = kernels.paged_attention(other.query, other.rows(), 1, 0.7)
        self.near(found, other.exact(1, 0.7), "the step after it")

    def test_attention_sees_nothing_else(self) -> None:
        """Finite garbage in other blocks and behind a row's end makes no difference, not a bit."""
        kernels = self.build()
        for window in (0, 20):
            found = []
            for garbage in (0.0, 1e30, -1e30):
                batch = PagedBatch(MIXED + LONG, window=window, garbage=garbage, block=16, d=64)
                found.append(kernels.paged_attention(batch.query, batch.rows(), 1, 0.3))
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), "garbage is seen"

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        kernels = self.build()
        for window in (0, 40):
            batch = PagedBatch(MIXED + LONG, window=window, d=64)
            together = kernels.paged_attention(batch.query, batch.rows(), 1, 0.3)
            for i, span in enumerate(batch.spans):
                alone = PagedBatch([span], window=window, d=64)
                found = kernels.paged_attention(alone.query, alone.rows(), 1, 0.3)
                error = float((found - batch.part(together, i)).abs().max() / found.abs().max())
                bound = self.batch_tolerance * torch.finfo(found.dtype).eps
                assert error <= bound, f"row {span} differs in company by {error:.2g}, above {bound:.2g}"

    def test_attention_leaves_its_inputs_alone(self) -> None:
        batch = PagedBatch(MIXED)
        before = [t.clone() for t in (batch.query, batch.pool.data)]
        self.build().paged_attention(batch.query, batch.rows(), 1, 0.3)
        assert torch.equal(batch.query, before[0]), "the queries have changed"
        assert torch.equal(batch.pool.data, before[1]), "the pool has changed"

    # -- token by token

    def test_rms_norm(self) -> None:
        kernels = self.build()
        for dtype, width, tokens in self.each((1, 7, 16, 33, 576), (0, 1, 3, 40)):
            for size, eps in ((1.0, 1e-5), (1e-4, 1e-5), (30.0, 1e-6)):
                x, weight = normal(dtype, tokens, width) * size, normal(dtype, width)
                before = [x.clone(), weight.clone()]
                what = f"rms_norm of {tokens} x {width}"
                self.near(kernels.rms_norm(x, weight, eps), _norm(x, weight, eps), what)
                assert torch.equal(x, before[0]) and torch.equal(weight, before[1]), "rms_norm changes inputs"
        for dtype in self.dtypes:  # per head, of a slice
            x, weight = normal(dtype, 5, 7, 12)[:, 2:6], normal(dtype, 12)
            self.near(kernels.rms_norm(x, weight, 1e-5), _norm(x, weight, 1e-5), "rms_norm of a slice")

    def test_add_rms_norm(self) -> None:
        kernels = self.build()
        for dtype, width, tokens in self.each((7, 16, 33, 576), (0, 1, 3, 40)):
            both = normal(dtype, tokens, 2 * width)
            for x, update in ((both[:, :width], both[:, width:]), both.view(2, tokens, width).unbind()):
                weight = normal(dtype, width)
                before = [x.clone(), update.clone()]
                total, found = kernels.add_rms_norm(x, update, weight, 1e-5)
                assert torch.equal(x, before[0]) and torch.equal(update, before[1]), "an argument has changed"
                self.near(total, x.double() + update.double(), "the sum of add_rms_norm")
                self.near(found, _norm(x.double() + update.double(), weight, 1e-5), "add_rms_norm")

    def test_rope(self) -> None:
        """In place, on a slice; what lies beside the slice stays."""
        kernels = self.build()
        for dtype, d, tokens in self.each((2, 6, 8, 12, 64, 80), (0, 1, 3, 16, 40)):
            wide = normal(dtype, tokens, 7, d)
            for first, heads in ((0, 7), (1, 5), (3, 1)):
                found = wide.clone()
                angle = torch.rand(tokens, 1, d // 2, generator=seeded(3)) * 6.3
                angle = angle.double() if dtype == "float64" else angle
                turn = torch.polar(torch.ones_like(angle), angle)
                kernels.rope(found[:, first : first + heads], turn)
                pairs = wide.double().view(tokens, 7, d // 2, 2)[:, first : first + heads]
                want = wide.double()
                turned = torch.view_as_complex(pairs.contiguous()) * turn.to(torch.complex128)
                want[:, first : first + heads] = torch.view_as_real(turned).flatten(-2)
                self.near(found, want, f"rope of {heads} heads of {d}, {tokens} tokens", dtype)
                outside = [slice(0, first), slice(first + heads, 7)]
                assert all(torch.equal(found[:, s], wide[:, s]) for s in outside), "rope turns other heads"

    def test_silu_mul(self) -> None:
        kernels = self.build()
        for dtype, width, tokens in self.each((1, 7, 16, 33, 80), (0, 1, 3, 40)):
            x = normal(dtype, tokens, 2 * width) * 3
            before = x.clone()
            self.near(kernels.silu_mul(x), _silu(x), f"silu_mul of {tokens} x {width}")
            assert torch.equal(x, before), "silu_mul changes its input"
            part = normal(dtype, tokens, 2 * width + 3)[:, 1:-2]
            self.near(kernels.silu_mul(part), _silu(part), "silu_mul of a slice")
        for dtype in self.dtypes:
            for gate in (-100.0, -88.5, -20.0, 0.0, 20.0, 88.5, 100.0):
                x = torch.tensor([[gate] * 17 + [1.5] * 17], dtype=DTYPES[dtype])
                self.near(kernels.silu_mul(x), _silu(x), f"silu_mul at {gate}", floor=1e-30)

    # -- the object

    def test_objects_are_apart(self) -> None:
        """Closing one executor's kernels does not touch another's."""
        first, second = self.build(), self.build()
        batch = PagedBatch(MIXED)
        layer = first.int8_linear(*int8_weights(96, 40, "float32"))
        x = normal("float32", 4, 96)
        want, seen = layer(x).clone(), first.paged_attention(batch.query, batch.rows(), 1, 0.3).clone()
        self._attend(second, PagedBatch(LONG), "a second object")
        second.close()
        assert torch.equal(layer(x), want)
        assert torch.equal(first.paged_attention(batch.query, batch.rows(), 1, 0.3), seen)
        first.close()

    def _attend(self, kernels: Kernels, batch: PagedBatch, what: str) -> None:
        found = kernels.paged_attention(batch.query, batch.rows(), 1, 0.3)
        assert found.dtype == batch.query.dtype, f"{what}: {batch.query.dtype} gives {found.dtype}"
        self.near(found, batch.exact(1, 0.3), f"attention, {what}")


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _silu(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    return gate * gate.sigmoid() * up
