"""`Verifier`: watches what the index claims and what engines find, and who is believed."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from bien.core.clock import Clock
from bien.core.kv.events import EventBatch
from bien.core.worker.messages import WorkerInfo, WorkerStats
from bien.gateway.index import KVIndex
from bien.gateway.routing import RouteRequest, Target, cached_tokens
from bien.gateway.verify.canary import BLOCKS, FEWER, MORE, Canary, Send, Sighting
from bien.gateway.verify.diagnosis import Evidence, larger_blocks, name_cause
from bien.gateway.verify.history import Homes, Routed
from bien.gateway.verify.noise import excuse
from bien.gateway.verify.options import VerifyOptions
from bien.gateway.verify.standing import Mode, Standing
from bien.gateway.verify.window import Comparison, Space

if TYPE_CHECKING:
    from bien.gateway.stream import Stream

log = logging.getLogger("bien.verify")


class Verifier:
    """One per gateway, called on its event loop. `plain` and `own` are the namespaces of requests without a
    tenant and of its probes, which `send` places."""

    def __init__(
        self,
        index: KVIndex,
        clock: Clock,
        send: Send,
        plain: Space,
        own: Space,
        options: VerifyOptions | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.options = options or VerifyOptions()
        self.standings: dict[str, Standing] = {}
        self.probes = 0  # canaries that were sent, and seen or not
        self.lost = 0  # of these: without an answer
        self._clock = clock
        self._plain = plain
        self._own = own
        self._canary = Canary(send, index, clock, rng or random.Random(), self.options)
        self._fallen = False  # whether some worker is not precise
        self._routed: dict[str, Routed] = {}  # of the workers that are not
        self._homes = Homes()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by worker: what is being found out

    # Workers.

    def joined(self, info: WorkerInfo) -> None:
        self.left(info.id)
        self.standings[info.id] = standing = Standing(info, self.options)
        if self._fallen:
            self._routed[info.id] = Routed(self.options.ttl)
        if self.options.canary:
            self._start(standing, self._greet(standing))

    def left(self, worker: str) -> None:
        self.standings.pop(worker, None)
        self._routed.pop(worker, None)
        if (task := self._tasks.pop(worker, None)) is not None:
            task.cancel()
        self._note()

    def heard(self, batch: EventBatch) -> None:
        """Before the index hears it."""
        if (standing := self.standings.get(batch.worker)) is not None:
            for tap in standing.taps:
                tap.heard(batch, self._clock.time())

    def reported(self, worker: str, stats: WorkerStats) -> None:
        if (standing := self.standings.get(worker)) is not None:
            standing.tap.reported(stats)

    def settled(self, worker: str) -> None:
        """The index was set to a snapshot of it."""
        if (standing := self.standings.get(worker)) is not None:
            for tap in standing.taps:
                tap.settled()

    async def greeted(self, seconds: float) -> None:
        """Wait, at most so long, until what is being found out is known."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=seconds)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    # Requests, in the order in which they get here.

    def adjust(self, request: RouteRequest, hashes: bytes, targets: Sequence[Target]) -> list[int] | None:
        """Put into targets whose index is doubted what is believed in its place. `hashes`: of what
        may be cached. Returns the tokens that the index claims, where it is not believed of all."""
        if not self._fallen:
            return None
        claims = [cached_tokens(request, target) for target in targets]
        now = self._clock.time()
        floor = self._floor()
        for target in targets:
            mode = self.mode(target.worker, floor)
            if mode is Mode.PRECISE:
                continue
            if mode is Mode.APPROXIMATE and (routed := self._routed.get(target.worker)) is not None:
                blocks = routed.depth(hashes, now)
            else:
                blocks = self._homes.depth((request.tenant, request.session), target.worker, hashes)
            target.overlap, target.loadable = blocks * target.info.block_tokens, 0
        return claims

    def placed(self, stream: Stream, target: Target, claimed: int | None) -> None:
        """`claimed`: by the index, where it is not what `target` says."""
        expected = cached_tokens(stream.route, target)
        stream.expected = expected
        stream.claimed = expected if claimed is None else claimed
        standing = self.standings[target.worker]
        reasons = stream.decision.reasons
        if not self._fallen:
            reasons["mode"] = "precise"
            return
        reasons["mode"] = self.mode(target.worker, self._floor()).name.lower()
        if standing.cause:
            reasons["parity_cause"] = standing.cause

    def sent(self, stream: Stream) -> None:
        """To where it was placed."""
        route = stream.route
        if (standing := self.standings.get(stream.worker)) is not None:
            standing.tap.sent.add(stream.placed, route.hashes)
        if not self._fallen:
            return
        if (routed := self._routed.get(stream.worker)) is not None:
            routed.sent(route.hashes, stream.placed)
        if route.session:
            self._homes.sent((route.tenant, route.session), stream.worker, route.hashes)

    def started(self, stream: Stream) -> None:
        """Its prompt is computed, or nobody waits for it any more."""
        if (standing := self.standings.get(stream.worker)) is not None:
            standing.tap.started.add(self._clock.time(), stream.route.hashes)

    def compare(self, stream: Stream) -> None:
        """The engine has said what it found."""
        standing = self.standings.get(stream.worker)
        if standing is None or stream.claimed < 0:
            return
        claimed, found = stream.claimed, stream.cached
        if not (claimed or found):
            standing.counts["same"] += 1
            return
        off = claimed - found if abs(claimed - found) > standing.tolerance else 0
        if off and excuse(stream, standing.taps[stream.dp_rank], standing.info.block_tokens):
            standing.counts["excused"] += 1
            return
        standing.counts["over" if off > 0 else "under" if off else "same"] += 1
        request = stream.request
        now, named = self._clock.time(), bool(request.tenant or request.salt)
        space = Space(request.hash_key, named)
        sizes = stream.prompt_tokens, stream.counted
        standing.window.add(Comparison(now, claimed, found, off, *sizes, space))
        if standing.mode is Mode.PRECISE:
            if off:
                self._doubt(standing, now)
            return
        if stream.placed >= standing.changed:  # what was believed before is no matter any more
            wrong = stream.expected - found
            wrong = wrong if abs(wrong) > standing.tolerance else 0
            standing.used.add(Comparison(now, stream.expected, found, wrong, *sizes, space))
        self._judge(standing, now)

    # Modes.

    @property
    def health(self) -> dict[str, Any]:
        """For people: how far the index is believed, and of which workers less, why and for how long."""
        now = self._clock.time()
        workers = {
            id: {
                "mode": standing.mode.name.lower(),
                "cause": standing.cause,
                "why": standing.why,
                "seconds": round(now - standing.changed, 1),
            }
            for id, standing in self.standings.items()
            if standing.mode is not Mode.PRECISE
        }
        worst = max((standing.mode for standing in self.standings.values()), default=Mode.PRECISE)
        return {"mode": worst.name.lower()} | ({"workers": workers} if workers else {})

    def mode(self, worker: str, floor: Mode | None = None) -> Mode:
        standing = self.standings.get(worker)
        floor = self._floor() if floor is None else floor
        return floor if standing is None else max(standing.mode, floor)

    def _floor(self) -> Mode:
        """Where most workers are, all are: it is the index itself then that is wrong."""
        modes = sorted((standing.mode for standing in self.standings.values()), reverse=True)
        return modes[len(modes) // 2] if len(modes) > 1 else Mode.PRECISE

    def _doubt(self, standing: Standing, now: float) -> None:
        if standing.window.drifted or standing.window.lonely:
            self._change(standing, Mode.APPROXIMATE, now)
            self._start(standing, self._explain(standing))

    def _judge(self, standing: Standing, now: float) -> None:
        """Of a worker whose index is not believed: further down, back up, or as it is."""
        rested = now - standing.changed >= standing.dwell
        if rested and standing.window.settled and not standing.window.lonely:
            self._start(standing, self._return(standing))
        elif standing.mode is Mode.APPROXIMATE and standing.used.drifted:
            self._change(standing, Mode.STICKY, now)
            self._start(standing, self._explain(standing))
        elif standing.mode is Mode.STICKY and rested:
            self._change(standing, Mode.APPROXIMATE, now)  # on trial
        if standing.cause == "unknown" and now - standing.looked >= self.options.again:
            self._start(standing, self._explain(standing))

    def _change(self, standing: Standing, mode: Mode, now: float) -> None:
        worker = standing.info.id
        if mode is Mode.PRECISE:
            standing.change(mode, now)
            self._routed.pop(worker, None)
        else:
            standing.change(mode, now, standing.cause or "unknown", standing.why)
        self._note()
        for one in self.standings if self._fallen else ():
            if one not in self._routed:
                routed = self._routed[one] = Routed(self.options.ttl)
                for hashes in self.standings[one].tap.started.told(now - self.options.ttl):
                    routed.sent(hashes, now)

    def _note(self) -> None:
        self._fallen = any(standing.mode for standing in self.standings.values())
        if not self._fallen:
            self._routed.clear()
            self._homes.clear()

    # Probes.

    async def _greet(self, standing: Standing) -> None:
        """Of a worker that has just joined."""
        for rank in range(standing.info.dp_ranks):
            sighting = await self._sight(standing, self._own, dp_rank=rank)
            if sighting is not None and sighting.second < 0:
                log.info("worker %s does not say what it finds cached: nothing is verified", standing.info.id)
                return
            if sighting is not None and not sighting.right:
                break
        else:
            return
        evidence = Evidence(standing.info.block_tokens, spaced=sighting)
        cause, why = await self._find(standing, evidence, rank)
        if cause == "salt":  # no harm while no tenant comes; if one does, its requests will show it
            log.warning("worker %s: a canary: salt: %s", standing.info.id, why)
        elif cause != "unknown":
            self._change(standing, Mode.APPROXIMATE, self._clock.time())
            standing.explain(cause, why)

    async def _explain(self, standing: Standing) -> None:
        wrong = await self._wrong(standing) if standing.info.dp_ranks > 1 and self.options.probe else None
        rank = wrong or 0
        window, tap = standing.window, standing.taps[rank]
        evidence = Evidence(
            standing.info.block_tokens, window.latest(), window.lonely, tap.gap, tap.restart, tap.names()
        )
        cause, why = await self._find(standing, evidence, rank)
        standing.looked = self._clock.time()
        if standing.mode is not Mode.PRECISE:
            standing.explain(cause, why)

    async def _return(self, standing: Standing) -> None:
        wrong = await self._wrong(standing) if self.options.probe else None
        now = self._clock.time()
        if wrong is None:
            self._change(standing, Mode.PRECISE, now)
        else:
            standing.changed = now  # not yet

    async def _wrong(self, standing: Standing) -> int | None:
        """The first rank of whose canary the index is wrong."""
        for rank in range(standing.info.dp_ranks):
            sighting = await self._sight(standing, self._plain, dp_rank=rank)
            if sighting is not None and not sighting.right:
                return rank
        return None

    async def _find(self, standing: Standing, evidence: Evidence, rank: int) -> tuple[str, str]:
        if not self.options.probe:
            return name_cause(evidence)
        block, space = standing.info.block_tokens, self._own
        plain = await self._add(standing, evidence, BLOCKS, rank)
        off = 0 if plain is None or plain.second < 0 else plain.whole - plain.second
        if plain is not None and (off >= block or off < -block):
            await self._add(standing, evidence, FEWER if plain.second else MORE, rank)
            if size := larger_blocks(evidence.plain):  # of so many tokens all are found then
                await self._add(standing, evidence, math.lcm(size, block) // block, rank)
        if evidence.spaced is None:
            if (suspect := standing.window.suspect) is not None and suspect.named:
                space = suspect
            evidence.spaced = await self._sight(standing, space, dp_rank=rank)
        evidence.gap = evidence.gap or standing.taps[rank].gap
        return name_cause(evidence)

    async def _add(self, standing: Standing, evidence: Evidence, blocks: int, rank: int) -> Sighting | None:
        """One more probe without a tenant."""
        sighting = await self._sight(standing, self._plain, blocks, rank)
        if sighting is not None:
            evidence.plain = [*evidence.plain, sighting]
        return sighting

    async def _sight(
        self, standing: Standing, space: Space, blocks: int = BLOCKS, dp_rank: int = 0
    ) -> Sighting | None:
        self.probes += 1
        sighting = await self._canary.sight(standing.info, standing.taps[dp_rank], space, blocks, dp_rank)
        self.lost += sighting is None
        return sighting

    def _start(self, standing: Standing, work: Coroutine[Any, Any, None]) -> None:
        """One thing at a time is found out about a worker."""
        worker = standing.info.id
        if worker in self._tasks:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=f"verify {worker}")
        self._tasks[worker] = task
        task.add_done_callback(lambda done: self._ended(worker, done))

    def _ended(self, worker: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(worker) is task:
            del self._tasks[worker]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("worker %s: verifying failed", worker, exc_info=error)
