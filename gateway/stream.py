"""`Stream`: the outputs of one request, as they come from its worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from bien.core.errors import BienError, UserError, error_kinds
from bien.core.request import GenerateRequest
from bien.core.worker.messages import Output
from bien.gateway.routing import Decision, RouteRequest

if TYPE_CHECKING:
    from bien.gateway.roster import Member
    from bien.gateway.sharing import Reserved
    from bien.gateway.spans import RequestSpan

MAX_LOSSES = 3  # a request that cost so many workers is not tried again
Recover = Callable[["Stream"], Awaitable[None]]  # place it again, or raise


class Stream:
    """Iterate over it once: `Output`s with `count` tokens, their `tokens` bytes (empty in simulation) and,
    on the last one, `finish`. Raises what ended it otherwise. All counts are of the latest placement."""

    def __init__(
        self,
        request: GenerateRequest,
        arrival: float,
        recover: Recover,
        restart: Callable[[], None] | None = None,
    ) -> None:
        self.request = request
        self.route = RouteRequest(
            request.id,
            request.tenant,
            request.session,
            request.prompt_tokens,
            request.sampling.max_tokens,
            request.priority,
            request.hashes,
        )
        self.arrival = arrival  # clock seconds of admission
        # Written by the gateway:
        self.member: Member | None = None  # where it is placed
        self.dp_rank = 0  # and at which of its engines
        self.rid = 0
        self.decision = Decision(0, 0)
        self.placements = 0
        self.placed = -1.0  # clock seconds of the latest placement
        self.reserved: Reserved | None = None  # what is reserved for it until it starts
        self.unreported = 0  # tokens to be computed that its worker's load does not show yet
        self.span: RequestSpan | None = None
        self.cached = -1
        self.counted = -1  # prompt tokens, as its engine counts them; -1: it does not say
        self.claimed = -1  # tokens that the index said are cached there; -1: it is not verified
        self.expected = -1  # and what was believed
        self.first = -1.0  # clock seconds of the first and of the latest tokens
        self.last = -1.0
        self.first_count = 0  # tokens that came at `first`
        self.output_tokens = 0
        self.finish: str | None = None
        self.lost = ""  # why its worker died, until it is placed again
        self.losses = 0  # workers that died of it, for all that is known
        self.acquit: Callable[[], None] | None = None  # ends its trial, while it is on trial (trial.py)
        self.streamed = False  # whether its consumer has had anything that stays; written here
        self.late = False  # set by a consumer that needs no output before the last: he is woken then only
        self.came = -1.0  # clock seconds at which the output that was given out last had come
        self._outputs: deque[tuple[Output, float]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._recover = recover
        self._restart = restart
        self._given = False  # whether its consumer has had anything of this placement

    @property
    def prompt_tokens(self) -> int:
        return self.route.prompt_tokens

    @property
    def worker(self) -> str:
        """The worker that it was last placed at."""
        return self.member.id if self.member else ""

    @property
    def repeatable(self) -> bool:
        """Whether its consumer would take all of it again."""
        return self._restart is not None

    @property
    def progress(self) -> str:
        """How far it came, for an error."""
        if self.streamed:
            return f"{self.output_tokens} tokens had been streamed"
        return f"{self.losses} workers had died of or with this request"

    @property
    def suspect(self) -> bool:
        """Whether one more loss is its last."""
        return self.losses == MAX_LOSSES - 1

    def push(self, output: Output, now: float) -> None:
        """An output that came at `now`."""
        self._outputs.append((output, now))
        if self.late:
            self._given = True
            self.streamed = self._restart is None
            if output.finish is None:
                return
        self.wake()

    def lose(self, reason: str) -> None:
        """Its worker is dead."""
        self.lost = reason or "no reason given"
        if not self.streamed:
            self._outputs.clear()  # the next placement makes them again
        self.wake()

    def release(self) -> None:
        """Nothing is reserved for it any more."""
        reserved, self.reserved = self.reserved, None
        if reserved is not None:
            reserved.release()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Output:
        while True:
            if self._outputs:
                output, self.came = self._outputs.popleft()
                if output.finish == "error":
                    raise failure(output)
                self._given = True
                self.streamed = self._restart is None
                return output
            if self.finish is not None:
                raise StopAsyncIteration
            if self.lost:
                await self._recover(self)
                if self._given and self._restart is not None:
                    self._given = False
                    self._restart()
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


def failure(output: Output) -> BienError:
    """The error that a worker reported in an output."""
    kind = error_kinds().get(output.error_code, BienError)
    text = output.error or "the worker gave no reason"
    return kind(text, field=output.error_field or None) if issubclass(kind, UserError) else kind(text)
