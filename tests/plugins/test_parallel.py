"""The built-in parallel strategies."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.architectures.base import Architecture
from bien.core.errors import PluginFault, UserError
from bien.core.parallel.strategy import ParallelStrategy
from bien.core.providers import Context, NoParameters
from bien.core.testing.parallel import ARCHITECTURE, ParallelSuite, ThreadCommunicator
from bien.plugins.parallel.single import Single
from bien.plugins.parallel.tensor import TensorParallel, make


class TestSingle(ParallelSuite):
    worlds = (1,)
    illegal = (0, 2, 8)

    def build(self, rank: int, world: int) -> ParallelStrategy:
        return Single()


class TestTensor(ParallelSuite):
    worlds = (1, 2, 3, 4)  # 3: unequal parts
    illegal = (0, 5, 6, 16)

    def build(self, rank: int, world: int) -> ParallelStrategy:
        if rank == 0:
            self.communicators = ThreadCommunicator.of(world)
        strategy = TensorParallel(ARCHITECTURE)
        if world > 1:
            strategy.connect(self.communicators[rank])
        return strategy


def ranks(architecture: Architecture, world: int) -> list[TensorParallel]:
    found = [TensorParallel(architecture) for _ in range(world)]
    for strategy, communicator in zip(found, ThreadCommunicator.of(world), strict=True):
        strategy.connect(communicator)
    return found


def held(slices: list[slice], size: int) -> list[int]:
    return [i for s in slices for i in range(*s.indices(size))]


@given(
    kv_heads=st.integers(1, 6),
    share=st.integers(1, 4),
    world=st.integers(1, 12),
    width=st.integers(1, 300),
    vocabulary=st.integers(1, 300),
)
def test_any_legal_size_cuts_without_overlap_or_loss(
    kv_heads: int, share: int, world: int, width: int, vocabulary: int
) -> None:
    a = msgspec.structs.replace(
        ARCHITECTURE, heads=kv_heads * share, kv_heads=kv_heads, vocab_size=vocabulary
    )
    try:
        TensorParallel(a).mesh(world)
    except UserError:
        assert world > kv_heads, "as many ranks as KV heads, or fewer, always work"
        return
    every = ranks(a, world)
    d, prefix = a.head_dim, "model.layers.3."
    queries = [s.shard(prefix + "self_attn.q_proj.weight", (a.heads * d, 7))[0] for s in every]
    assert held(queries, a.heads * d) == list(range(a.heads * d))
    assert [s.shard(prefix + "self_attn.o_proj.weight", (7, a.heads * d))[1] for s in every] == queries
    assert [s.shard(prefix + "self_attn.q_proj.bias", (a.heads * d,))[0] for s in every] == queries
    for s, rows in zip(every, queries, strict=True):
        heads = s.kv_shard(kv_heads)
        assert len(heads) >= 1
        used = {row // d // share for row in range(rows.start, rows.stop)}
        assert used == set(heads), "a rank holds the keys and values that its queries read"
        for name in ("k", "v"):
            cut = s.shard(f"{prefix}self_attn.{name}_proj.weight", (kv_heads * d, 7))
            assert cut == (slice(heads.start * d, heads.stop * d), slice(0, 7))
    features = [s.shard(prefix + "mlp.up_proj.weight", (width, 7))[0] for s in every]
    assert held(features, width) == list(range(width))
    assert [s.shard(prefix + "mlp.down_proj.weight", (7, width))[1] for s in every] == features
    words = [s.shard("model.embed_tokens.weight", (vocabulary, 7))[0] for s in every]
    assert held(words, vocabulary) == list(range(vocabulary))
    assert [s.shard("lm_head.weight", (vocabulary, 7))[0] for s in every] == words
    assert all(a.stop == b.start for a, b in pairwise(words))


def test_a_bias_behind_a_sum_is_held_once() -> None:
    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
        cuts = [s.shard(f"model.layers.0.{name}", (24,))[0] for s in ranks(ARCHITECTURE, 4)]
        assert [len(range(24)[cut]) for cut in cuts] == [24, 0, 0, 0]


def test_features_stay_in_runs() -> None:
    cuts = [s.shard("model.layers.0.mlp.up_proj.weight", (1536, 8))[0] for s in ranks(ARCHITECTURE, 4)]
    assert [(c.start, c.stop) for c in cuts] == [(0, 384), (384, 768), (768, 1152), (1152, 1536)]
    cuts = [s.shard("model.layers.0.mlp.up_proj.weight", (1280, 8))[0] for s in ranks(ARCHITECTURE, 4)]
    assert [c.start % 128 for c in cuts] == [0, 0, 0, 0]


def test_refused_sizes_name_the_legal_ones() -> None:
    a = msgspec.structs.replace(ARCHITECTURE, heads=12, kv_heads=3)
    with pytest.raises(UserError, match=r"12 attention heads \(3 of .* valid: devices = 1, 2, 3, 6, 12$"):
        TensorParallel(a).mesh(5)
    with pytest.raises(UserError, match="devices = 1, 2, 3, 6, 12"):
        TensorParallel(a).connect(ThreadCommunicator.of(7)[0])


def test_layers_that_it_does_not_know_are_refused() -> None:
    other = msgspec.structs.replace(ARCHITECTURE, name="mamba")
    assert TensorParallel(other).mesh(1).world == 1
    with pytest.raises(
        UserError,
        match="cannot cut models of architecture 'mamba'.*qwen3_moe, glm4_moe, gpt_oss",
    ):
        TensorParallel(other).mesh(2)


def test_it_needs_an_architecture() -> None:
    with pytest.raises(PluginFault, match="needs the architecture"):
        make(NoParameters(), Context())
    assert make(NoParameters(), replace(Context(), architecture=ARCHITECTURE)).mesh(2).world == 2
