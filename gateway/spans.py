"""One span per request, with events for what happens to it. Written through an OpenTelemetry tracer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from bien.gateway.stream import Stream

_PROPAGATOR = TraceContextTextMapPropagator()


class RequestSpan:
    """Child of the request's `traceparent`, if it has one; the worker gets ours in its place."""

    def __init__(self, tracer: Tracer, stream: Stream) -> None:
        request = stream.request
        parent = _PROPAGATOR.extract({"traceparent": request.traceparent}) if request.traceparent else None
        attributes: dict[str, str | int] = {
            "bien.request.id": stream.route.id,
            "bien.session": request.session,
            "bien.prompt_tokens": stream.prompt_tokens,
            "bien.max_tokens": request.sampling.max_tokens,
        }
        self._span: Span = tracer.start_span(
            "bien.generate", context=parent, kind=SpanKind.SERVER, attributes=attributes
        )
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span))
        request.traceparent = carrier.get("traceparent", request.traceparent)

    def placed(self, stream: Stream) -> None:
        reasons = {f"bien.reason.{name}": value for name, value in stream.decision.reasons.items()}
        self._span.add_event(
            "placed",
            {
                "bien.worker": stream.worker,
                "bien.predicted_cached_tokens": stream.decision.predicted_cached,
                **reasons,
            },
        )

    def first_token(self, stream: Stream) -> None:
        self._span.add_event("first_token", {"bien.cached_tokens": stream.cached})

    def lost(self, worker: str, reason: str) -> None:
        self._span.add_event("worker_died", {"bien.worker": worker, "bien.reason": reason})

    def end(self, stream: Stream) -> None:
        self._span.set_attribute("bien.output_tokens", stream.output_tokens)
        self._span.set_attribute("bien.cached_tokens", stream.cached)
        self._span.set_attribute("bien.finish", stream.finish or "")
        if stream.finish == "error":
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
