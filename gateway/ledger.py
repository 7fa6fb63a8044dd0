"""`Ledger`: what happens to a stream is written down here, once, for whoever wants to know it later."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from bien.core.clock import Clock
from bien.core.worker.messages import Output, WorkerStats
from bien.gateway.admission import Admission
from bien.gateway.faults import FAULTS
from bien.gateway.metrics import Compared, GatewayMetrics, Totals
from bien.gateway.routing import Outcome, Router
from bien.gateway.spans import RequestSpan
from bien.gateway.stream import Stream

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from bien.gateway.verify.verifier import Verifier

log = logging.getLogger("bien.gateway")


class Ledger:
    def __init__(
        self,
        clock: Clock,
        totals: Totals,
        admission: Admission,
        router: Router,
        metrics: GatewayMetrics | None,
        tracer: Tracer | None,
        verifier: Verifier | None = None,
    ) -> None:
        self._clock = clock
        self._totals = totals
        self._admission = admission
        self._router = router
        self._metrics = metrics
        self._tracer = tracer
        self._verifier = verifier

    def opened(self, stream: Stream) -> None:
        if self._tracer is not None:
            stream.span = RequestSpan(self._tracer, stream)

    def placed(self, stream: Stream) -> None:
        """On `stream.member`, by `stream.decision`; from now on it counts afresh."""
        stream.placements += 1
        stream.lost = ""
        stream.cached = stream.counted = -1
        stream.first = stream.last = -1.0
        stream.output_tokens = 0
        placements = self._totals.placements
        placements[stream.worker] = placements.get(stream.worker, 0) + 1
        if stream.span is not None:
            stream.span.placed(stream)

    def unplaced(self, stream: Stream) -> None:
        """Its client did not take it."""
        stream.placements -= 1
        placements = self._totals.placements
        placements[stream.worker] -= 1
        if not placements[stream.worker]:
            del placements[stream.worker]

    def gained(self, stream: Stream, output: Output, now: float) -> None:
        if output.cached >= 0 and stream.cached < 0:
            stream.cached = output.cached
            stream.counted = output.prompt_tokens
            self._compare(stream)
        if not output.count:
            return
        begin, end = output.times or (now, now)
        if stream.first < 0:
            stream.first = begin
            stream.first_count = 1 if output.times else output.count
            if stream.member is not None:
                stream.member.settle(stream)
            stream.release()
            if self._verifier is not None:
                self._verifier.started(stream)
            if stream.span is not None:
                stream.span.first_token(stream)
        stream.last = end
        stream.output_tokens += output.count
        if stream.acquit is not None and not stream.repeatable:
            stream.acquit()
        self._totals.output_tokens += output.count

    def lost(self, stream: Stream, reason: str) -> None:
        stream.release()
        if stream.acquit is not None:
            stream.acquit()
        if stream.span is not None:
            stream.span.lost(stream.worker, reason)

    def ended(self, stream: Stream, finish: str) -> None:
        """Once per stream."""
        stream.finish = finish
        stream.release()
        if stream.acquit is not None:
            stream.acquit()
        now = self._clock.time()
        finished = self._totals.finished
        finished[finish] = finished.get(finish, 0) + 1
        self._admission.ended()
        if self._metrics is not None:
            self._observe(self._metrics, stream, now)
        if stream.span is not None:
            stream.span.end(stream)
        if stream.member is not None:
            ttft = stream.first - stream.placed if stream.first >= 0 else -1.0
            outcome = Outcome(
                stream.route,
                stream.worker,
                stream.dp_rank,
                stream.decision.predicted_cached,
                stream.cached,
                ttft,
                now - stream.placed,
                finish,
            )
            self._tell(lambda: self._router.observe(stream.decision, outcome))

    def reported(self, worker: str, stats: WorkerStats) -> None:
        self._tell(lambda: self._router.report(worker, stats))

    def _tell(self, router: Callable[[], None]) -> None:
        # Frames are dispatched above us: a router at fault must not stop the streams of others.
        try:
            router()
        except FAULTS:
            self._totals.faults += 1
            log.exception("the router failed at news of a worker")

    def _compare(self, stream: Stream) -> None:
        totals, predicted = self._totals, stream.decision.predicted_cached
        totals.started += 1
        compared = totals.compared.get(stream.worker)
        if compared is None:
            compared = totals.compared[stream.worker] = Compared()
        compared.add(predicted, stream.cached)
        totals.prompt_tokens += stream.prompt_tokens
        totals.cached_tokens += stream.cached
        totals.predicted_cached_tokens += predicted
        if predicted > stream.cached:
            totals.overpredicted_tokens += predicted - stream.cached
        else:
            totals.underpredicted_tokens += stream.cached - predicted
        if self._verifier is not None:
            self._verifier.compare(stream)

    @staticmethod
    def _observe(metrics: GatewayMetrics, stream: Stream, now: float) -> None:
        metrics.duration.observe(now - stream.arrival)
        if stream.first >= 0:
            metrics.ttft.observe(stream.first - stream.arrival)
            later = stream.output_tokens - stream.first_count
            if later > 0:
                metrics.inter_token.observe((stream.last - stream.first) / later)
