from __future__ import annotations

import msgspec
import pytest

from bien.core.errors import UserError
from bien.replay.record import TurnRecord
from bien.replay.route.explain import RoutePlan, explain, prepared
from bien.replay.route.infinite import InfiniteCache, check_unique
from bien.replay.route.load import TraceCard, described, fitting, read_sessions
from bien.replay.route.policies import chosen_policies


def test_all_installed_routers_are_compared(fleet, manager):
    found, notes = chosen_policies([], fleet, manager)
    assert list(found) == manager.names("router") and not notes
    assert {name: d.gateway.router.use for name, d in found.items()} == {n: n for n in found}


def test_the_deployments_router_keeps_its_parameters(fleet, manager):
    from bien.core.deployment import Selection

    router = Selection("prefix-hash", manager.find("router", "prefix-hash").provider and {})
    gateway = msgspec.structs.replace(fleet.gateway, router=router)
    found, _ = chosen_policies(["prefix-hash"], msgspec.structs.replace(fleet, gateway=gateway), manager)
    assert found["prefix-hash"].gateway.router is router


def test_a_router_that_cannot_be_used_is_left_out_unless_it_was_asked_for(fleet, manager):
    from bien.core.deployment import Selection

    gateway = msgspec.structs.replace(fleet.gateway, router=Selection("kv-aware", {"nonsense": 1}))
    broken = msgspec.structs.replace(fleet, gateway=gateway)
    found, notes = chosen_policies([], broken, manager)
    assert "kv-aware" not in found and "round-robin" in found
    assert len(notes) == 1 and "'kv-aware' is left out" in notes[0] and "nonsense" in notes[0]
    with pytest.raises(UserError, match="nonsense"):
        chosen_policies(["kv-aware"], broken, manager)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["kv-awar"], r"--policy 'kv-awar' is no installed router; valid: .*; did you mean 'kv-aware'\?"),
        (["sticky", "sticky"], "--policy 'sticky' is given 2 times"),
    ],
)
def test_wrong_policies(names, message, fleet, manager):
    with pytest.raises(UserError, match=message):
        chosen_policies(names, fleet, manager)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "--workers is 0; valid: 1 or more"),
        ({"capacity": 0}, "--capacity is 0; valid"),
        ({"capacity": (1 << 63) - 1}, "--capacity is 9223372036854775807; valid: tokens of one worker, 1 to"),
        ({"seed": 1 << 63}, "--seed is 9223372036854775808; valid: a 64-bit integer"),
        ({"seed": -(1 << 63) - 1}, "--seed is -9223372036854775809; valid: a 64-bit integer"),
        ({"sessions": 10**20}, "--sessions is 100000000000000000000; valid: 1 to"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"jobs": 0}, "--jobs is 0; valid: 1 to"),
        ({"requests": -1}, "--requests is -1"),
        ({"rounds": -1}, "--rounds is -1"),
        ({"sessions": 0}, "--sessions is 0"),
        ({"gap_cap": -1.0}, "--gap-cap is -1"),
        ({"ladder": (0,)}, "--ladder holds 0"),
        ({"ladder": (4, 4)}, "--ladder is 4,4; valid: each number once"),
    ],
)
def test_options_out_of_range(changes, message, fleet):
    with pytest.raises(UserError, match=message):
        RoutePlan((), fleet, **changes).check()


def test_capacity_below_the_longest_turn(sessions):
    card = described(sessions, TraceCard())
    longest = max(sessions, key=lambda s: s.longest)
    assert (card.longest, card.longest_session) == (longest.longest, longest.id)
    least = -(-card.longest // 64) * 64
    with pytest.raises(
        UserError, match=rf"{card.longest} \(session {longest.id}\); valid: --capacity {least} or"
    ):
        fitting(sessions, card, least - 1, 64, False)
    assert fitting(sessions, card, least, 64, False) == (sessions, card)
    kept, rest = fitting(sessions, card, least - 1, 64, True)
    assert longest not in kept and rest.skipped == len(sessions) - len(kept) > 0
    assert rest.turns == sum(s.turns for s in kept)
    with pytest.raises(UserError, match="needs"):
        fitting(sessions, card, 64, 64, True)


def test_a_capacity_that_nobody_gave_is_raised_to_what_the_trace_needs(fleet, manager):
    small = msgspec.structs.replace(fleet, pool=(msgspec.structs.replace(fleet.pool[0], kv_tokens=1024),))
    report = explain(RoutePlan((), small, policies=("sticky",), rounds=0), manager)
    assert report.capacity == 1856 and "capacity is 1,856, not 1,024" in report.notes[0]
    assert not report.oracle.tried
    with pytest.raises(UserError, match="a worker's capacity is 1024"):
        explain(RoutePlan((), small, capacity=1024, policies=("sticky",)), manager)


def test_one_pool_of_workers_is_needed(fleet):
    two = msgspec.structs.replace(
        fleet, pool=(fleet.pool[0], msgspec.structs.replace(fleet.pool[0], name="b"))
    )
    with pytest.raises(UserError, match="one pool of equal workers; this deployment has 'main', 'b'"):
        prepared(RoutePlan((), two))


def test_sessions_are_read_and_told_apart(manager):
    found, card = read_sessions((), 2, manager)
    assert (len(found), card.sessions, card.turns) == (2, 2, sum(s.turns for s in found))
    twice = check_unique([found[0], found[0], msgspec.structs.replace(found[0], scope="shared")])
    assert len({s.id for s in twice}) == 3
    assert [s.scope for s in twice] == [found[0].scope, found[0].scope, "shared"]
    own = msgspec.structs.replace(found[0], scope=found[0].id)
    assert [s.scope == s.id for s in check_unique([own, own])] == [True, True]


def test_an_infinite_cache_of_one_stream_is_the_same_in_every_order(sessions):
    cache = InfiniteCache(sessions)
    alone = sessions[5]
    records = [TurnRecord(alone.id, 0, i) for i in range(alone.turns)]
    assert cache.shared(records) == cache.shared(records[::-1])[::-1]
    turns = alone.streams[0].turns
    assert cache.shared(records)[1] == turns[0].input_tokens + turns[0].output_tokens
