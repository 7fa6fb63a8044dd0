"""/metrics: the process's registry in Prometheus' text format, and the shell's own counts in it."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import choose_encoder


class HttpMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._responses = Counter(
            "bien_http_responses",
            "Responses begun, by route and status; 499: the client left before.",
            ("route", "status"),
            registry=registry,
        )
        self.streams = Gauge("bien_http_streams", "Streamed answers under way.", registry=registry)

    def count(self, request: web.Request, status: int) -> None:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        self._responses.labels(route, str(status)).inc()

    def page(self, request: web.Request) -> web.Response:
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encoder(self.registry), headers={"Content-Type": content_type})
