from __future__ import annotations

import random
from typing import Any

import pytest

from bien.core.errors import DeploymentError
from bien.core.providers import Context
from bien.core.strict import decode
from bien.gateway.routing import Router
from bien.gateway.testing.router import RouterSuite, make_request, make_target
from bien.plugins.routers import kv_aware, round_robin
from bien.plugins.routers.kv_aware import KVAwareConfig, KVAwareRouter
from bien.plugins.routers.round_robin import RoundRobin


class TestRoundRobin(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return RoundRobin()


class TestKVAware(RouterSuite):
    def build(self, rng: random.Random) -> Router:
        return KVAwareRouter(KVAwareConfig(), rng)


def choose(*targets: Any, prompt: int = 1000, **config: float) -> tuple[str, int, dict[str, float | str]]:
    router = KVAwareRouter(KVAwareConfig(**config), random.Random(0))
    decision = router.choose(make_request(0, prompt), targets)
    return targets[decision.target].worker, decision.predicted_cached, decision.reasons


def test_round_robin_takes_turns() -> None:
    router, targets = RoundRobin(), [make_target(name) for name in "abc"]
    names = [targets[router.choose(make_request(n), targets).target].worker for n in range(7)]
    assert names == list("abcabca")


def test_the_cached_prefix_decides_among_equals() -> None:
    worker, predicted, reasons = choose(make_target("a"), make_target("b", 640), make_target("c", 320))
    assert (worker, predicted) == ("b", 640)
    assert reasons == {"prefill_ms": pytest.approx(36.0), "queue_ms": 0.0, "decode_ms": 0.0, "ties": 1.0}


def test_a_queue_outweighs_the_prefix_exactly_where_waiting_costs_more() -> None:
    def at(queued: int) -> str:
        return choose(make_target("hit", 640, queued_tokens=queued), make_target("miss"))[0]

    assert at(639) == "hit"
    assert at(641) == "miss"


def test_what_reports_cannot_show_yet_counts_as_queued() -> None:
    assert choose(make_target("a", tokens=100), make_target("b", queued_tokens=99))[0] == "b"
    assert choose(make_target("a", tokens=50, queued_tokens=50), make_target("b", tokens=99))[0] == "b"


def test_each_request_there_has_its_price() -> None:
    full, free = make_target("full", 640, running=4), make_target("free")
    assert choose(full, free)[0] == "free"  # 36 + 80 ms against 100
    assert choose(full, free, ms_per_request=10.0)[0] == "full"  # 36 + 40
    assert choose(full, free, ms_per_prefill_token=1.0)[0] == "full"  # 360 + 80 against 1000
    assert choose(make_target("a", inflight=2), make_target("b", running=1, waiting=2))[0] == "a"
    _, _, reasons = choose(make_target("a", inflight=2, running=3))
    assert reasons["decode_ms"] == 60.0


def test_the_last_token_is_never_predicted() -> None:
    for prompt, overlap, expected in ((640, 640, 624), (641, 640, 640), (1, 0, 0), (16, 16, 0)):
        assert choose(make_target("a", overlap), prompt=prompt)[1] == expected


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"ms_per_prefil_token": 1}, "did you mean 'ms_per_prefill_token'"),
        ({"ms_per_prefill_token": -1.0}, "ms_per_prefill_token"),
        ({"ms_per_request": float("inf")}, "ms_per_request"),
    ],
)
def test_parameters_are_strict(parameters: dict[str, float], text: str) -> None:
    with pytest.raises(DeploymentError, match=text):
        decode(parameters, KVAwareConfig, "gateway.router")


def test_providers_build_them() -> None:
    built = {
        provider.name: provider.factory(provider.config_type(), Context())
        for module in (kv_aware, round_robin)
        for provider in module.bien_providers()
    }
    assert {name: type(router) for name, router in built.items()} == {
        "kv-aware": KVAwareRouter,
        "round-robin": RoundRobin,
    }
