"""A server is observed from outside: what is inferred of its steps is what they were, and what cannot be is
refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bien.core.clock import VirtualClock
from bien.core.costs.step import StepModel
from bien.core.errors import BienError, UserError
from bien.core.request import BlockRuns
from bien.replay.calibrate.learn import Subject, learn
from bien.replay.calibrate.remote import Seen, observe_server
from bien.replay.calibrate.remote_steps import prompt_steps
from bien.replay.record import TurnRecord
from bien.replay.target import TurnRequest
from tests.replay.calibrate import stand_in

Change = Callable[[Any], object]


def seen(
    engine: str = "vllm", change: Change = lambda server: None, *, chunk: int | None = None, **options: Any
) -> tuple[Seen, Any]:
    """`change`: done to the server before it is asked. `options`: its own, or those of the observation."""
    return observed(stand_in.StandIn, engine, change, chunk=chunk, **options)


def observed(
    kind: type[stand_in.StandIn],
    engine: str = "vllm",
    change: Change = lambda server: None,
    *,
    chunk: int | None = None,
    **options: Any,
) -> tuple[Seen, Any]:
    asked = {"tokens": 40_000, "context": 4096, "sessions": 8}
    asked |= {k: options.pop(k) for k in list(options) if k in asked}
    clock = VirtualClock()
    server = kind(clock, engine, **options)

    async def run() -> Seen:
        others = change(server)
        try:
            return await observe_server(server, clock, lambda batch, i, n: None, chunk=chunk, **asked)
        finally:
            if isinstance(others, asyncio.Task):
                others.cancel()

    return VirtualClock.run(run()), server


def errors(found: Seen, server: Any) -> np.ndarray[Any, Any]:
    """Of what was observed against what the server charged, where steps are observed."""
    return np.array([abs(o.seconds / server.predicted(o) - 1) for o in found.observed if o.steps])


def rows(found: Seen) -> set[int]:
    return {len(o.steps[0].counts) for o in found.observed if o.steps}


def shapes(found: Seen) -> list[list[tuple[int, ...]]]:
    return [[s.counts for s in o.steps] for o in found.observed]


@pytest.mark.parametrize("engine", ["vllm", "sglang", ""])
def test_what_is_observed_is_what_the_server_charged(engine: str) -> None:
    found, server = seen(engine)
    off = errors(found, server)
    # A window stands for its middle, repeats for one of them.
    assert len(off) >= 15 and off.max() < 1e-2 and np.median(off) < 1e-3
    ran = [stand_in.as_ran(s.starts, s.counts, s.samples) for o in found.observed for s in o.steps]
    assert all(r in server.log for r in ran)
    assert rows(found) >= {1, 2, 4, 8}
    assert len({o.place for o in found.observed}) == len(found.observed)


def test_vllm_tells_prompts_within_the_cache_and_among_others() -> None:
    found, _ = seen()
    steps = [s for o in found.observed for s in o.steps]
    assert any(s.starts[0] >= 256 and s.rows == 1 and s.tokens > 1 for s in steps)
    mixed = [s for s in steps if s.rows > 1 and s.tokens > s.rows]
    assert {s.rows - 1 for s in mixed} >= {1, 2, 4, 8}
    assert all(s.samples == s.rows for s in mixed)
    # Their sequences have lengths of their own.
    assert any(len(set(s.starts)) > 2 for s in mixed)
    assert any(o.requests and not o.steps for o in found.observed)


def test_sglang_computes_prompts_before_others_decode() -> None:
    found, _ = seen("sglang")
    pairs = [o.steps for o in found.observed if len(o.steps) == 2]
    assert pairs and all(a.rows == 1 and b.samples == b.rows == b.tokens for a, b in pairs)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_calibration_predicts_steps_that_nobody_observed(engine: str) -> None:
    found, server = seen(engine, tokens=40_000, sessions=16)
    learnt = learn(stand_in.model(), found.observed, Subject(engine, "m", "h100"))
    held = learnt.calibration.held_out
    assert held is not None and held.places >= 10 and held.median < 0.03
    calibrated = StepModel(
        server.model.a,
        server.model.machine,
        factors=learnt.calibration.factors,
        correction=learnt.calibration.correction,
    )
    for starts, counts in (
        ([700, 90, 1500], [1, 1, 1]),
        ([300] * 12, [1] * 12),
        ([0], [900]),
        ([600], [300]),
        ([100, 0], [1, 700]),
    ):
        step = np.array(starts), np.array(counts), len(starts)
        assert calibrated.seconds(*step) == pytest.approx(server.model.seconds(*step), rel=0.05)
    assert learnt.calibration.request_seconds == pytest.approx(stand_in.WAY, rel=0.3)


def test_chunks_of_several_tokens_are_counted() -> None:
    found, server = seen(change=lambda s: setattr(s, "interval", 3))
    assert errors(found, server).max() < 1e-2
    assert rows(found) >= {1, 2, 4, 8}


@pytest.mark.parametrize("seconds", [1.0, 0.035])
def test_a_stall_now_and_then_is_no_step(seconds: float) -> None:
    found, server = seen(change=lambda s: setattr(s, "stall", lambda n: seconds if n % 97 == 96 else 0.0))
    off = errors(found, server)
    assert np.median(off) < 1e-3
    decoding = [o for o in found.observed if o.steps and o.steps[0].tokens == o.steps[0].rows]
    assert all(o.seconds < 1.02 * server.predicted(o) for o in decoding if len(o.steps) == 1)


def test_longer_prompts_are_measured_where_chunks_are_known() -> None:
    unknown, _ = seen(context=8192, tokens=80_000, chunk=None, change=lambda s: setattr(s, "chunk", 4096))
    known, server = seen(context=8192, tokens=80_000, chunk=512, change=lambda s: setattr(s, "chunk", 512))
    assert errors(known, server).max() < 1e-2
    assert max(s.tokens for o in known.observed for s in o.steps) <= 512
    assert max(sum(s.tokens for s in o.steps) for o in known.observed) > 2048
    assert all(len(o.steps) < 2 for o in unknown.observed)
    assert any("--chunk" in note for note in unknown.notes)
    assert not any("--chunk" in note for note in known.notes)


@pytest.mark.parametrize("chunk", [512, 1800])
def test_chunks_smaller_than_believed_are_noticed(chunk: int) -> None:
    with pytest.raises(UserError, match=r"of \d+ prompts took more steps .* 2,048 tokens do.*--chunk"):
        seen(change=lambda s: setattr(s, "chunk", chunk))


def test_one_prompt_in_more_steps_than_believed_is_left_out() -> None:
    class Once(stand_in.StandIn):
        cut: Any = None

        def _plan(self) -> list[tuple[Any, int]]:
            if self.cut is None and self._running:
                self.cut = next((s for s in self._waiting if s.prompt > 1900), None)
            cutting = self.cut is not None and self.cut.last < 0
            self.chunk = 512 if cutting else 2048
            return super()._plan()

    found, server = observed(Once)
    assert server.cut is not None
    mixed = [
        o for o in found.observed if o.steps and o.steps[0].rows > 1 and o.steps[0].tokens > o.steps[0].rows
    ]
    assert mixed and all(o.seconds == pytest.approx(server.predicted(o), rel=1e-2) for o in mixed)
    assert any("could not be told apart (1x)" in note for note in found.notes)


def test_a_prompt_beside_others_is_cut_by_what_they_leave() -> None:
    first, last = prompt_steps(10, 25, 16, beside=[100, 200])
    assert (first.starts, first.counts, first.samples) == ((100, 200, 10), (1, 1, 14), 2)
    assert (last.starts, last.counts, last.samples) == ((101, 201, 24), (1, 1, 11), 3)


def others(server: Any) -> asyncio.Task[None]:
    """Somebody else's requests, all the time."""

    async def run() -> None:
        for n in range(10_000):
            scope = f"other-{n}"
            request = TurnRequest(
                scope, scope, scope, "", BlockRuns.of([(0, 50)]), BlockRuns.of([(1 << 40, 20)])
            )
            await server.generate(request, TurnRecord(scope, 0, 0))

    return asyncio.create_task(run())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_others_on_the_server_are_noticed(engine: str) -> None:
    with pytest.raises(UserError, match=r"nobody else uses|others use") as error:
        seen(engine, others)
    assert any(c.isdigit() for c in str(error.value))


def lying(name: str, change: Callable[[float], float]) -> Change:
    return lambda server: setattr(server, "lie", lambda n, v: change(v) if n == name else v)


def growing() -> Callable[[float], float]:
    """One more at each look."""
    looks = iter(range(1 << 20))
    return lambda value: value + next(looks)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("num_requests_running", lambda v: v + 1 if v else 0, "2 requests run on the server, 1 of them"),
        ("num_requests_running", lambda v: v + 3, "3 requests run and 0 wait"),
        ("num_requests_waiting", lambda v: v + 2, "0 requests run and 2 wait"),
        ("prompt_tokens_total", growing(), "counted 49 prompt tokens while 48 were ours: others"),
        ("request_success_total", growing(), "counted 2 requests while 1 were ours: others"),
        ("generation_tokens_total", lambda v: 0, "counted 0 output tokens while 48 were ours: its metrics"),
        ("prefix_cache_hits_total", growing(), "count 1 cached prompt tokens where its answers say 0"),
    ],
)
def test_metrics_that_say_otherwise_are_refused(
    name: str, change: Callable[[float], float], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        seen(change=lying(name, change))


def test_hits_within_a_batch_are_refused() -> None:
    def change(server: Any) -> None:
        server.tells, hits = False, growing()
        server.lie = lambda n, v: hits(v) if n == "prefix_cache_hits_total" and server.steps > 450 else v

    with pytest.raises(UserError, match=r"\d+ prompt tokens of a batch were cached"):
        seen(change=change)


def test_the_servers_own_mean_between_tokens_is_a_step() -> None:
    found, server = seen(change=lying("inter_token_latency_seconds_sum", lambda v: 1.1 * v))
    decoding = [o for o in found.observed if o.steps and o.steps[0].tokens == o.steps[0].rows]
    assert len(decoding) >= 8
    for o in decoding:
        assert o.seconds == pytest.approx(1.1 * server.predicted(o), rel=1e-3)
    assert any("-9.1% in the median" in note for note in found.notes)


def test_windows_that_the_server_saw_otherwise_are_left_out() -> None:
    found, _ = seen(change=lying("inter_token_latency_seconds_sum", lambda v: 2 * v))
    assert all(o.steps[0].tokens > o.steps[0].rows for o in found.observed if o.steps)
    assert any("is not the server's" in note for note in found.notes)


def test_a_window_in_which_fewer_ran_is_left_out() -> None:
    found, _ = seen(change=lying("num_requests_running", lambda v: max(0, v - 1)))
    assert all(o.steps[0].tokens > o.steps[0].rows for o in found.observed if o.steps)
    assert any("left out: 7 of 8 sequences ran, 0 waited" in note for note in found.notes)


def test_a_look_that_comes_too_late_says_nothing_of_a_window() -> None:
    class Late(stand_in.StandIn):
        looked = 0

        async def metrics(self) -> str:
            if self._running and self.steps > self.looked + 10:
                await self._clock.sleep(5.0)
            self.looked = self.steps
            return await super().metrics()

    found, server = observed(Late)
    decoding = [o for o in found.observed if o.steps and o.steps[0].tokens == o.steps[0].rows]
    assert {o.steps[0].rows for o in decoding} == {1, 2, 4, 8}
    assert errors(found, server).max() < 1e-2


def test_sglang_counts_now_and_then() -> None:
    # Small batches follow large ones.
    found, server = seen("sglang", lambda s: setattr(s, "every", 300), tokens=100_000)
    assert errors(found, server).max() < 1e-2
    assert max(o.repeats for o in found.observed) > 24
    with pytest.raises(UserError, match="9 requests run on the server, . of them"):
        seen("sglang", lying("num_running_reqs", lambda v: v + 8 if v else 0))


def test_hits_of_what_was_never_sent_are_refused() -> None:
    def change(server: Any) -> None:
        server.tells = False
        server.lie = lambda n, v: hits(v) if n == "prefix_cache_hits_total" else v

    hits = growing()
    with pytest.raises(UserError, match="1 prompt tokens were cached where 0 had been sent"):
        seen(change=change)


def test_speculation_is_refused() -> None:
    with pytest.raises(UserError, match=r"speculates \(\d+ drafts"):
        seen(change=lambda s: setattr(s, "drafts", 3))


def test_several_engines_are_refused() -> None:
    with pytest.raises(UserError, match="2 engines"):
        seen(change=lambda s: setattr(s, "ranks", 2))


def test_preempted_batches_are_left_out() -> None:
    def change(server: Any) -> None:
        looks = growing()
        server.lie = lambda n, v: looks(v) if n == "num_preemptions_total" and server.steps > 600 else v

    whole, _ = seen()
    found, server = seen(change=change)
    assert 0 < len(found.observed) < len(whole.observed)
    assert any("preempted" in note for note in found.notes)
    assert errors(found, server).max() < 1e-2


def test_a_batch_that_waits_for_room_is_left_out() -> None:
    found, server = seen(slots=4)
    assert max(len(o.steps[0].counts) for o in found.observed if o.steps) <= 4 + 1
    assert any("left out" in note for note in found.notes)
    assert errors(found, server).max() < 1e-2


def test_what_was_cached_comes_from_the_metrics_where_answers_do_not_say() -> None:
    def change(server: Any) -> None:
        server.tells = False

    found, server = seen(change=change)
    assert errors(found, server).max() < 1e-2
    assert any(o.steps and o.steps[0].rows == 1 and o.steps[0].starts[0] >= 512 for o in found.observed)
    silent, server = seen("", change)
    assert errors(silent, server).max() < 1e-2
    assert all(s.starts[0] == 0 for o in silent.observed for s in o.steps if s.rows == 1 and s.tokens > 1)
    assert any("only prompts that are new" in note for note in silent.notes)
    assert any("could be checked" in note for note in silent.notes)


def test_a_server_without_a_cache_is_as_good() -> None:
    found, server = seen(change=lambda s: setattr(s, "caches", False))
    assert errors(found, server).max() < 1e-2


def test_too_little_room_is_refused() -> None:
    with pytest.raises(UserError, match="room for 100 tokens"):
        seen(context=100)
    with pytest.raises(UserError, match="sessions = 0"):
        seen(sessions=0)


def test_a_server_that_stops_early_is_refused() -> None:
    class Short(stand_in.StandIn):
        async def generate(self, request: TurnRequest, record: TurnRecord) -> None:
            record.sent = self._clock.time()
            record.chunk(self._clock.time(), 1)

    with pytest.raises(UserError, match="after 1 tokens, 48 were asked for"):
        observed(Short)


def test_a_probe_that_fails_is_named() -> None:
    class Failing(stand_in.StandIn):
        async def generate(self, request: TurnRequest, record: TurnRecord) -> None:
            if len(request.prompt) == 128:
                record.error = "HTTP 400: no such token"
                return
            await super().generate(request, record)

    with pytest.raises(BienError, match="a probe of 128 tokens failed: HTTP 400"):
        observed(Failing)
