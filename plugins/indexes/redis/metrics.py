"""What the redis index says at /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Reserving(Protocol):
    made: int
    missed: int


class Counts(Protocol):
    undecodable: int
    lost_leases: int
    restores: int

    @property
    def reserver(self) -> Reserving: ...

    @property
    def up(self) -> bool: ...

    @property
    def failures(self) -> int: ...

    @property
    def leased(self) -> int: ...


class IndexCollector(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        for name, text, value in (
            ("bien_index_store_up", "1 while Redis answers, 0 while serving goes on without it.", counts.up),
            ("bien_index_leases", "Workers here that hold a lease in Redis.", counts.leased),
        ):
            yield GaugeMetricFamily(name, text, value=int(value))
        for name, text, count in (
            ("bien_index_store_errors", "Commands to Redis that failed.", counts.failures),
            ("bien_index_restores", "Caches of workers taken from Redis.", counts.restores),
            ("bien_index_lost_leases", "Leases of workers that ended while we watched.", counts.lost_leases),
            ("bien_index_undecodable", "What lay under our keys and cannot be read.", counts.undecodable),
            ("bien_index_reservations", "Placements reserved among gateways.", counts.reserver.made),
            (
                "bien_index_reservations_missed",
                "Reservations that did not come in time.",
                counts.reserver.missed,
            ),
        ):
            yield CounterMetricFamily(name, text, value=count)
