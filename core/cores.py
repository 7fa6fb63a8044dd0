"""Cores that this process may use, and how the workers of a deployment share them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from bien.core.deployment import HostSpec, PoolSpec
from bien.core.errors import ResourceError

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container


def available_cores(quota_file: Path = QUOTA) -> int:
    """Within the affinity of this process, and the quota of its container."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        count = os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return count


def share_threads(pools: Iterable[PoolSpec], host: HostSpec, available: int) -> tuple[list[int], list[str]]:
    """Threads of one engine of each pool, and warnings.

    Pools that name theirs have them; the others get even shares of the cores that are left, one at least.
    Simulated workers wait and do not count. ResourceError with the numbers where the sum exceeds the cores
    although some worker has more than one thread: thread pools on the same cores wait for each other, which
    costs more than the threads bring. Single threads only take turns, which is a warning.
    """
    pools = list(pools)
    cores = _cores(host, available)
    computing = [pool for pool in pools if pool.executor.use != "simulated"]
    named = sum(pool.engines * _sum(pool, pool.threads) for pool in computing if pool.threads)
    share = _share([pool for pool in computing if not pool.threads], cores - named)
    threads = [pool.threads or max(share, pool.devices) for pool in pools]
    shown = [(pool, n) for pool, n in zip(pools, threads, strict=True) if pool in computing]
    total = sum(pool.engines * _sum(pool, n) for pool, n in shown)
    if total <= cores:
        return threads, []
    parts = "; ".join(_part(pool, n) for pool, n in shown)
    of = f"{cores} cores are offered" + (f" by host.cores (of {available})" if host.cores else "")
    said = f"the workers have {total} threads ({parts}), {of}"
    if host.oversubscribe:
        return threads, [f"{said}: they will wait for each other (host.oversubscribe)"]
    if any(_sum(pool, n) > pool.devices for pool, n in shown):
        raise ResourceError(
            f"{said}; lower threads or count of the pools, leave threads out to share the cores evenly, or "
            "set host.oversubscribe",
            field="threads",
        )
    return threads, [f"{said}: they take turns; lower count to the number of cores for full speed"]


def _share(pools: list[PoolSpec], cores: int) -> int:
    # Workers with more ranks than an even share take one core per rank; the others share what is left.
    share = max(1, cores // max(1, sum(pool.engines for pool in pools)))
    wide = [pool for pool in pools if pool.devices > share]
    if not wide:
        return share
    rest = [pool for pool in pools if pool.devices <= share]
    return _share(rest, cores - sum(pool.engines * pool.devices for pool in wide)) if rest else 1


def _cores(host: HostSpec, available: int) -> int:
    if host.cores is None:
        return available
    if host.cores > available and not host.oversubscribe:
        raise ResourceError(
            f"host.cores is {host.cores}, but this process may use {available} (its affinity and its "
            f"container's quota); valid: 1 to {available}, or set host.oversubscribe",
            field="host.cores",
        )
    return host.cores


def _sum(pool: PoolSpec, threads: int | None) -> int:
    """Of one worker: its ranks divide the threads, and have at least one each."""
    return pool.devices * max(1, (threads or 1) // pool.devices)


def _part(pool: PoolSpec, threads: int) -> str:
    ranks = f"{pool.devices} ranks x " if pool.devices > 1 else ""
    engines = f"{pool.dp_ranks} engines x " if pool.dp_ranks > 1 else ""
    return f"pool {pool.name!r}: {pool.count} x {engines}{ranks}{_sum(pool, threads) // pool.devices}"
