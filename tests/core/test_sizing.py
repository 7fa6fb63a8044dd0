"""From bytes to tokens, over groups of every kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.deployment import PoolSpec
from bien.core.errors import DeploymentError
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.sizing import kv_bytes, pool_blocks, sized

FULL = KVGroup("full", GroupKind.FULL, (0, 1), 16, bytes_per_token=100)
WINDOW = KVGroup("window", GroupKind.WINDOW, (2,), 16, bytes_per_token=30, window=64)
STATE = KVGroup("state", GroupKind.STATE, (3,), 16, constant_bytes=5000, croppable=False)


@given(
    st.integers(0, 10**7),
    st.lists(st.sampled_from([FULL, WINDOW, STATE]), min_size=1, unique_by=lambda g: g.name),
    st.integers(1, 20),
    st.integers(0, 20),
)
def test_it_holds_as_many_blocks_as_there_is_room_for(
    memory: int, groups: list[KVGroup], slots: int, snapshots: int
) -> None:
    pool = PoolSpec(kv_memory=memory, slots=slots, snapshots=snapshots)
    try:
        spec = sized(pool, groups)
    except DeploymentError as error:
        least = int(str(error).rpartition(" ")[2].replace(",", ""))
        assert memory < least
        spec = sized(PoolSpec(kv_memory=least, slots=slots, snapshots=snapshots), groups)
        assert kv_bytes(groups, spec) <= least
        return
    assert spec.kv_memory is None and spec.kv_tokens is not None and spec.kv_tokens % 16 == 0
    assert kv_bytes(groups, spec) <= memory
    if any(g.paged for g in groups):
        each = sum(g.block_bytes for g in groups if g.paged)
        assert kv_bytes(groups, spec) + each > memory, "one more block of every group would not fit"
        assert len({pool_blocks(g, spec) for g in groups if g.paged}) == 1, "they end together"
    if STATE in groups:
        assert pool_blocks(STATE, spec) == slots + snapshots


def test_tokens_stay() -> None:
    pool = PoolSpec(kv_tokens=333)
    assert sized(pool, [FULL]) is pool


def test_the_refusal_has_the_numbers() -> None:
    said = (
        r"pool 'main': kv_memory is 4,000 bytes; states take 25,000, null blocks 1,600, 16 tokens 1,600; .*"
    )
    with pytest.raises(DeploymentError, match=said + "at least 28,200") as caught:
        sized(PoolSpec(kv_memory=4000, slots=3, snapshots=1), [FULL, STATE])
    assert caught.value.field == "kv_memory"
