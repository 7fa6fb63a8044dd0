"""Attention of blocks of queries, and positions that have no entries, against the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.errors import PluginFault
from bien.core.executors.pools import Pool
from bien.core.executors.rows import Rows
from bien.core.kernels import block
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.kv.groups import GroupKind, KVGroup, boundary_group
from bien.core.plan import i32

CPU = torch.device("cpu")
KV_HEADS, SHARE, D = 2, 3, 4
HEADS, WIDTH = KV_HEADS * SHARE, 2 * KV_HEADS * D


def make_rows(spans: list[tuple[int, int]], *, window: int = 0, size: int = 4, extra: Any = ()) -> Rows:
    """Sequences of (start, count) over blocks in random order, which hold noise, the null block included."""
    rng = np.random.default_rng(3)
    group = KVGroup("kv", GroupKind.FULL, (0, 1), size, WIDTH * 16, window=window, dtype="float64")
    each = max(-(-(start + count) // size) for start, count in spans) + 1
    groups = (group, *extra)
    pools = tuple(Pool.allocate(g, len(spans) * each, CPU) for g in groups)
    for pool in pools:
        pool.data.copy_(torch.from_numpy(rng.normal(size=pool.data.shape)))
    tables = tuple(
        (rng.permutation(len(spans) * each) + 1).astype(np.int32).reshape(-1, each) for _ in groups
    )
    starts, counts = i32([s for s, _ in spans]), i32([c for _, c in spans])
    slots, none = i32(list(range(len(spans)))), i32([0] * len(spans))
    return Rows(pools, tables, slots, starts, counts, none, TorchKernels(), CPU)


def stored(rows: Rows, layer: int, i: int, positions: Any) -> Any:
    size, table = rows.pools[0].group.block_tokens, rows.tables[0]
    flat = rows.pools[0].data[layer].numpy().reshape(-1, WIDTH)
    return flat[table[i, positions // size] * size + positions % size]


def softmax_of(query: Any, entries: Any, scale: float, sinks: Any = None) -> Any:
    """One query [heads, d] over entries [L, width], in plain loops."""
    kv, out = entries.reshape(-1, 2, KV_HEADS, D), []
    for h in range(HEADS):
        scores = scale * kv[:, 0, h // SHARE] @ query[h]
        weights, total = np.exp(scores), np.exp(scores).sum()
        total += 0 if sinks is None else np.exp(sinks[h])
        out.append(weights @ kv[:, 1, h // SHARE] / total if total else np.zeros(D))
    return np.concatenate(out)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(0, 5),
    st.sampled_from([0, 0, 3, 17]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from(["all", "shared", "own"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 4, 16]),
)
def test_blocks_equal_the_formula(
    starts: list[int],
    queries: int,
    given_entries: int,
    window: int,
    skip: int,
    masked: str,
    deep: bool,
    with_sinks: bool,
    size: int,
) -> None:
    rng = np.random.default_rng(len(starts) * 100 + queries)
    rows = make_rows([(s, 1) for s in starts], window=window, size=size).redirect(0, skip=skip)
    many = len(starts)
    query = rng.normal(size=(many, queries, HEADS, D))
    kv = rng.normal(size=(many, given_entries, WIDTH))
    mask = None
    if masked != "all":
        mask = rng.random((1 if masked == "shared" else many, queries, given_entries)) < 0.5
    positions = np.array(starts)[:, None] + (
        rng.integers(0, 9, (many, queries)) if deep else np.arange(queries)
    )
    sinks = rng.normal(size=HEADS) if with_sinks else None
    found = rows.attend_block(
        1,
        torch.from_numpy(query),
        torch.from_numpy(kv),
        0.7,
        None if mask is None else torch.from_numpy(mask),
        torch.from_numpy(positions) if deep else None,
        None if sinks is None else torch.from_numpy(sinks),
    ).numpy()
    assert found.shape == (many, queries, HEADS * D)
    for i in range(many):
        for q in range(queries):
            first = max(skip, positions[i, q] - window + 1 if window else 0)
            context = stored(rows, 1, i, np.arange(first, starts[i], dtype=np.int64))
            seen = kv[i] if mask is None else kv[i][mask[i if masked == "own" else 0, q]]
            want = softmax_of(query[i, q], np.concatenate([context, seen]), 0.7, sinks)
            np.testing.assert_allclose(found[i, q], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("window", "skip"), [(0, 0), (0, 2), (9, 0)])
def test_runs_are_read_in_place(monkeypatch: pytest.MonkeyPatch, window: int, skip: int) -> None:
    """Of two long sequences the one whose blocks lie in a run, between others that are gathered."""
    rows = make_rows([(30, 1), (33, 1), (3, 1), (0, 1)], window=window)
    for table in rows.tables:
        table[1] = np.arange(len(table[1])) + 2
    rng = np.random.default_rng(4)
    query = torch.from_numpy(rng.normal(size=(4, 3, HEADS, D)))
    kv = torch.from_numpy(rng.normal(size=(4, 2, WIDTH)))
    found, read = [], []
    for tokens in (1000, 8):
        monkeypatch.setattr(block, "VIEW_TOKENS", tokens)
        own = rows.redirect(0, skip=skip)
        own._groups = {}
        found.append(own.attend_block(1, query, kv, 0.3))
        read.append([p.blocks for p in own.group(0).plans["block"] if isinstance(p.blocks, slice)])
    assert [len(r) for r in read] == [0, 1]
    assert torch.allclose(found[0], found[1], rtol=1e-12)


def test_many_scores_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows([(20, 1), (7, 1)], window=9)
    query, kv = torch.randn(2, 7, HEADS, D).double(), torch.randn(2, 7, WIDTH).double()
    mask = torch.rand(2, 7, 7) < 0.5
    whole = rows.attend_block(0, query, kv, 0.5, mask)
    monkeypatch.setattr(block, "SCORES", 1)
    monkeypatch.setattr(block, "GATHERED", 1)
    again = make_rows([(20, 1), (7, 1)], window=9)
    assert torch.allclose(again.attend_block(0, query, kv, 0.5, mask), whole, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 5, 16, 30])), min_size=1, max_size=5),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 3, 17]),
    st.sampled_from([1, 4, 16]),
    st.booleans(),
)
def test_skipped_positions_are_not_seen(
    spans: list[tuple[int, int]], skip: int, window: int, size: int, with_sinks: bool
) -> None:
    plain = make_rows(spans, window=window, size=size)
    rows = plain.redirect(0, skip=skip)
    query = torch.randn(rows.tokens, HEADS, D, generator=torch.Generator().manual_seed(5)).double()
    sinks = torch.linspace(-1, 1, HEADS).double() if with_sinks else None
    plain.attend(0, query, 0.7, sinks)  # what others derive from the same step is not taken for it
    found = rows.attend(0, query, 0.7, sinks).numpy()
    token = 0
    for i, (start, count) in enumerate(spans):
        for position in range(start, start + count):
            first = max(skip, position - window + 1 if window else 0)
            seen = stored(rows, 0, i, np.arange(first, position + 1, dtype=np.int64))
            want = softmax_of(query[token].numpy(), seen, 0.7, None if sinks is None else sinks.numpy())
            if position < skip:
                want = np.zeros(HEADS * D)
            np.testing.assert_allclose(found[token], want, rtol=1e-9, atol=1e-9)
            token += 1


@pytest.mark.parametrize("count", [None, 3])
def test_latents_of_skipped_positions_are_not_seen(count: int | None) -> None:
    rows = make_rows([(0, 6), (5, 3), (9, 1)]).redirect(0, skip=2)
    query = torch.randn(10, 3, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    chosen = None
    if count is not None:
        rows.layers[0, "keys"] = (0, 1)
        chosen = rows.choose(0, query, torch.ones(10, 3).double(), count, "keys")
        assert not bool(((chosen >= 0) & (chosen < 2)).any())
        assert chosen[:2].tolist() == [[-1] * 3] * 2 and chosen[2].tolist() == [2, -1, -1]
    found = rows.attend_latent(0, query, 0.3, 5, chosen)
    token = 0
    for i, (start, many) in enumerate([(0, 6), (5, 3), (9, 1)]):
        for position in range(start, start + many):
            seen = np.arange(2, position + 1)
            if chosen is not None:
                seen = np.array([p for p in chosen[token].tolist() if p >= 0], np.int64)
            entries = torch.from_numpy(stored(rows, 0, i, seen))
            weights = torch.softmax(0.3 * query[token] @ entries.T, -1)
            assert torch.allclose(found[token], weights @ entries[:, :5], rtol=1e-9, atol=1e-9)
            token += 1


# -- states at the ends of blocks


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("width", [3, 16, 21])
def test_boundaries_are_those_of_the_position_before(size: int, width: int) -> None:
    group = boundary_group("boundary", width, size, "float64")
    assert group.kind is GroupKind.DRAFT and not group.shardable
    assert group.block_bytes >= width * 8
    rows = make_rows([(0, 30)], size=size, extra=(group,))
    states = torch.arange(30.0).double()[:, None] + torch.zeros(width).double()
    at = 0
    for count, taken in ((5, 5), (1, 1), (4, 2), (9, 9), (3, 1), (4, 4)):
        part = Rows(rows.pools, rows.tables, rows.slots, i32([at]), i32([count]), i32([0]), rows.kernels, CPU)
        found = part.load_boundary(1)
        assert found.tolist() == [[max(0.0, at - 1.0)] * width]
        wrong = states[at : at + count].clone()
        wrong[taken:] += 100  # rejected drafts
        part.store_boundary(1, wrong, torch.tensor([taken]))
        at += taken
    for end in range(size, at + 1, size):  # what prefix hits find: the ends of full blocks
        part = Rows(rows.pools, rows.tables, rows.slots, i32([end]), i32([1]), i32([0]), rows.kernels, CPU)
        assert part.load_boundary(1).tolist() == [[end - 1.0] * width]


def test_boundaries_of_several_sequences() -> None:
    group = boundary_group("boundary", 5, 4, "float64")
    rows = make_rows([(0, 3), (6, 4), (4, 1)], extra=(group,))
    before = rows.pools[1].data.clone()
    states = torch.randn(8, 5).double()
    rows.store_boundary(1, states, torch.tensor([3, 0, 1]))
    after = Rows(
        rows.pools, rows.tables, rows.slots, i32([3, 6, 5]), i32([1, 1, 1]), i32([0] * 3), rows.kernels, CPU
    ).load_boundary(1)
    assert torch.equal(after[0], states[2]) and torch.equal(after[2], states[7])
    assert int((rows.pools[1].data != before).any(-1).any(-1).sum()) == 2, "other blocks were written"


def test_rows_know_their_tokens() -> None:
    rows = make_rows([(3, 2), (1, 1)])
    with pytest.raises(PluginFault, match="have no token ids"):
        _ = rows.ids
    after = rows.redirect(0, skip=1).next(torch.tensor([7, 9]))
    assert after.ids.tolist() == [7, 9] and after.skip == 1 and after.starts.tolist() == [5, 2]
