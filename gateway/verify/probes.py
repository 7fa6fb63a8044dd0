"""`Probes`: requests of the verifier's own, to the worker that it names, beside all that is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from bien.core.request import GenerateRequest
from bien.core.worker.messages import Output
from bien.gateway.roster import Member
from bien.gateway.verify.canary import Answer


class Probes:
    def __init__(self, members: Mapping[str, Member]) -> None:
        self.sent = 0
        self.tokens = 0  # of their prompts
        self._members = members
        self._waiting: dict[tuple[str, int], tuple[list[Output], asyncio.Future[None]]] = {}

    async def send(self, worker: str, request: GenerateRequest, seconds: float) -> Answer | None:
        """None: it has failed, or there is no answer in time."""
        member = self._members.get(worker)
        if member is None or not member.client.alive:
            return None
        self.sent += 1
        self.tokens += request.prompt_tokens
        rid, outputs = member.number(), list[Output]()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[worker, rid] = outputs, ended
        try:
            member.client.submit(rid, request)
            async with asyncio.timeout(seconds):
                await ended
        except TimeoutError:
            return None
        finally:
            del self._waiting[worker, rid]
            if not (outputs and outputs[-1].finish) and member.client.alive:
                member.client.abort(rid)
        if not outputs or outputs[-1].finish in ("error", "abort", None):
            return None
        return Answer(max(o.cached for o in outputs), max(o.prompt_tokens for o in outputs))

    def take(self, worker: str, output: Output) -> None:
        """An output that is no user's."""
        waiting = self._waiting.get((worker, output.rid))
        if waiting is None:
            return
        outputs, ended = waiting
        outputs.append(output)
        if output.finish is not None and not ended.done():
            ended.set_result(None)

    def lost(self, worker: str) -> None:
        """It is dead."""
        for (where, _), (_, ended) in self._waiting.items():
            if where == worker and not ended.done():
                ended.set_result(None)
