from __future__ import annotations

from concurrent.futures import CancelledError

import pytest

from bien.core.clock import VirtualClock, WallClock
from bien.core.worker.transfers import TimedTransfers, TransferPool, make_transfers


def wait(job) -> None:
    for _ in range(10_000):
        if job.done():
            return
        WallClock().block(0.001)
    raise AssertionError("a copy never ends")


def test_copies_run_beside_the_caller_and_bring_results_or_errors():
    gate = []
    pool = make_transfers(WallClock(), 1, 1.0)
    assert isinstance(pool, TransferPool)

    def held():
        while not gate:
            WallClock().block(0.001)
        return "data"

    first, second = pool.start(held, 10), pool.start(lambda: 1 // 0, 10)
    assert not first.done() and not second.done()
    gate.append(1)
    wait(first)
    wait(second)
    assert first.result() == "data"
    with pytest.raises(ZeroDivisionError):
        second.result()
    pool.close()


def test_close_waits_for_what_runs_and_drops_the_rest():
    pool = TransferPool(1)
    started = []

    def slow():
        started.append(1)
        WallClock().block(0.05)
        return "whole"

    running, queued = pool.start(slow, 1), pool.start(slow, 1)
    while not started:
        WallClock().block(0.001)
    pool.close()
    assert running.done() and running.result() == "whole"
    assert queued.done() and started == [1]
    with pytest.raises(CancelledError):
        queued.result()


def test_timed_copies_take_bytes_over_bandwidth_on_each_lane():
    async def main():
        clock = VirtualClock()
        lanes = make_transfers(clock, 2, 10.0)
        assert isinstance(lanes, TimedTransfers)
        jobs = [lanes.start(lambda i=i: i, size) for i, size in enumerate((20, 50, 10))]
        assert [job.ends for job in jobs] == [2.0, 5.0, 3.0]  # the third follows the first
        await clock.sleep(3.0)
        assert [job.done() for job in jobs] == [True, False, True]
        assert jobs[2].result() == 2
        later = lanes.start(lambda: None, 10)
        assert later.ends == 4.0  # an idle lane starts now, not when it fell idle
        lanes.close()
        assert jobs[1].done() and later.done()
        with pytest.raises(CancelledError):
            jobs[1].result()
        assert jobs[0].result() == 0

    VirtualClock.run(main())
