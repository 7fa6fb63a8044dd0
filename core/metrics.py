"""Workers' counters for Prometheus, read from the `WorkerStats` that every step frame carries."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bien.core.worker.messages import WorkerStats

GAUGES = {
    "running": "Sequences with KV.",
    "waiting": "Sequences without KV.",
    "queued_tokens": "Uncomputed prompt tokens of waiting and running sequences.",
    "used_blocks": "Blocks of the first KV group that running sequences hold.",
    "cached_blocks": "Cached blocks of the first KV group that no sequence holds.",
    "total_blocks": "Blocks in the pool of the first KV group.",
    "store_bytes": "Bytes in the KV store below the pools.",
}
COUNTERS = {
    "steps": "Engine steps.",
    "computed_tokens": "Positions computed, prompts and outputs.",
    "output_tokens": "Tokens generated.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "cached_tokens": "Prompt tokens found in a cache.",
    "preemptions": "Sequences that lost their KV and were recomputed.",
    "drafted": "Draft tokens verified.",
    "accepted": "Draft tokens accepted.",
    "rounds": "Verification rounds with drafts.",
    "finished": "Requests that ended.",
    "busy_seconds": "Seconds spent in steps.",
}


class WorkerMetrics:
    """Registers itself; nothing is computed until a scrape. Label: `worker`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._latest: dict[str, WorkerStats] = {}  # by worker id, written by `update`
        registry.register(self)

    def update(self, worker: str, stats: WorkerStats) -> None:
        """The newest load of a worker."""
        self._latest[worker] = stats

    def forget(self, worker: str) -> None:
        """The worker is gone; its series end."""
        self._latest.pop(worker, None)

    def collect(self) -> Iterator[Metric]:
        """One family per figure, one sample per live worker."""
        for name, text in GAUGES.items():
            yield self._filled(GaugeMetricFamily(f"bien_worker_{name}", text, labels=["worker"]), name)
        for name, text in COUNTERS.items():
            yield self._filled(CounterMetricFamily(f"bien_worker_{name}", text, labels=["worker"]), name)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, name: str) -> Metric:
        for worker, stats in self._latest.items():
            family.add_metric([worker], getattr(stats, name))
        return family
