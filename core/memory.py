"""How much memory this machine can still give. No torch."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

GROUP = Path("/sys/fs/cgroup")  # of a container


def available_host_bytes(group: Path = GROUP) -> int:
    """Bytes that processes can still allocate: the machine's, within the limit of its control group."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Cached files count as used, but make room: a model just written must not stand in its own way.
        used -= int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        return free if limit == "max" else min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        return free


def return_free_memory() -> None:
    """Give freed memory that the allocator keeps back to the system, where the C library can (glibc).

    What loading made and dropped on the way, full-precision layers between their quantized ones, else stays
    resident as holes: 320 MB for a model of 135 million parameters in int8.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
