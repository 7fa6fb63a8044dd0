"""What is counted of remote engines' KV events, on /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bien.gateway.remote.alarms import EventWatch

COUNTS = {
    "messages": "Messages of KV events that were understood.",
    "undecodable": "Messages of KV events, and events in them, that cannot be decoded.",
    "gaps": "Messages missing in the sequence.",
    "restarts": "Sequences that began again.",
    "replays": "Times that earlier messages were asked for, and came.",
    "lost": "Times that all that was known of the engine's cache was forgotten.",
    "misplaced": "Events of a data-parallel rank or KV group that the deployment does not name.",
    "orphans": "Blocks that follow one of which nothing is known.",
    "foreign": "Blocks with an adapter, images or a salt of others.",
}
CAUSES = ("undecodable", "silent", "replay", "rank", "groups")


class RemoteCollector(Collector):
    """Of all remote engines of one registry: a family of metrics must not come twice."""

    def __init__(self) -> None:
        self.watches: list[EventWatch] = []

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, text in COUNTS.items():
            family = CounterMetricFamily(f"bien_remote_events_{name}", text, labels=["worker"])
            for watch in self.watches:
                family.add_metric([watch.worker], getattr(watch.counts, name))
            yield family
        alarm = GaugeMetricFamily(
            "bien_remote_alarm",
            "1 while something is wrong with a remote engine's KV events.",
            labels=["worker", "cause"],
        )
        for watch in self.watches:
            for cause in CAUSES:
                alarm.add_metric([watch.worker, cause], float(cause in watch.alarms))
        yield alarm


_collectors: WeakKeyDictionary[CollectorRegistry, RemoteCollector] = WeakKeyDictionary()


def export(registry: CollectorRegistry, watches: list[EventWatch]) -> None:
    """From now on these are on the registry's page."""
    collector = _collectors.get(registry)
    if collector is None:
        collector = _collectors[registry] = RemoteCollector()
        registry.register(collector)
    collector.watches += watches
