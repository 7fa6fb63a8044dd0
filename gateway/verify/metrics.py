"""What /metrics says of parity, of each worker and of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bien.gateway.verify.probes import Probes
from bien.gateway.verify.standing import CAUSES
from bien.gateway.verify.verifier import Verifier


class VerifyCollector(Collector):
    def __init__(self, verifier: Verifier, probes: Probes) -> None:
        self._verifier = verifier
        self._probes = probes

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        standings = self._verifier.standings.items()
        mode = GaugeMetricFamily(
            "bien_router_mode",
            "Who says what a worker has cached: 0 the index (precise), 1 our own history (approximate), "
            "2 the session's last placement (sticky).",
            labels=["worker"],
        )
        cause = GaugeMetricFamily(
            "bien_parity_cause",
            "1 at the cause for which the index is not believed of a worker.",
            labels=["worker", "cause"],
        )
        compared = CounterMetricFamily(
            "bien_parity_comparisons",
            "What the index claimed of a request against what the engine found: same (within a block), over, "
            "under, or excused, where the cache changed meanwhile.",
            labels=["worker", "verdict"],
        )
        for worker, standing in standings:
            mode.add_metric([worker], self._verifier.mode(worker))
            for name in CAUSES:
                cause.add_metric([worker, name], float(standing.cause == name))
            for verdict, count in standing.counts.items():
                compared.add_metric([worker, verdict], count)
        yield mode
        yield cause
        yield compared
        yield CounterMetricFamily(
            "bien_canary_requests", "Requests of the gateway's own.", value=self._probes.sent
        )
        yield CounterMetricFamily(
            "bien_canary_prompt_tokens", "Prompt tokens of these.", value=self._probes.tokens
        )
