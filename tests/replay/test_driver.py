from __future__ import annotations

import asyncio

import pytest

from bien.core.clock import VirtualClock
from bien.core.errors import TraceError, UserError
from bien.replay.advance import advance
from bien.replay.cache_account import CacheAccount
from bien.replay.driver import Driver
from bien.replay.options import ReplayOptions
from bien.traces.model import Session, Stream
from tests.replay.fakes import FakeTarget, chain, drive, session


def times(driver: Driver) -> list[tuple[str, float, float]]:
    return [(r.id, round(r.sent, 6), round(r.ended, 6)) for r in driver.records]


def test_gaps_count_from_the_end_of_the_turn_before() -> None:
    run = drive(FakeTarget(), [session("a", (0, 50, 11), (3, 20, 1), (0.5, 20, 1))])
    # A turn takes 1 + 0.1 * (output - 1) seconds.
    assert times(run) == [("a/0/0", 0, 2), ("a/0/1", 5, 6), ("a/0/2", 6.5, 7.5)]
    assert run.tally.sessions_completed == 1 and run.tally.turns == 3
    assert all(r.planned == r.sent for r in run.records)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (ReplayOptions(time_scale=0.5), 2.5),
        (ReplayOptions(gap_cap=2.0), 3.0),
        (ReplayOptions(time_scale=0.5, gap_cap=1.0), 2.0),
        (ReplayOptions(time_scale=0), 1.0),
    ],
)
def test_gaps_are_scaled_then_capped(options: ReplayOptions, start: float) -> None:
    run = drive(FakeTarget(), [session("a", (0, 50, 1), (3, 20, 1))], options)
    assert run.records[1].sent == start


def test_recorded_turns_are_fed_back() -> None:
    target = FakeTarget()
    drive(target, [session("a", (0, 50, 11), (3, 20, 1))])
    first, second = target.requests
    assert second.prompt.slice(0, 61) == first.prompt.join(first.output)


def test_concurrency_counts_session_trees() -> None:
    agents = tuple(
        Stream(i, chain(i * 1000, (0, 30, 1)), parent=0, spawned_after=0, joined_before=1) for i in (1, 2, 3)
    )
    sessions = [session(f"s{i}", (0, 50, 1), (0, 20, 1), extra=agents) for i in range(5)]
    target = FakeTarget()
    run = drive(target, sessions, ReplayOptions(concurrency=2))
    assert target.peak == 6  # three agents in each of two trees
    starts = sorted(j.start for j in run.jobs)
    assert starts == [0, 0, 3, 3, 6]
    assert run.tally.sessions_completed == 5


def test_sub_agents_spawn_and_join() -> None:
    slow = Stream(1, chain(1000, (0.5, 30, 21), (1, 9, 1)), parent=0, spawned_after=0, joined_before=1)
    quick = Stream(2, chain(2000, (0, 30, 1)), parent=0, spawned_after=0, joined_before=1)
    run = drive(FakeTarget(), [session("a", (0, 50, 1), (2, 20, 1), extra=(slow, quick))])
    sent = {r.id: r.sent for r in run.records}
    assert sent["a/1/0"] == 1.5 and sent["a/2/0"] == 1.0
    # The slow one ends at 1.5 + 3 + 1 + 1 = 6.5; the parent's gap counts from there.
    assert sent["a/0/1"] == pytest.approx(8.5)
    assert run.jobs[0].end == pytest.approx(9.5)


def test_background_agents_are_not_waited_for_but_hold_the_lane() -> None:
    agent = Stream(1, chain(1000, (0, 30, 101)), parent=0, spawned_after=0)
    run = drive(
        FakeTarget(),
        [session("a", (0, 50, 1), (0, 20, 1), extra=(agent,)), session("b", (0, 50, 1))],
        ReplayOptions(concurrency=1),
    )
    sent = {r.id: r.sent for r in run.records}
    assert sent["a/0/1"] == 1.0
    assert sent["b/0/0"] == pytest.approx(12.0)


def test_a_child_of_nothing_starts_at_once() -> None:
    early = Stream(1, chain(1000, (0, 30, 1)), parent=0, joined_before=0)
    run = drive(FakeTarget(), [session("a", (0, 50, 1), extra=(early,))])
    assert {r.id: r.sent for r in run.records} == {"a/1/0": 0, "a/0/0": 1}


def test_joins_that_cannot_come_are_not_waited_for() -> None:
    late = Stream(1, chain(1000, (0, 30, 1)), parent=0, spawned_after=1, joined_before=1)
    circle = Stream(2, chain(2000, (0, 30, 1)), parent=0, spawned_after=0, joined_before=1)
    circle.turns[0].joins = (0, 2)
    run = drive(FakeTarget(), [session("a", (0, 50, 1), (0, 20, 1), extra=(late, circle))])
    assert run.tally.turns == 4


def test_a_failed_turn_ends_its_session_and_counts() -> None:
    agent = Stream(1, chain(1000, (0, 30, 1), (5, 9, 1)), parent=0, spawned_after=0, joined_before=2)
    broken = session("a", (0, 50, 1), (0, 20, 1), (0, 20, 1), extra=(agent,))
    target = FakeTarget(fails=lambda r: r.id == "a/0/1")
    run = drive(target, [broken, session("b", (0, 50, 1))], ReplayOptions(concurrency=1))
    assert sorted(r.id for r in run.records) == ["a/0/0", "a/0/1", "a/1/0", "b/0/0"]
    assert (run.tally.turns, run.tally.errors) == (4, 1)
    assert (run.tally.sessions_failed, run.tally.sessions_completed) == (1, 1)


def test_sessions_beyond_the_window_are_skipped_and_counted() -> None:
    run = drive(FakeTarget(max_context=100), [session("a", (0, 95, 6)), session("b", (0, 95, 5))])
    assert [r.session for r in run.records] == ["b"]
    assert run.tally.sessions_skipped == 1
    turns, tokens, reuse = run.corpus.shares(1, 100)
    assert (turns, tokens, reuse) == (0.5, 100 / 201, 1.0)


def test_a_scaled_session_may_fit() -> None:
    run = drive(
        FakeTarget(max_context=60), [session("a", (0, 95, 6), (1, 8, 3))], ReplayOptions(token_scale=0.5)
    )
    assert [(r.prompt_tokens, r.asked) for r in run.records] == [(48, 3), (55, 1)]


def test_sessions_limits_what_is_replayed() -> None:
    sessions = [session(f"s{i}", (0, 50, 1)) for i in range(9)]
    run = drive(FakeTarget(), sessions, ReplayOptions(concurrency=2, sessions=3))
    assert [j.session for j in run.jobs] == ["s0", "s1", "s2"]


def test_sessions_are_read_when_a_lane_needs_them() -> None:
    async def main() -> None:
        read = 0

        def lazily() -> object:
            nonlocal read
            for i in range(100):
                read += 1
                yield session(f"s{i}", (0, 50, 1))

        target = FakeTarget()
        driver = Driver(
            target,
            target.clock,
            lazily(),  # type: ignore[arg-type]
            ReplayOptions(concurrency=3),
            CacheAccount(16),
        )
        task = asyncio.create_task(driver.run())
        await target.clock.sleep(4.5)
        assert read == 15
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    VirtualClock.run(main())


def test_cancelling_keeps_what_was_measured() -> None:
    async def main() -> Driver:
        target = FakeTarget()
        driver = Driver(
            target,
            target.clock,
            iter([session("a", (0, 50, 1), (1, 9, 50))]),
            ReplayOptions(),
            CacheAccount(16),
        )
        task = asyncio.create_task(driver.run())
        await target.clock.sleep(4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert target.inflight == 0
        return driver

    driver = VirtualClock.run(main())
    done, cut = driver.records
    assert done.ended == 1 and cut.ended < 0 and cut.got == 11
    assert driver.tally.turns == 1 and driver.ended == 4
    assert driver.jobs[0].end < 0


def test_a_damaged_trace_ends_the_run_with_its_error() -> None:
    def damaged() -> object:
        yield session("a", (0, 50, 1), (100, 9, 1))
        yield session("b", (0, 50, 1))
        raise TraceError("trace t is cut off")

    with pytest.raises(TraceError, match="cut off"):
        drive(FakeTarget(), damaged(), ReplayOptions(concurrency=2))  # type: ignore[arg-type]


def test_the_steady_window_is_when_all_lanes_work() -> None:
    sessions = [session(f"s{i}", (0, 50, 1), (0, 9, 1)) for i in range(5)]
    run = drive(FakeTarget(), sessions, ReplayOptions(concurrency=2))
    assert run.steady == (1.0, 4.0)


def test_the_corpus_hash_names_the_content_read() -> None:
    def digest(*sessions: Session, **options: float) -> str:
        return drive(FakeTarget(), list(sessions), ReplayOptions(**options)).corpus.digest  # type: ignore[arg-type]

    a, b = session("a", (0, 50, 1), (1, 9, 1)), session("a", (0, 50, 1), (2, 9, 1))
    assert digest(a) == digest(a) == digest(a, token_scale=0.5, time_scale=3)
    assert digest(a) != digest(b)
    assert digest(a, b) != digest(a)


def timed(name: str, start: float | None, *turns: tuple[float, int, int]) -> Session:
    found = session(name, *turns)
    found.start = start
    return found


def test_open_loop_starts_trees_when_the_trace_says() -> None:
    sessions = [
        timed("a", 100.0, (0, 50, 91)),  # ends after 10 s
        timed("b", 101.0, (0, 50, 1)),
        timed("c", 101.0, (0.5, 50, 1)),
        timed("d", None, (0, 50, 1)),  # with the one before
        timed("e", 105.0, (0, 50, 1), (2, 9, 1)),
    ]
    target = FakeTarget()
    run = drive(target, sessions, ReplayOptions(concurrency=1, open_loop=True))
    sent = {r.id: round(r.sent, 6) for r in run.records}
    assert sent == {"a/0/0": 0, "b/0/0": 1, "c/0/0": 1.5, "d/0/0": 1, "e/0/0": 5, "e/0/1": 8}
    assert target.peak == 4 and run.tally.sessions_completed == 5
    assert run.steady == pytest.approx((2.0, 5.0))  # a first turn has ended .. the last session starts


def test_open_loop_scales_times_and_sets_traces_end_to_end() -> None:
    sessions = [timed(name, start, (0, 9, 1)) for name, start in (("a", 0), ("b", 8), ("c", 50), ("d", 52))]
    sessions[2].start, sessions[3].start = 1.0, 3.0  # another trace, whose clock is behind
    run = drive(FakeTarget(), sessions, ReplayOptions(open_loop=True, time_scale=0.5))
    assert [r.sent for r in run.records] == [0, 4, 4, 5]


def test_lanes_that_start_under_way_find_their_prompts_cached() -> None:
    sessions = [session(f"s{i}", *((1, 50, 1) for _ in range(8))) for i in range(3)]
    target = FakeTarget()
    run = drive(target, sessions, ReplayOptions(concurrency=2, advance=(0.5, 0.5)))
    warm, first = target.requests[:2], target.requests[2:4]
    assert [r.id for r in warm] == ["s0/warm", "s1/warm"]
    for before, after in zip(warm, first, strict=True):
        assert len(before.output) == 1
        # The turn before the first one: all of its prompt is a prefix of the first.
        assert after.prompt.slice(0, len(before.prompt)) == before.prompt
    assert run.started > 0 and all(r.sent >= run.started for r in run.records)
    assert len(run.records) == 4 + 4 + 8  # the third session begins at its first turn
    assert run.records[0].sent == run.started  # at once, whatever gap was recorded


def test_sub_agents_of_before_are_history_and_later_ones_are_moved() -> None:
    agents = (
        Stream(1, chain(1000, (0, 30, 1)), parent=0, spawned_after=0, joined_before=3),
        Stream(2, chain(2000, (0, 30, 1)), parent=0, spawned_after=2, joined_before=3),
        Stream(3, chain(3000, (0, 30, 1)), parent=2, spawned_after=0),
        Stream(4, chain(4000, (0, 30, 1)), parent=1, spawned_after=0),
    )
    whole = session("s", *((0, 50, 1) for _ in range(4)), extra=agents)
    found = advance(whole, 0.5)
    assert found.warm == whole.streams[0].turns[1].input
    assert [s.id for s in found.session.streams] == [0, 2, 3]
    assert (found.session.streams[1].spawned_after, found.session.streams[1].joined_before) == (0, 1)
    run = drive(FakeTarget(), [whole], ReplayOptions(concurrency=1, advance=(0.5, 0.5)))
    assert run.tally.sessions_completed == 1 and len(run.records) == 4
    assert advance(whole, 0.0).session is whole and advance(whole, 0.0).warm is None
    assert len(advance(whole, 1.0).session.streams[0].turns) == 1


def test_a_duration_cuts_what_is_in_flight() -> None:
    run = drive(FakeTarget(), [session("a", *((0, 50, 11) for _ in range(9)))], ReplayOptions(duration=5.0))
    assert run.ended - run.started == pytest.approx(5.0)
    assert [r.ended for r in run.records] == pytest.approx([2, 4, -1])
    assert run.tally.turns == 2
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="duration is"):
            ReplayOptions(duration=bad).check()
    with pytest.raises(UserError, match="advance is"):
        ReplayOptions(advance=(0.5, 1.5)).check()
