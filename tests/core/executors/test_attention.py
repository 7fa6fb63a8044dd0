"""Paged attention of the torch kernels against the formula, over batches that reach every branch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bien.core.executors.pools import Pool
from bien.core.executors.rows import Rows
from bien.core.kernels import attention
from bien.core.kernels import sinks as with_sinks
from bien.core.kernels.attention import Gathered, Scratch, plan_attention
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.plan import i32
from bien.core.testing.paged import PagedBatch

CPU = torch.device("cpu")
KV_HEADS, SHARE, D = 2, 3, 4
WIDTH = 2 * KV_HEADS * D


class Batch:
    """Sequences of given (start, count) whose blocks lie in the pool as `order` says."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        *,
        block: int = 4,
        window: int = 0,
        order: str = "random",
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        needs = [-(-(start + count) // block) for start, count in spans]
        total = sum(needs) + 5
        group = KVGroup("kv", GroupKind.FULL, (0,), block, WIDTH * 8, window=window, dtype="float64")
        self.pool = Pool.allocate(group, total, CPU)
        self.pool.data.copy_(torch.from_numpy(rng.normal(size=self.pool.data.shape)))
        blocks = np.arange(1, total + 1)
        if order == "random":
            rng.shuffle(blocks)
        elif order == "halves":  # every row lies in two runs
            blocks = np.concatenate([blocks[total // 2 :], blocks[: total // 2]])
        table = np.zeros((len(spans), max(needs) + 2), np.int32)
        at = 0
        for i, n in enumerate(needs):
            table[i, :n] = blocks[at : at + n]
            at += n
        starts, counts = i32([s for s, _ in spans]), i32([c for _, c in spans])
        slots, drafts = i32(list(range(len(spans)))), i32([0] * len(spans))
        self.kernels = TorchKernels()
        self.rows = Rows((self.pool,), (table,), slots, starts, counts, drafts, self.kernels, CPU)
        self.query = torch.from_numpy(rng.normal(size=(self.rows.tokens, KV_HEADS * SHARE, D)))
        self.spans, self.window, self.table, self.block = spans, window, table, block

    def found(self) -> Any:
        return self.rows.attend(0, self.query, 0.7).numpy()

    def exact(self) -> Any:
        flat = self.pool.data[0].numpy().reshape(-1, 2, KV_HEADS, D)
        out, token = [], 0
        for i, (start, count) in enumerate(self.spans):
            for position in range(start, start + count):
                first = max(0, position - self.window + 1) if self.window else 0
                seen = np.arange(first, position + 1)
                kv = flat[self.table[i, seen // self.block] * self.block + seen % self.block]
                heads = []
                for h in range(KV_HEADS * SHARE):
                    scores = 0.7 * kv[:, 0, h // SHARE] @ self.query[token, h].numpy()
                    weights = np.exp(scores - scores.max())
                    heads.append(weights / weights.sum() @ kv[:, 1, h // SHARE])
                out.append(np.concatenate(heads))
                token += 1
        return np.array(out)

    def segments(self) -> list[attention.Segment]:
        return plan_attention(self.rows.group(0), KV_HEADS, SHARE, torch.float64, Scratch())


spans = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 1, 2, 5, 16, 40])), min_size=1, max_size=6
)


@given(
    spans,
    st.sampled_from([1, 4, 8]),
    st.sampled_from([0, 0, 3, 17]),
    st.sampled_from(["random", "halves", "in order"]),
)
def test_equals_the_formula(spans: list[tuple[int, int]], block: int, window: int, order: str) -> None:
    batch = Batch(spans, block=block, window=window, order=order)
    assert np.allclose(batch.found(), batch.exact(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("order", ["random", "halves", "in order"])
def test_long_rows(order: str, count: int, window: int) -> None:
    batch = Batch([(900, count), (30, 1), (850, 1)], window=window, order=order)
    assert np.allclose(batch.found(), batch.exact(), rtol=1e-9, atol=1e-9)


def test_how_rows_are_read() -> None:
    """Long rows in place, in a few runs too; short ones gathered together, like with like."""
    (one,) = Batch([(900, 1)], order="in order").segments()
    assert one.entries == [(4, 901)] and one.mask is None and one.query is None
    (two,) = Batch([(900, 1)], order="halves").segments()
    assert isinstance(two.entries, list) and [n for _, n in two.entries] == [464, 437]
    (many,) = Batch([(900, 1)], order="random").segments()
    assert isinstance(many.entries, Gathered)
    chunk, short, long = Batch([(300, 1), (0, 50), (7, 1), (310, 1), (5, 1)], order="in order").segments()
    assert chunk.causal and chunk.query == slice(1, 51)
    assert (short.sequences, long.sequences) == (2, 2)
    assert isinstance(long.query, torch.Tensor) and long.query.tolist() == [0, 52]
    assert isinstance(long.entries, Gathered) and long.entries.key.shape == (2, KV_HEADS, 312, D)


def test_equal_rows_need_no_mask() -> None:
    (segment,) = Batch([(31, 1), (31, 1)]).segments()
    assert segment.mask is None and segment.query is None


def test_buckets_fit_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCRATCH_BYTES", 3 * 8 * 4 * WIDTH * 8)
    batch = Batch([(28, 1)] * 7)
    assert [s.sequences for s in batch.segments()] == [3, 3, 1]
    assert np.allclose(batch.found(), batch.exact())


def test_garbage_in_other_blocks_is_not_read() -> None:
    batch = Batch([(10, 1), (3, 1), (17, 2)])
    before = batch.found()
    used = {int(b) for b in np.unique(batch.table)} - {0}
    for block in set(range(batch.pool.data.shape[1])) - used:
        batch.pool.data[:, block] = 1e30 * (1 if block % 2 else -1)
    again = Batch([(10, 1), (3, 1), (17, 2)])
    again.pool.data.copy_(batch.pool.data)
    assert np.allclose(again.found(), before, rtol=1e-12) and math.isfinite(float(before.sum()))


@pytest.mark.parametrize("window", [0, 9])
def test_long_chunks_with_sinks_are_taken_in_parts(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_sinks, "SCORES", 3 * 6 * 60)
    for spans in ([(0, 60)], [(7, 50), (3, 2), (60, 1), (9, 2)]):
        for order in ("ascending", "random"):
            batch = PagedBatch(spans, window=window, order=order, dtype="float64")
            sinks = torch.linspace(-2, 3, batch.heads, dtype=torch.float64)
            found = TorchKernels().paged_attention(batch.query, batch.rows(), 1, 0.4, sinks)
            assert torch.allclose(found, batch.exact(1, 0.4, sinks), rtol=0, atol=1e-12)
