from __future__ import annotations

import random

import numpy as np
import pytest

from bien.core.deployment import Deployment
from bien.replay.route.hindsight import Search, Timetable, improved, prefill_seconds
from bien.replay.route.stack import Bench
from bien.replay.route.variant import COLUMNS, Hindsight, Placement, Seen, Variant
from tests.replay.route.conftest import CAPACITY, TREES


def seen(*turns: tuple[str, float, int, int], workers: int = 2) -> Seen:
    """Turns of (session, seconds, prompt, whole), all placed on the first worker; a token takes 1 ms."""
    columns = {name: np.zeros(len(turns)) for name in COLUMNS}
    columns["sent"] = np.array([t[1] for t in turns], float)
    columns["prompt"] = np.array([t[2] for t in turns], float)
    columns["whole"] = np.array([t[3] for t in turns], float)
    columns["ttft"] = columns["prompt"] / 1e3
    ids = [f"{name}/0/{i}" for i, (name, *_) in enumerate(turns)]
    packed = {name: values.astype(np.float64).tobytes() for name, values in columns.items()}
    return Seen("x", [f"w{i}" for i in range(workers)], ids=ids, packed=packed)


def waits(given: Seen, capacity: int) -> list[float]:
    table = Timetable(given, capacity)
    out = [0.0] * len(given.ids)
    table.serve(table.order, out)
    return pytest.approx(out, abs=1e-9)


def test_the_model_queues_and_caches():
    turns = (("a", 0.0, 1000, 0), ("b", 0.5, 1000, 0), ("a", 9.0, 1500, 1000), ("b", 9.2, 1200, 1000))
    assert waits(seen(*turns), 10_000) == [1.0, 1.5, 0.5, 0.5]


def test_the_model_lets_go_of_the_tail_of_who_was_used_longest_ago():
    turns = (("a", 0.0, 1000, 0), ("b", 5.0, 1000, 0), ("a", 9.0, 1000, 999))
    # a keeps 400 of its 1,000 tokens when b comes.
    assert waits(seen(*turns), 1400) == [1.0, 1.0, 0.6]


def test_the_search_parts_what_meets():
    turns = [
        (name, t + late, 1000 + int(t), int(t))
        for t in range(0, 100, 10)
        for name, late in (("a", 0), ("b", 0.1))
    ]
    table = Timetable(seen(*turns), 10_000)
    search = Search(table, [0] * len(turns), random.Random(0))
    before = search.total
    search.run(20_000)
    assert search.total < before
    workers = dict(zip(table.session, search.placement, strict=True))
    assert len(set(workers.values())) == 2
    again = Search(table, search.placement, random.Random(1))
    assert again.total == pytest.approx(search.total)


def test_balance_spreads_session_trees_by_their_work():
    turns = [(f"s{i}", 0.1 * i, 1000 * (i + 1), 0) for i in range(8)]
    table = Timetable(seen(*turns, workers=4), 1_000_000)
    loads = [0.0] * 4
    for (_, _, prompt, _), worker in zip(turns, table.balanced(), strict=True):
        loads[worker] += prompt
    assert max(loads) <= 10_000  # 36,000 in all, 9,000 each


def test_a_token_costs_what_the_quickest_long_prompts_took():
    assert prefill_seconds(seen(*((f"s{i}", float(i), 100 + i, 0) for i in range(50)))) == pytest.approx(1e-3)


def test_a_placement_that_is_followed_gives_the_run_again(bench: Bench, fleet: Deployment, kv_aware: Seen):
    again = bench.run(Variant("again", fleet, TREES, placement=kv_aware.placement))
    assert again.ids == kv_aware.ids
    for column in ("ttft", "cached", "worker", "predicted"):
        assert again[column].tolist() == kv_aware[column].tolist(), column


def test_requests_without_a_place_join_their_session(bench: Bench, fleet: Deployment, kv_aware: Seen):
    placement = kv_aware.placement
    first = {id.split("/")[0]: worker for id, worker in zip(placement.ids, placement.workers, strict=True)}
    some = Placement([f"{name}/0/0" for name in first], [1] * len(first))
    seen = bench.run(Variant("some", fleet, TREES, placement=some))
    assert set(seen["worker"]) == {1.0}


def test_what_is_found_beats_the_run_that_it_began_with(bench: Bench, fleet: Deployment, round_robin: Seen):
    given = Hindsight(round_robin, CAPACITY, balanced=False, seed=3)
    assert improved(given) == improved(given)
    found = bench.run(Variant("found", fleet, TREES, hindsight=given))
    assert found.mean_ttft_ms < 0.8 * round_robin.mean_ttft_ms
    assert found.hit > round_robin.hit
