from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.errors import DeploymentError
from bien.core.strict import decode
from bien.core.worker.messages import WorkerStats
from bien.gateway.routing import Decision, Outcome, Router, RouteRequest, Target
from bien.gateway.testing.router import BLOCK, RouterSuite, make_request, make_target
from bien.plugins.routers._fit import Fit
from bien.plugins.routers._held import Held, Returns
from bien.plugins.routers._pace import Pace
from bien.plugins.routers.kv_aware import SESSIONS, KVAwareConfig, KVAwareRouter


class TestKVAware(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return KVAwareRouter(KVAwareConfig(), rng)


# 0.1 ms a token, 10 a step, and 0.1 x 100 output tokens for each request there; others and fairness left out.
PLAIN = {"others": 0.0, "fair": 0.0, "evicted": 0.0}


def make(**config: Any) -> KVAwareRouter:
    return KVAwareRouter(KVAwareConfig(**{**PLAIN, **config}), random.Random(0))


def choose(*targets: Target, prompt: int = 1000, **config: Any) -> tuple[str, int, dict[str, float | str]]:
    decision = make(**config).choose(make_request(0, prompt), targets)
    return targets[decision.target].worker, decision.predicted_cached, decision.reasons


def loadable(target: Target, tokens: int) -> Target:
    target.loadable = tokens
    return target


# The cost


def test_the_cached_prefix_decides_among_equals() -> None:
    worker, predicted, reasons = choose(make_target("a"), make_target("b", 640), make_target("c", 320))
    assert (worker, predicted) == ("b", 640)
    assert reasons == {
        "prefill_ms": pytest.approx(10 + 36.0),
        "load_ms": 0.0,
        "queue_ms": 0.0,
        "room_ms": 0.0,
        "decode_ms": 0.0,
        "others_ms": 0.0,
        "evicted_ms": 0.0,
        "fair_ms": 0.0,
        "loaded_tokens": 0.0,
        "ties": 1.0,
    }


def test_attention_makes_late_tokens_dearer() -> None:
    _, _, reasons = choose(make_target("a", 640), ms_per_token_pair=0.001)
    assert reasons["prefill_ms"] == pytest.approx(10 + 36 + 0.001 * 360 * (640 + 180))
    assert reasons["prefill_ms"] == pytest.approx(10 + 36 + 0.001 * (1000**2 - 640**2) / 2)
    _, _, reasons = choose(make_target("a", queued_tokens=50), ms_per_token_pair=0.001)
    assert reasons["queue_ms"] == pytest.approx(50 * (0.1 + 0.001 * 1000))  # behind prompts like this one


def test_a_slower_tier_is_loaded_at_its_price_and_predicted() -> None:
    near, far = make_target("near", 320), loadable(make_target("far", 160), 480)
    worker, predicted, reasons = choose(near, far)
    assert (worker, predicted, reasons["loaded_tokens"]) == ("far", 640, 480.0)
    assert reasons["load_ms"] == pytest.approx(4.8)
    assert reasons["prefill_ms"] == pytest.approx(10 + 36)
    assert choose(near, far, ms_per_loaded_token=0.1)[0] == "near"  # 48 + 36 against 68


def test_a_queue_outweighs_the_prefix_exactly_where_waiting_costs_more() -> None:
    def at(queued: int) -> str:
        return choose(make_target("hit", 640, queued_tokens=queued), make_target("miss"))[0]

    assert at(639) == "hit"
    assert at(641) == "miss"


def test_what_reports_cannot_show_yet_counts_as_queued() -> None:
    assert choose(make_target("a", tokens=100), make_target("b", queued_tokens=99))[0] == "b"
    assert choose(make_target("a", tokens=50, queued_tokens=50), make_target("b", tokens=99))[0] == "b"


def test_each_request_there_has_its_price() -> None:
    full, free = make_target("full", 640, running=7), make_target("free")
    assert choose(full, free)[0] == "free"  # 36 + 70 ms against 100
    assert choose(full, free, ms_per_row=0.05)[0] == "full"  # 36 + 35
    assert choose(make_target("a", inflight=2), make_target("b", running=1, waiting=2))[0] == "a"
    assert choose(make_target("a", inflight=2, running=3))[2]["decode_ms"] == pytest.approx(30.0)


def test_a_prefill_goes_where_it_stops_fewer_others() -> None:
    busy, idle = make_target("busy", 640, running=3), make_target("idle")
    assert choose(busy, idle, ms_per_row=0.0)[0] == "busy"
    assert choose(busy, idle, ms_per_row=0.0, others=1.0)[0] == "busy"  # 36 x (1 + 4) against 100 x (1 + 1)
    assert choose(busy, idle, ms_per_row=0.0, others=2.0)[0] == "idle"  # 36 x (1 + 8) against 100 x (1 + 2)
    waiting = make_target("waiting", 640, waiting=3)  # they wait, but not for this one
    assert choose(waiting, idle, ms_per_row=0.0, others=2.0)[0] == "waiting"


def test_a_full_worker_makes_wait() -> None:
    router = make(ms_per_row=0.0)
    full, free = make_target("full", 960, running=8), make_target("free")  # of 8 slots
    request = make_request(0)
    assert router.choose(request, [full, free]).target == 0
    for n in range(200):  # requests live for 2 seconds after their first token
        router.observe(Decision(0, 0), Outcome(make_request(n), "free", 0, 0, 0, 0.11, 2.11, "stop"))
    decision = router.choose(request, [full, free])
    assert decision.target == 1 and decision.reasons["room_ms"] == 0.0
    assert router.choose(request, [full]).reasons["room_ms"] == pytest.approx(2000 / 8, rel=0.05)
    narrow = make_target("narrow", used_blocks=90, total_blocks=100)
    short = (1000 + 100 - 160) / (90 * BLOCK)  # of what must be given back before it fits
    assert router.choose(request, [narrow]).reasons["room_ms"] == pytest.approx(2000 * short, rel=0.05)


def test_the_last_token_is_never_predicted() -> None:
    for prompt, overlap, expected in ((640, 640, 624), (641, 640, 640), (1, 0, 0), (16, 16, 0)):
        assert choose(make_target("a", overlap), prompt=prompt)[1] == expected


# Bursts and hot prefixes, with the bookkeeping that the gateway does


class Cluster:
    """Targets that hear of placements at once, as predicted inserts and tokens in flight do."""

    def __init__(self, *names: str) -> None:
        self.targets = [make_target(name) for name in names]
        self.placed: Counter[str] = Counter()

    def send(self, router: KVAwareRouter, request: RouteRequest, shared: int) -> str:
        """`shared` tokens of the prompt are those of every other request."""
        target = self.targets[router.choose(request, self.targets).target]
        target.inflight += 1
        target.inflight_tokens += request.prompt_tokens - target.overlap
        target.overlap = shared // BLOCK * BLOCK
        self.placed[target.worker] += 1
        return target.worker


def test_a_hot_prefix_is_copied_where_waiting_for_it_costs_more_than_computing_it() -> None:
    # 16,000 shared tokens take 1600 ms. Each further request brings 100 ms of its own: the sixteenth would
    # wait as long as a copy takes.
    cluster, router = Cluster("a", "b"), make(ms_per_row=0.0)
    cluster.targets[0].overlap = 16_000
    where = [cluster.send(router, make_request(n, 17_000), 16_000) for n in range(40)]
    assert where[:16] == ["a"] * 16
    assert where[16] == "b"
    assert set(where[18:]) == {"a", "b"}  # from then on both have it
    assert 6 <= Counter(where[17:])["b"] <= 12
    # A copy of twice the price is made later.
    cluster, router = Cluster("a", "b"), make(ms_per_row=0.0)
    cluster.targets[0].overlap = 32_000
    where = [cluster.send(router, make_request(n, 33_000), 32_000) for n in range(40)]
    assert where.index("b") == 32


def test_a_burst_of_sub_agents_waits_for_one_prefix_unless_others_compute_it_much_sooner() -> None:
    def burst(shared: int, own: int, agents: int) -> Counter[str]:
        cluster, router = Cluster(*"abcd"), make(ms_per_row=0.0, others=0.2)
        for n in range(agents):
            cluster.send(router, make_request(n, shared + own), shared)
        return cluster.placed

    assert len(burst(8000, 160, 4)) == 1  # the second would have the prefix elsewhere no sooner than here
    assert sorted(burst(160, 8000, 8).values()) == [2, 2, 2, 2]  # there is next to nothing to share
    assert len(burst(8000, 160, 40)) > 1  # the queue behind it has become longer than that


# What must go for it


def fill(router: KVAwareRouter, name: str, sessions: list[str], tokens: int = 800) -> Target:
    """Place a request of each session on the worker, which then is full of them."""
    blocks = -(-tokens // BLOCK) * len(sessions)
    target = make_target(name, total_blocks=blocks)
    for n, session in enumerate(sessions):
        request = make_request(n, tokens, session)
        request.max_tokens = 0
        router.choose(request, [target])
    return make_target(name, total_blocks=blocks, cached_blocks=blocks)


def test_a_newcomer_goes_where_what_must_go_is_least_wanted() -> None:
    router = make(evicted=1.0)
    old = fill(router, "old", ["x1", "x2"])
    for n in range(300):  # meanwhile elsewhere: sessions come back soon or never
        router.choose(make_request(n, 100, f"y{n // 3}"), [make_target("c")])
    fresh = fill(router, "fresh", ["z1", "z2"])
    decision = router.choose(make_request(0, 800, "new"), [fresh, old])
    assert decision.target == 1
    alone = router.choose(make_request(1, 800, "newer"), [make_target("e", total_blocks=1000)])
    assert alone.reasons["evicted_ms"] == 0.0  # there is room
    assert float(decision.reasons["evicted_ms"]) < 40.0  # of 80 ms, those tokens computed again


def test_its_own_kv_does_not_count_as_that_of_others() -> None:
    router = make(evicted=1.0)
    target = fill(router, "a", ["mine"])
    target.overlap = 640
    assert router.choose(make_request(0, 1600, "mine"), [target]).reasons["evicted_ms"] == 0.0
    target.overlap = 0
    assert float(router.choose(make_request(0, 1600, "other"), [target]).reasons["evicted_ms"]) > 0.0


def test_a_worker_that_starts_again_holds_nothing() -> None:
    router = make(evicted=1.0)
    full = fill(router, "a", ["x1", "x2"])
    full.info = msgspec.structs.replace(full.info, generation="a.2")
    router.choose(make_request(0, 160, "y"), [full])
    held = router._held["a", 0]
    assert held.generation == "a.2" and held.tokens < 500


def test_held_evicts_in_order_of_use() -> None:
    held, returns = Held(""), Returns()
    for now, name in enumerate(("a", "b", "a", "c")):
        held.add(("", name), 100, now, 350)
    assert held.tokens == 350  # b lost 50
    always = {"other": ("", "new"), "b": ("", "b")}
    for key, tokens, expected in (("other", 50, 50), ("other", 150, 150), ("b", 50, 50), ("other", 999, 350)):
        chance = returns.chance(1)
        assert held.missed(tokens, 350, always[key], 4, returns) == pytest.approx(
            chance * min(expected, 350 - 50 * (key == "b"))
        )
    assert (
        held.missed(100, 500, ("", "new"), 4, returns) == 0.0
    )  # 150 are of nobody whom it knows: they go first


def test_who_comes_back_is_learned() -> None:
    returns = Returns()
    for n in range(640):
        returns.note(3 if n % 4 else 0)  # three of four placements are returns after 3 requests, none later
    assert returns.chance(1) == pytest.approx(0.75, abs=0.05)
    assert returns.chance(100) < 0.05


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400)), max_size=60), st.integers(1, 1000))
def test_held_counts_what_it_holds(uses: list[tuple[int, int]], capacity: int) -> None:
    held = Held("")
    for now, (session, tokens) in enumerate(uses):
        held.add(("", str(session)), tokens, now, capacity)
        assert held.tokens == sum(size for size, _ in held._sessions.values()) <= capacity


# What it learns


def noisy(rng: random.Random, value: float) -> float:
    return value * rng.uniform(0.9, 1.1)


def test_a_fit_finds_the_coefficients_from_anywhere() -> None:
    rng = random.Random(0)
    true = (5.0, 0.03, 2e-6)
    fit = Fit((10.0, 0.1, 0.0), (1.0, 1000.0, 1e7), strength=20, memory=1000)
    for n in range(2000):
        new = rng.choice([100, 700, 20_000])
        x = (1.0, float(new), new * rng.uniform(0, 100_000))
        fit.add(x, noisy(rng, sum(c * v for c, v in zip(true, x, strict=True))))
        if n % 16 == 0:
            fit.solve()
    assert fit.coefficients == pytest.approx(true, rel=0.15)


def test_a_fit_keeps_what_was_configured_until_it_knows_better() -> None:
    fit = Fit((10.0, 0.1), (1.0, 1000.0), strength=20, memory=1000)
    fit.solve()
    assert fit.coefficients == pytest.approx((10.0, 0.1))
    fit.add((1.0, 1000.0), 11.0)
    fit.solve()
    assert 90 < fit.predict((1.0, 1000.0)) < 110


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e7)), min_size=1, max_size=80))
def test_a_fit_stays_in_bounds_whatever_comes(samples: list[tuple[float, float]]) -> None:
    fit = Fit((10.0, 0.1), (1.0, 1000.0), strength=20, memory=50)
    for tokens, ms in samples:
        before = fit.predict((1.0, tokens))
        fit.add((1.0, tokens), ms)
        fit.solve()
        assert all(0 <= c < 1e9 for c in fit.coefficients)
        # One sample moves what is predicted for its like by its own factor at most.
        assert fit.predict((1.0, tokens)) <= 4 * (before + fit._floor) + 1e-6 or ms > before


def report(stats: WorkerStats, steps: int, prompt: int, rows: int, ms: float) -> WorkerStats:
    return msgspec.structs.replace(
        stats,
        steps=stats.steps + steps,
        computed_tokens=stats.computed_tokens + prompt + rows * steps,
        output_tokens=stats.output_tokens + rows * steps,
        busy_seconds=stats.busy_seconds + ms / 1000,
    )


def work(router: Any, slow: dict[str, float], n: int = 1500, skip: dict[str, int] | None = None) -> None:
    """Steps of 5 ms, 0.03 for a prompt token, 0.5 for a row; times how slow a worker is, all side by side. Of
    those in `skip` only each so-manieth time."""
    rng, stats = random.Random(0), dict.fromkeys(slow, WorkerStats())
    pace, learn = (router, True) if isinstance(router, Pace) else (router.pace, router._config.learn)
    for name in slow:
        pace.look(name, WorkerStats(), learn)
    for i in range(n):
        steps, prompt, rows = rng.randint(1, 20), rng.choice([0, 0, 700, 8000]), rng.randint(0, 12)
        ms = 5 * steps + 0.03 * prompt + 0.5 * rows * steps
        for name, factor in slow.items():
            if i % (skip or {}).get(name, 1) == 0:
                stats[name] = report(stats[name], steps, prompt, rows, factor * noisy(rng, ms))
                pace.look(name, stats[name], learn)


def test_how_reports_are_grouped_changes_nothing() -> None:
    """A simulation reports a jump of many steps at once, or each of them."""
    each, jumped = make(), make()
    stats = WorkerStats()
    for i in range(300):
        stats = report(stats, 1 + i % 9, 100 * (i % 3), 4, 20.0 + i % 7)
        each.report("a", stats)
        if i % 10 == 0:
            jumped.report("a", stats)
            target = make_target("a")
            target.stats = stats
            decisions = [r.choose(make_request(i), [target, make_target("b")]) for r in (each, jumped)]
            assert decisions[0] == decisions[1]
    assert each.pace.token == jumped.pace.token != make().pace.token


def test_steps_are_priced_by_what_workers_report() -> None:
    pace = Pace(10.0, 0.1, 0.1, 200.0)
    work(pace, {"a": 1.0})
    assert (pace.step, pace.token, pace.row) == pytest.approx((5.0, 0.03, 0.5), rel=0.1)
    assert pace.factors(["a", "unknown"]) == pytest.approx([1.0, 1.0], abs=0.1)


def test_small_differences_of_speed_are_no_reason() -> None:
    router = make()
    work(router, {"a": 1.0, "b": 1.05})
    assert router.pace.factors(["a", "b"]) == [1.0, 1.0]


def test_a_slow_worker_is_known_and_gets_less() -> None:
    router = make()
    work(router, {"a": 1.0, "b": 3.0, "c": 1.0})
    a, b, c = router.pace.factors(["a", "b", "c"])
    assert b / a == pytest.approx(3.0 / 1.1**2, rel=0.1) and c / a == pytest.approx(1.0, rel=0.1)
    assert router.choose(make_request(0), [make_target("b", 320), make_target("c")]).target == 1
    assert make().choose(make_request(0), [make_target("b", 320), make_target("c")]).target == 0


def test_prices_are_learned_from_first_tokens() -> None:
    """Whatever queue they had, and whether they loaded."""
    rng, router = random.Random(2), make(ms_per_row=0.0)
    for n in range(3000):
        prompt = rng.choice([2000, 20_000, 100_000])
        target = loadable(
            make_target("a", rng.choice([0, prompt // 2]), queued_tokens=rng.choice([0, 900])), 0
        )
        if n % 3 == 0:
            target.loadable = prompt // 4
        decision = router.choose(make_request(n, prompt), [target])
        new, loaded = prompt - decision.predicted_cached, float(decision.reasons["loaded_tokens"])
        ms = 7 + 0.05 * new + 1e-6 * new * (decision.predicted_cached + new / 2) + 0.004 * loaded
        ttft = noisy(rng, ms) + float(decision.reasons["queue_ms"])
        cached = decision.predicted_cached
        router.observe(
            decision, Outcome(make_request(n, prompt), "a", 0, cached, cached, ttft / 1000, 9.0, "stop")
        )
    assert router.prices.coefficients == pytest.approx((7.0, 0.05, 1e-6, 0.004), rel=0.25)


def test_a_change_of_speed_is_followed() -> None:
    router = make(ms_per_row=0.0)
    for slow in (1.0, 0.2):
        for n in range(3000):
            request = make_request(n, 1000 + n % 7 * 3000)
            decision = router.choose(request, [make_target("a")])
            ttft = slow * (10 + 0.1 * request.prompt_tokens) / 1000
            router.observe(decision, Outcome(request, "a", 0, 0, 0, ttft, 1.0, "stop"))
        assert router.prices.predict((1.0, 10_000.0, 5e7, 0.0)) == pytest.approx(1010 * slow, rel=0.1)


def test_it_learns_nothing_where_that_is_off() -> None:
    router = make(learn=False)
    work(router, {"a": 1.0}, 100)
    for n in range(100):
        decision = router.choose(make_request(n), [make_target("a")])
        router.observe(decision, Outcome(make_request(n), "a", 0, 0, 0, 9.0, 10.0, "stop"))
    assert router.prices.coefficients == [10.0, 0.1, 0.0, 0.01]
    assert (router.pace.step, router.pace.token, router.pace.row) == (10.0, 0.1, 0.1)


def test_requests_that_failed_teach_nothing() -> None:
    router = make()
    for n in range(100):
        decision = router.choose(make_request(n), [make_target("a")])
        router.observe(decision, Outcome(make_request(n), "a", 0, 0, -1, -1.0, 60.0, "error"))
    assert router.prices.samples == 0 and router._life == 0.0


def test_the_length_of_answers_is_learned_and_bounded_by_the_request() -> None:
    router, stats = make(), WorkerStats()
    router.pace.look("a", stats)
    for _ in range(50):
        stats = msgspec.structs.replace(
            stats, output_tokens=stats.output_tokens + 600, finished=stats.finished + 10
        )
        router.pace.look("a", stats)
    assert router.pace.outputs == pytest.approx(60.0, rel=0.1)
    request = make_request(0)
    for most, expected in ((1000, router.pace.outputs), (5, 5.0)):
        request.max_tokens = most
        decode = router.choose(request, [make_target("a", running=1)]).reasons["decode_ms"]
        assert decode == pytest.approx(0.1 * expected, rel=0.05)


# Fairness and other soft terms

SIZES = (45, 500, 2000, 20_000, 100_000)


def test_who_has_worked_least_is_preferred_among_equals_only() -> None:
    router = make(fair=0.05)
    work(router, dict.fromkeys("abc", 1.0), 1500, skip={"b": 3, "c": 2})
    targets = [make_target(name) for name in "abc"]
    for n in range(10):
        assert router.choose(make_request(n), targets).target == 1
    for prompt in SIZES:
        a, b, _ = (terms[-1] for terms in router._terms(make_request(0, prompt), targets))
        whole = router.prices.predict((0.0, prompt, prompt * prompt / 2, 0.0))
        assert -0.05 * whole <= b < 0 < a <= 0.05 * whole


def tired(router: KVAwareRouter, overlap: int) -> list[Target]:
    """Idle workers: one holds that much of it, has done all work and is full of sessions that live."""
    work(router, dict.fromkeys("abc", 1.0), 300)
    work(router, {"a": 1.0}, 3000)
    live = fill(router, "a", [f"live{n}" for n in range(8)], 20_000)
    for n in range(200):
        router.choose(make_request(n, 160, f"live{n % 8}"), [live])
    live.overlap = overlap
    return [live, make_target("b", total_blocks=9999), make_target("c", total_blocks=9999)]


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("prompt", SIZES)
def test_most_of_a_prompt_draws_it_to_the_worker_that_has_done_everything(prompt: int, share: float) -> None:
    """With every term at its default, whatever prices have been learned."""
    for learn in (False, True):
        router = KVAwareRouter(KVAwareConfig(learn=learn), random.Random(0))
        overlap = min(-(-int(share * prompt) // BLOCK), (prompt - 1) // BLOCK) * BLOCK
        targets = tired(router, overlap)
        for n in range(5):
            decision = router.choose(make_request(n, prompt, f"new{n}"), targets)
            assert targets[decision.target].worker == "a", decision.reasons
            assert float(decision.reasons["fair_ms"]) > 0 and float(decision.reasons["evicted_ms"]) > 0


def test_where_ttft_says_nothing_of_tokens_cached_ones_still_draw() -> None:
    router = KVAwareRouter(KVAwareConfig(), random.Random(0))
    for n in range(3000):
        request = make_request(n, 45 + n % 400)
        ttft = 0.012 - request.prompt_tokens / 1e5  # long ones even come sooner
        router.observe(
            router.choose(request, [make_target("a")]), Outcome(request, "a", 0, 0, 0, ttft, 1.0, "stop")
        )
    assert router.prices.coefficients[1] < 0.001
    for n in range(20):
        targets = [make_target("a"), make_target("b", 32), make_target("c")]
        assert router.choose(make_request(n, 45), targets).target == 1


def test_a_newcomer_is_not_flooded_for_having_done_nothing() -> None:
    router = make(fair=0.05)
    work(router, dict.fromkeys("ab", 1.0), 200)
    router.pace.look("new", WorkerStats())
    assert router.pace.shares(["a", "b", "new"]) == pytest.approx([0.0, 0.0, 0.0], abs=0.05)
    router.pace.look("a", WorkerStats(steps=1))  # it was started again: its counters are
    assert router.pace.shares(["a", "b"]) == pytest.approx([0.0, 0.0], abs=0.05)


def test_work_long_past_is_forgotten() -> None:
    pace = Pace(10.0, 0.1, 0.1, 200.0)
    for name, hours in (("a", 10), ("b", 1), ("b", 10), ("a", 10)):
        stats = WorkerStats()
        pace.look(name, stats)
        for n in range(hours * 60):
            pace.look(name, WorkerStats(busy_seconds=60.0 * (n + 1)))
        pace.look(name, WorkerStats(steps=-1))
    a, b = pace.shares(["a", "b"])
    assert a > 0.9 and b < -0.9


# Bounds


def test_what_it_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SESSIONS == 100_000
    monkeypatch.setattr("bien.plugins.routers.kv_aware.SESSIONS", 50)
    router = make(evicted=1.0)
    for n in range(300):
        target = make_target(f"w{n}", total_blocks=100)
        router.pace.look(target.worker, WorkerStats())
        router.choose(make_request(n, 160, f"s{n}"), [target])
    assert len(router._sessions) == 50
    assert router._tokens == sum(tokens for _, tokens in router._sessions.values())
    assert len(router.pace) < 100 and len(router._held) < 100


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"ms_per_prefil_token": 1}, "did you mean 'ms_per_prefill_token'"),
        ({"ms_per_prefill_token": -1.0}, "ms_per_prefill_token"),
        ({"fair": 0.3}, "fair"),
        ({"output_tokens": 0}, "output_tokens"),
    ],
)
def test_parameters_are_strict(parameters: dict[str, float], text: str) -> None:
    with pytest.raises(DeploymentError, match=text):
        decode(parameters, KVAwareConfig, "gateway.router")
