"""Threads: never more than cores, unless they are single."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.cores import available_cores, share_threads
from bien.core.deployment import HostSpec, PoolSpec, Selection
from bien.core.errors import ResourceError

SIMULATED = Selection("simulated")


def share(cores: int, *pools: PoolSpec) -> list[int]:
    return share_threads(pools, HostSpec(), cores)[0]


def test_cores_are_shared_by_all_workers() -> None:
    assert share(8, PoolSpec(count=2)) == [4]
    assert share(8, PoolSpec(count=2), PoolSpec("b")) == [2, 2]
    assert share(8, PoolSpec(count=2, threads=3), PoolSpec("b", count=1)) == [3, 2]
    assert share(8, PoolSpec(count=1), PoolSpec("b", count=5, executor=SIMULATED))[0] == 8
    assert share_threads([PoolSpec()], HostSpec(cores=2), 8)[0] == [2]


@given(
    st.integers(1, 32),
    st.lists(
        st.builds(
            PoolSpec,
            count=st.integers(1, 5),
            devices=st.integers(1, 3),
            threads=st.none() | st.integers(1, 8),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_no_core_has_two_threads_of_a_team(cores: int, pools: list[PoolSpec]) -> None:
    def total(threads: list[int]) -> int:
        return sum(p.count * p.devices * max(1, n // p.devices) for p, n in zip(pools, threads, strict=True))

    try:
        threads, warnings = share_threads(pools, HostSpec(), cores)
    except ResourceError:
        assert any(p.threads and p.threads >= 2 * p.devices for p in pools), "only what was asked for"
        forced, warnings = share_threads(pools, HostSpec(oversubscribe=True), cores)
        assert total(forced) > cores and len(warnings) == 1
        return
    assert (total(threads) > cores) == bool(warnings)
    if warnings:
        assert all(n // p.devices <= 1 for p, n in zip(pools, threads, strict=True))


def test_the_refusal_has_the_numbers() -> None:
    said = (
        r"the workers have 7 threads \(pool 'main': 2 x 3; pool 'b': 1 x 1\), 4 cores are offered; "
        "lower threads or count"
    )
    with pytest.raises(ResourceError, match=said):
        share(4, PoolSpec(count=2, threads=3), PoolSpec("b"))
    with pytest.raises(ResourceError, match=r"1 x 2 ranks x 2\), 3 cores are offered"):
        share(3, PoolSpec(devices=2, threads=4))
    with pytest.raises(ResourceError, match=r"host.cores is 9, but this process may use 4 .*valid: 1 to 4"):
        share_threads([PoolSpec()], HostSpec(cores=9), 4)
    with pytest.raises(ResourceError, match=r"2 cores are offered by host.cores \(of 4\)"):
        share_threads([PoolSpec(threads=3)], HostSpec(cores=2), 4)


def test_more_workers_than_cores_take_turns() -> None:
    threads, warnings = share_threads([PoolSpec(count=3)], HostSpec(), 2)
    assert threads == [1]
    assert warnings == [
        "the workers have 3 threads (pool 'main': 3 x 1), 2 cores are offered: they take turns; "
        "lower count to the number of cores for full speed"
    ]
    assert share_threads([PoolSpec(count=1000, executor=SIMULATED, threads=8)], HostSpec(), 2) == ([8], [])


def test_a_quota_counts(tmp_path: Path) -> None:
    own = len(os.sched_getaffinity(0))
    for text, cores in (
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("max 100000", own),
        ("9900000 100000", 0),
    ):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert available_cores(tmp_path / "cpu.max") == (cores or min(own, 99))
    assert available_cores(tmp_path / "none") == own
