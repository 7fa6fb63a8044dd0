"""Observes a vLLM or SGLang server from outside: its steps are inferred from streams, and its metrics say
whether the inference holds.

A batch that decodes gains a token per sequence and step, so the time between tokens is a step's. The time
to the first token of a prompt that runs alone is that of the steps which compute it, and of its way. A prompt
that comes while others decode holds them up by the steps that it shares with them.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from statistics import median

import aiohttp
import msgspec

from bien.core.clock import Clock, WallClock
from bien.core.costs.observed import Observed, place
from bien.core.errors import UserError
from bien.core.request import BlockRuns
from bien.replay.calibrate.metrics import ServerState
from bien.replay.calibrate.probes import Batch, Reach
from bien.replay.calibrate.remote_checks import OFF, check, check_window
from bien.replay.calibrate.remote_flow import Flow, Prober, Server
from bien.replay.calibrate.remote_plan import CHUNK, Lone, RemotePlan, Together, remote_plan
from bien.replay.calibrate.remote_steps import Window, alone, merged, newcomer, window
from bien.replay.targets.http import HttpTarget

TOKENS = 40_000  # prompt tokens of all probes, about
CONTEXT = 4096  # of one sequence
SESSIONS = 16  # at a time
OnBatch = Callable[[Batch, int, int], None]  # which, how many are done, of how many
SILENCE = 120.0  # seconds: no probe is so long that a server may say nothing for as long
_WARM = 48  # tokens: a server that speculates, or compiles, does so once
_SPARE = (4, 64)  # decode steps that a look at the metrics may take


class Seen(msgspec.Struct, frozen=True):
    """`notes`: what was assumed, left out, or could not be checked; each a sentence to print."""

    observed: list[Observed]
    engine: str  # "vllm", "sglang"; "" where it does not say
    model: str  # as the server names it
    notes: list[str]


async def observe(
    url: str,
    on_batch: OnBatch,
    *,
    tokens: int = TOKENS,
    context: int = CONTEXT,
    sessions: int = SESSIONS,
    chunk: int | None = None,
    vocab_size: int | None = None,
) -> Seen:
    """Steps by place, and ways of requests. `chunk`: tokens of a step at most (vLLM: max_num_batched_tokens,
    SGLang: chunked_prefill_size); None: not known, no prompt longer than the least default is measured.
    `vocab_size`: of the model; None: as the server says, or one that is small.

    Raises:
        ResourceError: nothing answers at `url`, or not in time.
        UserError: what answers cannot be calibrated on (others use it, it speculates, it is too small).
        BienError: a probe failed.
    """
    clock = WallClock()
    target = await HttpTarget.connect(url, clock, vocab_size=vocab_size, silence=SILENCE)
    try:
        chunk = chunk or await _stated_chunk(url)
        return await observe_server(
            target, clock, on_batch, tokens=tokens, context=context, sessions=sessions, chunk=chunk
        )
    finally:
        await target.close()


async def observe_server(
    server: Server,
    clock: Clock,
    on_batch: OnBatch,
    *,
    tokens: int,
    context: int,
    sessions: int,
    chunk: int | None,
) -> Seen:
    """`observe` of what is connected already."""
    for name, value in (("tokens", tokens), ("context", context), ("sessions", sessions), ("chunk", chunk)):
        if value is not None and value < 1:
            raise UserError(f"{name} = {value}; valid: 1 or more", field=name)
    prober = Prober(server, clock, f"calibrate-{uuid.uuid4().hex}")
    observer = _Observer(prober, chunk, sessions)
    spare, state = await observer.warm_up()
    reach = Reach(
        sessions=sessions,
        context=min(context, server.info.max_context or context),
        cache=state.cache if state is not None and state.cache else sessions * context,
        tokens=tokens,
    )
    await observer.all(remote_plan(reach, observer.chunk, spare), on_batch)
    return Seen(merged(observer.observed), state.engine if state else "", server.info.model, observer.notes())


async def _stated_chunk(url: str) -> int | None:
    """SGLang says with what it was started."""
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with session.get(url.rstrip("/").removesuffix("/v1") + "/server_info") as response:
                body = await response.read() if response.status == 200 else b"{}"
        stated = msgspec.json.decode(body, type=_ServerInfo).chunked_prefill_size
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
        return None
    return stated if stated and stated > 0 else None


class _ServerInfo(msgspec.Struct):
    chunked_prefill_size: int | None = None


class _Observer:
    def __init__(self, prober: Prober, chunk: int | None, most: int) -> None:
        self.chunk = chunk or CHUNK
        self.observed: list[Observed] = []
        self._prober, self._known, self._most = prober, chunk is not None, most
        self._engine = ""
        self._caches = True  # and says what it has cached
        self._dropped: dict[str, int] = {}
        self._split = self._whole = 0  # newcomers of about the largest size, by what they did
        self._largest = 0
        self._gaps: list[float] = []  # client's / server's
        self._ways: list[float] = []  # seconds
        self._firsts: list[float] = []  # seconds to a first token, client's beyond server's

    async def warm_up(self) -> tuple[int, ServerState | None]:
        """Decode steps that a look at the metrics takes, and what it says."""
        await self._prober.alone(BlockRuns.of([(0, _WARM)]), _WARM, "cold")
        flow = await self._prober.alone(BlockRuns.of([(0, _WARM)]), _WARM, "warm")
        checked, state = check(flow), flow.after.state
        self._engine = state.engine if state else ""
        self._caches = checked.cached is not None
        record = flow.records[0]
        step = (record.last - record.first) / (_WARM - 1)
        look = flow.before.came - flow.before.asked
        low, high = _SPARE
        return (min(high, low + math.ceil(look / step)) if step > 0 else low), state

    async def all(self, plan: RemotePlan, on_batch: OnBatch) -> None:
        self._largest = max((n for t in plan.together for n in t.newcomers), default=0)
        once: list[Lone | Together] = [*plan.lone, *plan.together]
        probes = once * plan.rounds
        for number, probe in enumerate(probes):
            if number == len(probes) // plan.rounds:
                self._check_chunk()
            if isinstance(probe, Lone):
                on_batch(Batch(1, probe.prompt), number, len(probes))
                await self._lone(probe, number)
            else:
                on_batch(probe.batch, number, len(probes))
                self._together(await self._prober.together(probe, number))
        self._check_chunk()

    async def _lone(self, lone: Lone, number: int) -> None:
        more = lone.more if self._caches else ()
        for flow, sent in await self._prober.lone(Lone(lone.prompt, more), number):
            checked = check(flow)
            record, cached = flow.records[0], checked.cached or 0
            if cached >= record.prompt_tokens:
                raise UserError(
                    f"the server says that {cached} of {record.prompt_tokens} prompt tokens were cached; "
                    "valid: fewer, the last one is computed",
                    field="url",
                )
            if cached > sent:
                raise UserError(
                    f"the server says that {cached} prompt tokens were cached where {sent} had been sent",
                    field="url",
                )
            if checked.first is not None and checked.first.count == 1:
                self._firsts.append(record.first - record.sent - checked.first.seconds)
            if checked.dropped:
                self._drop(checked.dropped)
            elif record.prompt_tokens - cached > self.chunk and not self._known:
                continue  # in how many steps is not known
            else:
                found = alone(record, cached, self.chunk, checked.prefill)
                self.observed += found
                self._ways += [o.seconds for o in found if not o.steps]

    def _together(self, flow: Flow) -> None:
        checked = check(flow)
        if checked.cached:
            raise UserError(
                f"the server says that {checked.cached} prompt tokens of a batch were cached; nobody has "
                "sent its prompts before",
                field="url",
            )
        dropped, gaps = check_window(flow, self._most)
        found = window(flow)
        if not (dropped := checked.dropped or dropped) and found is None:
            dropped = "sequences of a batch did not decode together for long enough"
        if found is not None and not dropped and gaps is not None and gaps.mean:
            self._gaps.append(found.seconds / gaps.mean)
            if abs(found.seconds / gaps.mean - 1) > OFF:
                dropped = "the client's time between tokens is not the server's"
        if dropped or found is None:
            self._drop(dropped)
            return
        # Nothing but the batch ran: the server's own mean is a step's, without what the network adds.
        seconds = gaps.mean if gaps is not None and gaps.mean and not found.stalled else found.seconds
        self.observed.append(Observed(seconds, (found.step,), place(found.step), repeats=found.steps))
        self._newcomers(flow, found)

    def _newcomers(self, flow: Flow, found: Window) -> None:
        if not self._engine:  # how it orders its steps is not known
            return
        for record in flow.newcomers:
            seen = newcomer(flow, record, self.chunk, found.seconds, self._engine == "vllm")
            if seen.observed is not None and 4 * record.prompt_tokens > 3 * self._largest:
                self._split += seen.split
                self._whole += not seen.split
            if seen.observed is None or seen.split:
                self._drop("the steps of a prompt among others could not be told apart")
            else:
                self.observed.append(seen.observed)

    def _check_chunk(self) -> None:
        if self._split >= 2 and self._split > self._whole:
            raise UserError(
                f"{self._split} of {self._split + self._whole} prompts took more steps than chunks "
                f"of {self.chunk:,} tokens do; valid: --chunk with what the server was started with "
                "(vLLM: --max-num-batched-tokens, SGLang: --chunked-prefill-size)",
                field="chunk",
            )

    def _drop(self, why: str) -> None:
        self._dropped[why] = self._dropped.get(why, 0) + 1

    def notes(self) -> list[str]:
        out = []
        if not self._engine:
            out.append("the server has no metrics of vLLM or SGLang: nothing that it did could be checked")
        if not self._known:
            out.append(
                f"steps are taken to hold {self.chunk:,} tokens or more, the least default of vLLM and "
                "SGLang (--chunk); longer prompts were not measured"
            )
        if not self._caches:
            out.append("the server does not say what it has cached: only prompts that are new were measured")
        if self._gaps:
            out.append(
                "time between tokens, by the client against the server's own: "
                f"{median(self._gaps) - 1:+.1%} in the median of {len(self._gaps)} batches"
            )
        if self._firsts:
            out.append(
                "to the first token, by the client beyond the server's own: "
                f"{1e3 * median(self._firsts):.1f} ms in the median of {len(self._firsts)} prompts"
            )
        if self._ways:
            out.append(
                f"to the first token, {1e3 * median(self._ways):.1f} ms are the request's way and not a step "
                f"(median of {len(self._ways)})"
            )
        out += [f"left out: {why} ({n}x)" for why, n in self._dropped.items()]
        return out
