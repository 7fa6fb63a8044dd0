"""`Gateway`: admission, hash chain, routing, streams and the index, on a clock.

Live traffic and simulation run this very code: it knows workers through `WorkerClient` only, and keeps
costs per request and per frame, never per token.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from bien.core.clock import Clock
from bien.core.deployment import GatewaySpec
from bien.core.errors import DeploymentError, OverloadError, PluginFault, WorkerDiedError
from bien.core.kv.hashing import tenant_key
from bien.core.request import GenerateRequest
from bien.core.worker.client import WorkerClient
from bien.core.worker.messages import StepFrame, WorkerInfo
from bien.gateway.admission import Admission, Slot
from bien.gateway.chain import PromptChains
from bien.gateway.checks import check_fits, check_parameters, context_limit
from bien.gateway.departed import Departed
from bien.gateway.doubts import Doubts
from bien.gateway.faults import FAULTS
from bien.gateway.feed import IndexFeed
from bien.gateway.generation import Generation
from bien.gateway.index import KVIndex, LeasedIndex, TieredIndex
from bien.gateway.ledger import Ledger
from bien.gateway.metrics import GatewayMetrics, Load, Reading, Totals
from bien.gateway.roster import Member
from bien.gateway.routing import Router
from bien.gateway.sharing import Reserved, Sharing
from bien.gateway.stream import MAX_LOSSES, Stream
from bien.gateway.trial import Trial
from bien.gateway.verify.canary import TENANT
from bien.gateway.verify.metrics import VerifyCollector
from bien.gateway.verify.options import VerifyOptions
from bien.gateway.verify.probes import Probes
from bien.gateway.verify.verifier import Verifier
from bien.gateway.verify.window import Space
from bien.gateway.view import View, check_decision, fitting

log = logging.getLogger("bien.gateway")


class Gateway:
    """Make it inside a running event loop. It owns workers, router and index: `close` closes them."""

    def __init__(
        self,
        workers: Iterable[WorkerClient],
        router: Router,
        index: KVIndex,
        clock: Clock,
        spec: GatewaySpec,
        tracer: Tracer | None = None,
        metrics: CollectorRegistry | None = None,
        *,
        rng: random.Random | None = None,
        worker_wait: float = 30.0,
        predict_ttl: float = 10.0,
        verify: VerifyOptions | None = None,
    ) -> None:
        """`rng` draws the seeds of requests that bring none. `worker_wait`: seconds that a request waits
        for a live worker. `predict_ttl`: seconds for which a routed prompt counts as cached unless events
        say so first. `verify`: how the index is held against what engines find; None: it is not."""
        self.clock = clock
        self.totals = Totals()
        self._admission = Admission(spec.max_inflight, clock)
        self._router = router
        self._index = index
        self._tiered = index if isinstance(index, TieredIndex) else None
        if isinstance(index, LeasedIndex):
            index.lease_lost = self.doubt
        self._sharing = Sharing.of(index, router)
        self._puts = 0  # placements
        self._feed = IndexFeed(index, clock, self.totals)
        self._secret = spec.secret
        self._chains: PromptChains | None = None  # made with the first worker, which says the block size
        self._members: dict[str, Member] = {}
        self._probes = Probes(self._members)
        self.verifier = None if verify is None else self._verify(verify)
        self._rng = rng or random.Random()
        self._worker_wait = worker_wait
        self._predict_ttl = predict_ttl
        recorded = GatewayMetrics(metrics, self._read) if metrics is not None else None
        if self.verifier is not None:
            self._feed.settled_with = self.verifier.settled
            if metrics is not None:
                metrics.register(VerifyCollector(self.verifier, self._probes))
        self._ledger = Ledger(
            clock, self.totals, self._admission, router, recorded, tracer, verifier=self.verifier
        )
        self._departed = Departed(self.totals)
        self._trial = Trial()
        self._replaced: set[asyncio.Task[None]] = set()  # clients that are being closed
        self._doubts = Doubts(self._members, self.totals, self._opened)
        self._joined = asyncio.Event()  # set and replaced whenever a worker can be used that could not before
        self._closed = False
        for client in workers:
            self.join(client)

    # What a shell asks.

    @property
    def infos(self) -> list[WorkerInfo]:
        """The workers that requests may be placed at."""
        return [member.info for member in self._members.values() if member.usable]

    @property
    def connected(self) -> list[WorkerInfo]:
        """And those that have been asked whether they are still there."""
        return [member.info for member in self._members.values() if member.client.alive]

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be worked on."""
        return bool(self.infos) and not self._admission.closed

    @property
    def inflight(self) -> int:
        return self._admission.inflight

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output that the roomiest live worker can hold; 0 without one."""
        return max(map(context_limit, self.infos), default=0)

    @property
    def loads(self) -> list[Load]:
        return [Load(m.id, len(m.streams), m.stats) for m in self._members.values()]

    @property
    def parity(self) -> dict[str, Any]:
        """Whether the index is believed, for /health; empty where it is not verified."""
        return {} if self.verifier is None else self.verifier.health

    # Requests.

    def admit(self, places: int = 1) -> Slot:
        """Take a slot for `places` generations, before any work is spent on a request. OverloadError when
        not so many are free, UserError when there are not so many."""
        return self._admission.admit(places)

    def generate(
        self,
        request: GenerateRequest,
        slot: Slot | None = None,
        restart: Callable[[], None] | None = None,
    ) -> Generation:
        """`async with gateway.generate(request) as stream: async for output in stream: ...`

        Entering admits (unless `slot` is held: then the caller releases it), checks, and places the
        request; leaving before the last output aborts it. The gateway writes seed, chain, predicted
        tokens and traceparent into `request`. Raises UserError, ContextLengthError, OverloadError; while
        iterating also WorkerDiedError and what the worker reports.

        A request whose worker dies is placed again as long as the stream has given out nothing; whoever
        can forget what he was given passes `restart`: it is called, and all comes again from the start.
        """
        return Generation(self, request, slot, restart)

    # Workers.

    def join(self, client: WorkerClient) -> None:
        """A worker appeared; one of the same id takes its place. DeploymentError when its blocks have
        another size than those of the others."""
        info = client.info
        if self._chains is None:
            self._chains = PromptChains(info.block_tokens, self._secret)
        elif self._chains.block_tokens != info.block_tokens:
            raise DeploymentError(
                f"worker {info.id} has blocks of {info.block_tokens} tokens; valid: those of the other "
                f"workers, {self._chains.block_tokens}"
            )
        old = self._members.get(info.id)
        if old is not None:
            self.totals.deaths += 1
            self._drop(old, "another worker took its name")
            closing = asyncio.get_running_loop().create_task(old.client.close())
            self._replaced.add(closing)
            closing.add_done_callback(self._replaced.discard)
        self._members[info.id] = Member(client)
        self._departed.came(info.id)
        self._feed.join(client)  # first: frames that came meanwhile are told at once
        client.attach(self)
        if self.verifier is not None:
            self.verifier.joined(info)
        self._opened()

    def doubt(self, worker: str) -> None:
        """It may be gone, says somebody: no request is placed there until it has answered."""
        self._doubts.doubt(worker)

    def _opened(self) -> None:
        self._joined.set()
        self._joined = asyncio.Event()

    async def warm(self, seconds: float) -> None:
        """Wait, at most so long, until the index knows what the workers that have joined hold: requests that
        are placed before are placed blindly."""
        await self._feed.settled(seconds)

    def on_frame(self, worker: WorkerClient, frame: StepFrame) -> None:
        member = self._members.get(worker.info.id)
        if member is None or member.client is not worker:
            return  # the last words of a worker that was given up
        if frame.batch is not None:
            if self.verifier is not None:
                self.verifier.heard(frame.batch)
            self._feed.apply(worker, frame.batch)
        if frame.stats is not None:
            member.report(frame.stats, frame.dp_rank)
            self._ledger.reported(member.id, frame.stats)
        if frame.unseen is not None:
            member.ranks[frame.dp_rank].unseen = frame.unseen
        if frame.outputs:
            now = self.clock.time()
            for output in frame.outputs:
                stream = member.streams.get(output.rid)
                if stream is None:  # it was aborted, or is none of a user's
                    self._probes.take(member.id, output)
                    continue
                self._ledger.gained(stream, output, now)
                if output.finish is not None:
                    member.remove(stream)
                    self._ledger.ended(stream, output.finish)
                stream.push(output, now)

    def on_death(self, worker: WorkerClient, reason: str) -> None:
        member = self._members.get(worker.info.id)
        if member is not None and member.client is worker:
            self.totals.deaths += 1
            self._drop(member, reason)

    def _drop(self, member: Member, reason: str) -> None:
        del self._members[member.id]
        self._departed.left(member.id, self.clock.time())
        self._feed.leave(member.id)
        self._probes.lost(member.id)
        if self.verifier is not None:
            self.verifier.left(member.id)
        self._trial.blame(list(member.streams.values()))
        for stream in member.streams.values():
            self._ledger.lost(stream, reason)
            stream.lose(reason)
        member.streams = {}

    # End of service.

    async def drain(self) -> None:
        """Admit nobody any more and wait until all requests have ended. They go on as ever: those whose
        worker dies wait for the next one."""
        self._admission.shut("the gateway is going down")
        await self._admission.idle()

    async def close(self) -> None:
        """Stop now: requests in flight end as if their workers had died."""
        self._admission.shut("the gateway is going down")
        self._closed = True
        if self.verifier is not None:
            await self.verifier.close()
        await self._feed.close()
        self._doubts.close()
        await asyncio.gather(*self._replaced, return_exceptions=True)
        for member in list(self._members.values()):
            self._drop(member, "the gateway is going down")
            await member.client.close()
        self._joined.set()
        for plugin in (self._router, self._index):
            try:
                plugin.close()
            except FAULTS:
                self.totals.faults += 1
                log.exception("%s failed at its end", type(plugin).__name__)

    # Below: called by Generation and Stream.

    async def begin(
        self, request: GenerateRequest, slot: Slot, restart: Callable[[], None] | None = None
    ) -> Stream:
        check_parameters(request)
        if request.sampling.seed is None:
            seed = self._rng.getrandbits(63)
            request.sampling = msgspec.structs.replace(request.sampling, seed=seed)
        await self._workers_for(request)
        assert self._chains is not None
        self._chains.name(request)
        stream = Stream(request, slot.since, self._recover, restart)
        self._ledger.opened(stream)
        try:
            await self._settle(stream)
        except BaseException as error:
            self._ledger.ended(stream, "error" if isinstance(error, Exception) else "abort")
            raise
        return stream

    def leave(self, stream: Stream) -> None:
        """Its consumer has gone: abort it unless it has ended."""
        if stream.finish is None:
            member = stream.member
            if member is not None and not stream.lost:
                member.remove(stream)
                self._abort(stream, member)
                if stream.first < 0:
                    self._feed.take_back(member.id, stream.dp_rank, stream.route.hashes)
                    if self.verifier is not None:
                        self.verifier.started(stream)
            self._ledger.ended(stream, "abort")

    async def _recover(self, stream: Stream) -> None:
        if stream.streamed or stream.losses == MAX_LOSSES:
            self._ledger.ended(stream, "error")
            raise WorkerDiedError(f"worker {stream.worker} died ({stream.lost}) after {stream.progress}")
        try:
            await self._turn(stream)
            await self._settle(stream)
        except BaseException as error:
            self._ledger.ended(stream, "error" if isinstance(error, Exception) else "abort")
            raise
        self.totals.replaced += 1

    async def _turn(self, stream: Stream) -> None:
        """Wait for a worker; before the last placement also until nobody else is on trial."""
        await self._workers_for(stream.request)
        while stream.suspect and stream.acquit is None:
            await self._trial.enter(stream)
            if not self.infos:  # others must not wait for their turn as well as for a worker
                self._trial.leave(stream)
                await self._workers_for(stream.request)

    async def _settle(self, stream: Stream) -> None:
        """Place it. Where other gateways route to the same workers, that waits for a reservation."""
        sharing = self._sharing
        if sharing is None or not sharing.wanted([m.info for m in self._members.values()]):
            self._place(stream)
            return
        puts = self._puts
        view = self._view(stream)
        try:
            claim = await sharing.claim(stream.route, view.targets)
        except FAULTS as error:
            raise PluginFault(f"index or router failed: {error!r}") from error
        known = view.fit == fitting(stream, self._members.values())
        if claim is not None and not known:
            claim.release()
            claim = None
        stream.reserved = claim  # who fails from now on gives it back
        await self._workers_for(stream.request)
        self._place(stream, view if known and self._puts == puts else None, claim)

    def _place(self, stream: Stream, view: View | None = None, claim: Reserved | None = None) -> None:
        """The best member gets it. `view`: if it is still true; `claim`: what is reserved for it."""
        request, route, router = stream.request, stream.route, self._router
        anew = view is None
        view = view or self._view(stream)
        try:
            if claim is None or self._sharing is None:
                decision = router.choose(route, view.targets)
            else:
                decision = self._sharing.decide(claim, route, view.targets, anew)
        except FAULTS as error:
            raise PluginFault(f"index or router failed: {error!r}") from error
        check_decision(decision, router, route, view.targets)
        self._puts += 1
        at = decision.target
        member, rank = view.members[at], view.targets[at].dp_rank
        stream.decision = decision
        if self.verifier is not None:
            self.verifier.placed(stream, view.targets[at], None if view.claims is None else view.claims[at])
        stream.rid = member.place(stream, route.prompt_tokens - decision.predicted_cached, rank)
        request.id, request.dp_rank = route.id, rank
        request.predicted_cached_tokens = decision.predicted_cached
        stream.placed = self.clock.time()
        request.age = stream.placed - stream.arrival
        try:
            self._ledger.placed(stream)
            self._feed.predict(member.id, rank, route.hashes, self._predict_ttl)
            member.client.submit(stream.rid, request)
        except BaseException:
            self._unplace(stream, member)
            raise
        if self.verifier is not None:
            self.verifier.sent(stream)

    def _unplace(self, stream: Stream, member: Member) -> None:
        """Its client did not take it: it is as if it had never been placed."""
        member.unplace(stream)
        self._feed.take_back(member.id, stream.dp_rank, stream.route.hashes)
        self._ledger.unplaced(stream)
        self._abort(stream, member)  # it may have sent it all the same

    def _abort(self, stream: Stream, member: Member) -> None:
        try:
            member.client.abort(stream.rid)
        except FAULTS:
            self.totals.faults += 1
            log.exception("worker %s: a request could not be aborted", member.id)

    def _view(self, stream: Stream) -> View:
        """What a jumped simulation owes is settled first."""
        for client in [member.client for member in self._members.values()]:
            client.catch_up()
        try:
            view = View.of(stream, self._members.values(), self._index, self._tiered)
            if self.verifier is not None:
                view.claims = self.verifier.adjust(stream.route, view.hashes, view.targets)
        except FAULTS as error:
            raise PluginFault(f"index or router failed: {error!r}") from error
        return view

    async def _workers_for(self, request: GenerateRequest) -> None:
        """Wait until a worker is alive; check that one can hold the request."""
        if not self.infos:
            try:
                async with asyncio.timeout(self._worker_wait):
                    while not self.infos and not self._closed:
                        await self._joined.wait()
            except TimeoutError:
                pass
        if not self.infos:
            why = "the gateway is going down" if self._closed else "no worker is alive"
            raise OverloadError(why, retry_after=self._admission.retry_after())
        check_fits(request, self.infos)

    def _verify(self, options: VerifyOptions) -> Verifier:
        secret = self._secret.encode()
        plain, own = (Space(tenant_key(name, secret), bool(name)) for name in ("", TENANT))
        return Verifier(self._index, self.clock, self._probes.send, plain, own, options)

    def _read(self) -> Reading:
        admission = self._admission
        feed = self._feed
        return Reading(
            self.totals, admission.inflight, admission.refused, feed.resyncs, self.loads, feed.asked
        )
