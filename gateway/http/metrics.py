"""/metrics: the process's registry in Prometheus' text format, and the shell's own counts in it."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bien.core.text.tails import Tails
from bien.gateway.notes import Notes


class HttpMetrics:
    def __init__(self, registry: CollectorRegistry, tails: Tails) -> None:
        """`tails`: those whose counts are shown."""
        self.registry = registry
        self._removed = Counter(
            "bien_prompt_lines_removed",
            "Lines of system prompts taken out because they change with each request.",
            registry=registry,
        )
        self._rewritten = Counter(
            "bien_prompts_rewritten",
            "Prompts of conversations going on that are not the prompt and answer before, and more; by where "
            "the first difference lies.",
            ("part",),
            registry=registry,
        )
        registry.register(_Tokenized(tails))
        self._responses = Counter(
            "bien_http_responses",
            "Responses begun, by route and status; 499: the client left before.",
            ("route", "status"),
            registry=registry,
        )
        self.streams = Gauge("bien_http_streams", "Streamed answers under way.", registry=registry)

    def note(self, notes: Notes) -> None:
        """A prompt is there."""
        if notes.removed:
            self._removed.inc(notes.removed)
        if notes.rewrite is not None:
            self._rewritten.labels(notes.rewrite.part).inc()

    def count(self, request: web.Request, status: int) -> None:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        self._responses.labels(route, str(status)).inc()

    def page(self, request: web.Request) -> web.Response:
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encoder(self.registry), headers={"Content-Type": content_type})


class _Tokenized(Collector):
    def __init__(self, tails: Tails) -> None:
        self._tails = tails

    def collect(self) -> Iterator[Metric]:
        tails = self._tails
        tokens = CounterMetricFamily(
            "bien_prompt_text_tokens", "Tokens of conversations, encoded or found encoded.", labels=["source"]
        )
        tokens.add_metric(["encoded"], tails.encoded)
        tokens.add_metric(["kept"], tails.reused)
        yield tokens
        yield GaugeMetricFamily("bien_prompt_text_kept_bytes", "Ids of conversations kept.", value=tails.held)
