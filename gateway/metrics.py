"""What the gateway counts. Counts are plain numbers, read when somebody scrapes; only distributions
(three observations per request) touch the metrics library on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bien.core.speculation.counts import SourceCounts
from bien.core.worker.messages import WorkerStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


@dataclass(slots=True)
class Compared:
    """Cached tokens of one worker's requests, since it first joined."""

    predicted: int = 0
    found: int = 0
    over: int = 0  # predicted and not found
    under: int = 0  # found and not predicted

    def add(self, predicted: int, found: int) -> None:
        self.predicted += predicted
        self.found += found
        if predicted > found:
            self.over += predicted - found
        else:
            self.under += found - predicted

    def join(self, other: Compared) -> None:
        self.predicted += other.predicted
        self.found += other.found
        self.over += other.over
        self.under += other.under

    @property
    def parity(self) -> float:
        """As of `Totals`."""
        return 1.0 if self.predicted == self.found else self.predicted / max(1, self.found)


@dataclass(slots=True)
class Totals:
    """Since the start. Written by the gateway only."""

    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    prompt_tokens: int = 0  # of requests that have started, as are the next four
    cached_tokens: int = 0  # found in a worker's cache
    predicted_cached_tokens: int = 0  # what the router said it would be
    overpredicted_tokens: int = 0  # sum of what was predicted and not found
    underpredicted_tokens: int = 0  # sum of what was found and not predicted
    started: int = 0
    output_tokens: int = 0
    replaced: int = 0  # placements that a worker's death made necessary
    deaths: int = 0
    faults: int = 0  # calls in which router or index failed outside of a placement
    # By worker; those gone for long are one (departed.py).
    placements: dict[str, int] = field(default_factory=dict)
    compared: dict[str, Compared] = field(default_factory=dict)

    @property
    def parity(self) -> float:
        """Predicted over actual cached tokens; 1 when both are 0."""
        if self.predicted_cached_tokens == self.cached_tokens:
            return 1.0
        return self.predicted_cached_tokens / max(1, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """Of one worker, as of its last report."""

    worker: str
    inflight: int
    stats: WorkerStats


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything that is read at a scrape."""

    totals: Totals
    inflight: int
    refused: int
    resyncs: int
    loads: list[Load]
    asked: int = 0  # snapshots that workers had to send


class GatewayMetrics:
    """Owns the histograms; registers a collector for all else."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Reading]) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, buckets=SECONDS, registry=registry)

        self.ttft = histogram("bien_time_to_first_token_seconds", "From admission to the first token.")
        self.inter_token = histogram(
            "bien_inter_token_seconds", "Mean time between the tokens of a request after its first ones."
        )
        self.duration = histogram("bien_request_seconds", "From admission to the end of the request.")
        registry.register(GatewayCollector(read))


class GatewayCollector(Collector):
    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []  # names are known without a gateway's state being read at registration

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        totals = reading.totals
        yield _by("bien_requests", "Requests that ended, by finish reason.", "finish", totals.finished)
        yield _by("bien_placements", "Requests placed, by worker.", "worker", totals.placements)
        for name, text, value in (
            ("bien_prompt_tokens", "Prompt tokens of requests that started.", totals.prompt_tokens),
            ("bien_cached_tokens", "Prompt tokens found in a cache.", totals.cached_tokens),
            ("bien_output_tokens", "Tokens generated.", totals.output_tokens),
            (
                "bien_router_predicted_cached_tokens",
                "Cached prompt tokens that the router predicted.",
                totals.predicted_cached_tokens,
            ),
            (
                "bien_router_overpredicted_tokens",
                "Tokens predicted to be cached and not found.",
                totals.overpredicted_tokens,
            ),
            (
                "bien_router_underpredicted_tokens",
                "Tokens found in a cache and not predicted.",
                totals.underpredicted_tokens,
            ),
            ("bien_refused", "Requests refused for overload.", reading.refused),
            ("bien_replaced", "Requests placed again after a worker's death.", totals.replaced),
            ("bien_worker_deaths", "Workers that died.", totals.deaths),
            ("bien_plugin_faults", "Calls in which router or index failed.", totals.faults),
            ("bien_index_resyncs", "Snapshots that the index needed to catch up.", reading.resyncs),
            ("bien_index_asked", "Snapshots that workers were asked for, at the start too.", reading.asked),
        ):
            yield CounterMetricFamily(name, text, value=value)
        yield GaugeMetricFamily("bien_inflight_requests", "Requests in flight.", value=reading.inflight)
        yield GaugeMetricFamily(
            "bien_parity_overall_ratio", "Predicted over found cached tokens.", value=totals.parity
        )
        yield from _parity(totals.compared)
        yield from _worker_gauges(reading.loads)
        yield from _speculation(reading.loads)


def _by(name: str, text: str, label: str, counts: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _parity(compared: dict[str, Compared]) -> Iterator[Metric]:
    for name, text in (
        ("predicted", "Cached prompt tokens that were predicted."),
        ("found", "Prompt tokens found in the cache."),
        ("over", "Tokens predicted to be cached and not found."),
        ("under", "Tokens found in the cache and not predicted."),
    ):
        counts = {worker: getattr(one, name) for worker, one in compared.items()}
        yield _by(f"bien_parity_{name}_tokens", text, "worker", counts)
    ratio = GaugeMetricFamily("bien_parity_ratio", "Predicted over found cached tokens.", labels=["worker"])
    for worker, one in compared.items():
        ratio.add_metric([worker], one.parity)
    yield ratio


def _speculation(loads: list[Load]) -> Iterator[Metric]:
    """vLLM's names behind bien's prefix, by who proposed."""
    readings: tuple[tuple[str, str, Callable[[SourceCounts], int]], ...] = (
        ("num_drafts", "Rounds of drafting and verifying.", lambda counts: counts.rounds),
        ("num_draft_tokens", "Drafts verified.", lambda counts: counts.drafted),
        ("num_accepted_tokens", "Drafts accepted.", lambda counts: counts.accepted),
    )
    found = [
        (load.worker, source, counts)
        for load in loads
        for source, counts in (load.stats.drafts.sources if load.stats.drafts else {}).items()
    ]
    for name, text, read in readings:
        family = CounterMetricFamily(f"bien_spec_decode_{name}", text, labels=["worker", "source"])
        for worker, source, counts in found:
            family.add_metric([worker, source], read(counts))
        yield family
    for name, text, counted in (
        ("num_draft_tokens_per_pos", "Rounds with a draft at a position.", "drafted_at"),
        ("num_accepted_tokens_per_pos", "Rounds in which a position's draft was accepted.", "accepted_at"),
    ):
        labels = ["worker", "source", "position"]
        family = CounterMetricFamily(f"bien_spec_decode_{name}", text, labels=labels)
        for worker, source, counts in found:
            for position, count in enumerate(getattr(counts, counted)):
                family.add_metric([worker, source, str(position)], count)
        yield family


def _worker_gauges(loads: list[Load]) -> Iterator[Metric]:
    readings: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
        ("bien_worker_inflight", "Requests placed there.", lambda load: load.inflight),
        ("bien_worker_running", "Sequences that hold KV.", lambda load: load.stats.running),
        ("bien_worker_waiting", "Sequences that wait.", lambda load: load.stats.waiting),
        ("bien_worker_queued_tokens", "Uncomputed prompt tokens.", lambda load: load.stats.queued_tokens),
        ("bien_worker_busy_seconds", "Time spent in steps.", lambda load: load.stats.busy_seconds),
        (
            "bien_worker_kv_usage_ratio",
            "Share of the first group's blocks that running sequences hold.",
            lambda load: load.stats.used_blocks / max(1, load.stats.total_blocks),
        ),
        (
            "bien_worker_kv_cached_ratio",
            "Share of the first group's blocks that are cached and free to evict.",
            lambda load: load.stats.cached_blocks / max(1, load.stats.total_blocks),
        ),
    )
    for name, text, read in readings:
        family = GaugeMetricFamily(name, text, labels=["worker"])
        for load in loads:
            family.add_metric([load.worker], read(load))
        yield family
