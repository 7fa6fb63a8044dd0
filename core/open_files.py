"""The limit on open files: a connection takes one."""

from __future__ import annotations

SPARE = 128  # beside connections: modules, models, pipes, workers


def allow_open_files(connections: int) -> str:
    """Raise this process's soft limit as far as `connections` need and its hard limit lets it. A warning
    with the numbers where that is too low, "" otherwise."""
    try:
        import resource
    except ImportError:  # not on every system
        return ""
    need = connections + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return ""
    most = need if hard == resource.RLIM_INFINITY else min(need, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        most = soft
    if most >= need:
        return ""
    return (
        f"this process may open {most:,} files, {connections:,} connections need {need:,}: raise the hard "
        "limit (ulimit -Hn), or lower gateway.max_inflight"
    )
