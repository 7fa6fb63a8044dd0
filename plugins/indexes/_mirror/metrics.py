"""What a mirror says at /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bien.plugins.indexes._mirror.table import Size


class Sized(Protocol):
    @property
    def table(self) -> str: ...

    @property
    def size(self) -> Size: ...


class MirrorCollector(Collector):
    def __init__(self, mirror: Sized) -> None:
        self._mirror = mirror

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        table, size = self._mirror.table, self._mirror.size
        kind = GaugeMetricFamily(
            "bien_index_table", "1 for what keeps the index's blocks: native, or python.", labels=["kind"]
        )
        for name in ("native", "python"):
            kind.add_metric([name], int(name == table))
        yield kind
        for name, text, value in (
            ("bien_index_blocks", "Distinct blocks in the index (python: as many as held).", size.blocks),
            ("bien_index_held_blocks", "Blocks over all workers, groups and tiers.", size.holdings),
            ("bien_index_bytes", "Memory of the index's blocks (python: not known, 0).", size.bytes),
        ):
            yield GaugeMetricFamily(name, text, value=value)
