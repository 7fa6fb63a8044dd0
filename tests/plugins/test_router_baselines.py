"""The routers that others must beat: each does what its source says, and no more."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from bien.core.errors import DeploymentError
from bien.core.providers import Context
from bien.core.strict import decode
from bien.gateway.routing import Decision, Router, RouteRequest, Target
from bien.gateway.testing.router import BLOCK, RouterSuite, make_request, make_target
from bien.plugins.routers import (
    blocks,
    cache_threshold,
    kv_aware,
    least_loaded,
    power_of_two,
    prefix_hash,
    round_robin,
    sticky,
)
from bien.plugins.routers.blocks import Blocks, BlocksConfig
from bien.plugins.routers.cache_threshold import CacheThreshold, CacheThresholdConfig
from bien.plugins.routers.least_loaded import LeastLoaded
from bien.plugins.routers.power_of_two import PowerOfTwo
from bien.plugins.routers.prefix_hash import PrefixHash, PrefixHashConfig
from bien.plugins.routers.round_robin import RoundRobin
from bien.plugins.routers.sticky import Sticky, StickyConfig


class TestRoundRobin(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return RoundRobin()


class TestLeastLoaded(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return LeastLoaded(rng)


class TestPowerOfTwo(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return PowerOfTwo(rng)


class TestSticky(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return Sticky(StickyConfig(), rng)


class TestStickyThatForgets(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return Sticky(StickyConfig(sessions=2, overload=1.0, slack=0), rng)


class TestPrefixHash(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return PrefixHash(PrefixHashConfig(), rng)


class TestCacheThreshold(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return CacheThreshold(CacheThresholdConfig(), rng)


class TestBlocks(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return Blocks(BlocksConfig(), rng)


class TestBlocksAtATemperature(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return Blocks(BlocksConfig(temperature=0.5), rng)


def to(router: Router, request: RouteRequest, targets: list[Target]) -> str:
    return targets[router.choose(request, targets).target].worker


def lot() -> random.Random:
    return random.Random(0)


# round-robin, least-loaded, power-of-two


def test_round_robin_takes_turns() -> None:
    router, targets = RoundRobin(), [make_target(name) for name in "abc"]
    names = [to(router, make_request(n), targets) for n in range(7)]
    assert names == list("abcabca")


def test_least_loaded_counts_requests_and_nothing_else() -> None:
    targets = [
        make_target("a", 960, 2),
        make_target("b", 0, 1),
        make_target("c", 960, 0, running=1, waiting=1),
    ]
    assert to(LeastLoaded(lot()), make_request(0), targets) == "b"
    assert (
        to(LeastLoaded(lot()), make_request(0), [make_target("a", running=3), make_target("b", inflight=4)])
        == "a"
    )


def test_power_of_two_avoids_the_busiest_and_does_not_herd_to_the_idlest() -> None:
    router = PowerOfTwo(lot())
    targets = [make_target(name, inflight=n) for n, name in enumerate("abcd")]
    counts = Counter(to(router, make_request(n), targets) for n in range(600))
    assert counts["d"] == 0
    # In a draw of two from four: a is in half of them, b idler in a third, c in a sixth.
    for name, share in (("a", 300), ("b", 200), ("c", 100)):
        assert abs(counts[name] - share) < 60


# sticky


def test_a_session_stays_and_tenants_do_not_share_its_name() -> None:
    router, targets = Sticky(StickyConfig(), lot()), [make_target(name) for name in "abcd"]
    homes = {s: to(router, make_request(0, session=s), targets) for s in "wxyz"}
    assert sorted(homes.values()) == list("abcd")  # spread, although all were idle all the time
    for n in range(20):
        for s, home in homes.items():
            assert to(router, make_request(n, session=s), targets) == home
    other = {to(router, replace(make_request(n, session="w"), tenant=f"t{n}"), targets) for n in range(4)}
    assert other == set("abcd")


def test_a_new_session_goes_where_fewest_requests_are_before_fewest_sessions() -> None:
    router = Sticky(StickyConfig(), lot())
    idle = [make_target("a"), make_target("b")]
    assert {to(router, make_request(n, session=f"s{n}"), idle) for n in range(2)} == {"a", "b"}
    loaded = [make_target("a", inflight=1), make_target("b")]
    assert to(router, make_request(2, session="s2"), loaded) == "b"
    assert to(router, make_request(3, session="s3"), loaded) == "b"


def test_a_session_whose_worker_is_gone_finds_a_new_home_and_keeps_it() -> None:
    router, both = Sticky(StickyConfig(), lot()), [make_target("a"), make_target("b")]
    request = make_request(0, session="s")
    home = to(router, request, both)
    rest = [t for t in both if t.worker != home]
    decision = router.choose(request, rest)
    assert decision.reasons["why"] == "gone"
    assert to(router, request, both) == rest[0].worker  # also when the first one is back, empty


def test_a_session_leaves_an_overloaded_worker_for_good() -> None:
    router = Sticky(StickyConfig(overload=2.0, slack=4), lot())
    request = make_request(0, session="s")
    assert (
        to(router, request, [make_target("a"), make_target("b", inflight=1), make_target("c", inflight=1)])
        == "a"
    )
    busy = [make_target("a", inflight=9), make_target("b"), make_target("c", inflight=1)]
    for most, expected in ((5, "home"), (9, "overloaded")):  # 5 is above twice the mean, and 3 above it
        busy[0].inflight = most
        assert router.choose(request, busy).reasons["why"] == expected
    assert to(router, request, [make_target("a"), make_target("b"), make_target("c")]) == "b"


def test_requests_without_a_session_are_not_tied_to_each_other() -> None:
    router, targets = Sticky(StickyConfig(), lot()), [make_target(name) for name in "ab"]
    names = {to(router, replace(make_request(n), session=""), targets) for n in range(20)}
    assert names == {"a", "b"}


def test_sessions_are_forgotten_in_order_of_use() -> None:
    router, targets = Sticky(StickyConfig(sessions=2), lot()), [make_target(name) for name in "ab"]
    for session in ("s1", "s2", "s1", "s3"):
        router.choose(make_request(0, session=session), targets)
    whys = [router.choose(make_request(0, session=s), targets).reasons["why"] for s in ("s1", "s2")]
    assert whys == ["home", "new"]


# prefix-hash


def share(prefix: RouteRequest, n: int, blocks: int = 4) -> RouteRequest:
    """A request whose first `blocks` blocks are those of `prefix`."""
    own = make_request(n)
    return replace(own, hashes=prefix.hashes[: 16 * blocks] + own.hashes[16 * blocks :])


def test_prompts_that_begin_alike_meet() -> None:
    router, targets = (
        PrefixHash(PrefixHashConfig(prefix_tokens=4 * BLOCK), lot()),
        [make_target(n) for n in "abcdefgh"],
    )
    first = make_request(0)
    assert len({to(router, share(first, n), targets) for n in range(30)}) == 1
    assert len({to(router, share(first, n, blocks=3), targets) for n in range(30)}) > 3


def test_a_worker_that_leaves_moves_its_own_prompts_only() -> None:
    router, targets = PrefixHash(PrefixHashConfig(), lot()), [make_target(n) for n in "abcdefgh"]
    before = {n: to(router, make_request(n), targets) for n in range(200)}
    after = {n: to(router, make_request(n), targets[1:]) for n in range(200)}
    assert all(after[n] == home for n, home in before.items() if home != "a")
    assert len({after[n] for n, home in before.items() if home == "a"}) > 3  # and to more than one place


def test_a_loaded_worker_is_passed_over() -> None:
    router, targets = PrefixHash(PrefixHashConfig(), lot()), [make_target(n, inflight=4) for n in "abcd"]
    home = router.choose(make_request(0), targets)
    assert home.reasons["passed_over"] == 0.0  # 4 is below 1.25 x 17 / 4, upwards
    targets[home.target].inflight = 6
    away = router.choose(make_request(0), targets)  # 6 is not below 1.25 x 19 / 4
    assert away.target != home.target and away.reasons["passed_over"] == 1.0


def test_a_prompt_shorter_than_a_block_goes_to_the_least_loaded() -> None:
    router, targets = PrefixHash(PrefixHashConfig(), lot()), [make_target("a", inflight=1), make_target("b")]
    assert {to(router, make_request(n, BLOCK - 1), targets) for n in range(20)} == {"b"}


# cache-threshold


def why(targets: list[Target]) -> tuple[str, float | str]:
    decision = CacheThreshold(CacheThresholdConfig(), lot()).choose(make_request(0, 1000), targets)
    return targets[decision.target].worker, decision.reasons["why"]


def test_the_longest_match_wins_above_half_of_the_prompt() -> None:
    assert why([make_target("a", 512, inflight=9), make_target("b", 496), make_target("c")]) == (
        "a",
        "cached",
    )
    assert why([make_target("a", 496, inflight=1), make_target("b")]) == ("b", "little cached")
    assert why([make_target("a", 512, inflight=9), make_target("b", 512)]) == ("b", "cached")


def test_loads_that_differ_much_decide_alone() -> None:
    assert why([make_target("a", 960, inflight=32), make_target("b")]) == ("a", "cached")
    assert why([make_target("a", 960, inflight=33), make_target("b")]) == ("b", "imbalanced")
    # More than 32 apart, and yet within the factor of 1.1.
    assert why([make_target("a", 960, inflight=440), make_target("b", inflight=400)]) == ("a", "cached")


# blocks


def cost(targets: list[Target], prompt: int = 1000, **config: float) -> tuple[str, float]:
    decision = Blocks(BlocksConfig(**config), lot()).choose(make_request(0, prompt), targets)
    return targets[decision.target].worker, sum(float(v) for v in decision.reasons.values())


def test_the_cost_is_dynamos() -> None:
    # 1000 tokens are 62.5 blocks to prefill, 63 to hold; 640 of them are cached, 320 more can be loaded.
    one = make_target("a", 640, inflight=2, tokens=160, queued_tokens=320, used_blocks=7)
    one.loadable = 320
    base = 62.5 + 30 + 7 + 63
    assert cost([one])[1] == pytest.approx(base - 40 - 15)
    assert cost([one], overlap_score_credit=0.5)[1] == pytest.approx(base - 20 - 15)
    assert cost([one], host_cache_hit_weight=0.0)[1] == pytest.approx(base - 40)
    assert cost([one], prefill_load_scale=2.0)[1] == pytest.approx(2 * (92.5 - 55) + 70)
    assert cost([one], decode_active_request_weight=3.0)[1] == pytest.approx(base - 55 + 6)
    # Against an idle worker 480 tokens more wait here: 0.48 of the prompt.
    idle = make_target("b", used_blocks=10_000)
    assert cost([one, idle], overlap_score_credit_decay=1.0)[1] == pytest.approx(base - 40 / 1.48 - 15)


def test_the_prefill_cost_is_never_negative() -> None:
    assert cost([make_target("a", 640)], prompt=656, overlap_score_credit=9.0)[1] == 41.0


def test_blocks_in_use_outweigh_a_match_exactly_where_there_are_more() -> None:
    assert cost([make_target("hit", 640, used_blocks=39), make_target("miss")])[0] == "hit"
    assert cost([make_target("hit", 640, used_blocks=41), make_target("miss")])[0] == "miss"


def test_a_temperature_mixes_by_cost() -> None:
    router = Blocks(BlocksConfig(temperature=1.0), lot())
    targets = [make_target("a", 960), make_target("b", 480), make_target("c")]
    counts = Counter(to(router, make_request(n), targets) for n in range(900))
    # Costs scaled to 0, 1/2 and 1: weights 1, exp(-1/2), exp(-1).
    for name, expected in (("a", 456), ("b", 276), ("c", 168)):
        assert abs(counts[name] - expected) < 60


# all of them

MODULES = (
    blocks,
    cache_threshold,
    kv_aware,
    least_loaded,
    power_of_two,
    prefix_hash,
    round_robin,
    sticky,
)


def test_their_names() -> None:
    made = {p.name: p.factory(p.config_type(), Context()) for m in MODULES for p in m.bien_providers()}
    assert sorted(made) == [
        "blocks",
        "cache-threshold",
        "kv-aware",
        "least-loaded",
        "power-of-two",
        "prefix-hash",
        "round-robin",
        "sticky",
    ]
    for name, router in made.items():
        decision = router.choose(make_request(0), [make_target("a", 480)])
        assert isinstance(decision, Decision) and decision.reasons, name
        assert decision.predicted_cached == 480


@pytest.mark.parametrize(
    ("config", "parameters", "text"),
    [
        (StickyConfig, {"overload": 0.5}, "overload"),
        (PrefixHashConfig, {"prefix_token": 5}, "did you mean 'prefix_tokens'"),
        (CacheThresholdConfig, {"cache_threshold": 1.5}, "cache_threshold"),
        (BlocksConfig, {"temperature": -1.0}, "temperature"),
    ],
)
def test_parameters_are_strict(config: type, parameters: dict[str, float], text: str) -> None:
    with pytest.raises(DeploymentError, match=text):
        decode(parameters, config, "gateway.router")
