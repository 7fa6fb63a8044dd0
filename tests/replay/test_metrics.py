from __future__ import annotations

import pytest

from bien.replay.metrics import (
    Distribution,
    Throughput,
    acceptance_length,
    e2e_ms,
    interactivity,
    itl_ms,
    parity,
    tpot_ms,
    ttft_ms,
)
from bien.replay.record import TurnRecord


def record(*chunks: tuple[float, int], sent: float = 1.0, **more: object) -> TurnRecord:
    made = TurnRecord("s", 0, 0, sent=sent, prompt_tokens=100, cached=60)
    for now, count in chunks:
        made.chunk(now, count)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_times_of_a_request() -> None:
    one = record((2.0, 3), (2.5, 1), (3.0, 4))
    assert (one.ttft, one.e2e, one.got) == (1.0, 2.0, 8)
    # Five tokens came after the first chunk of three, in one second.
    assert one.tpot == 0.2
    assert ttft_ms([one]).p50 == 1000 and e2e_ms([one]).p99 == 2000 and tpot_ms([one]).mean == 200


def test_a_request_of_one_chunk_has_no_time_per_token() -> None:
    assert record((2.0, 3)).tpot is None
    assert record().ttft is None and record().e2e is None
    assert tpot_ms([record((2.0, 3))]) == Distribution()


def test_interactivity_is_the_percentile_of_the_ratio() -> None:
    slow, fast = record((2.0, 1), (3.0, 1)), record((2.0, 1), (2.1, 1))
    assert interactivity([slow, fast]).mean == pytest.approx((1 + 10) / 2)


def test_gaps_between_chunks_count_once_per_token() -> None:
    # 0.5 s for one token, 0.5 s for four.
    assert itl_ms([record((2.0, 3), (2.5, 1), (3.0, 4))]).mean == pytest.approx(1000 / 5)
    assert itl_ms([]) == Distribution()


def test_throughput_in_three_ways() -> None:
    good = [record((2.0, 10)), record((2.0, 30))]
    assert Throughput.of(good, 4.0) == Throughput(60.0, 30.0, 10.0)
    assert Throughput.of(good, 4.0, per=2) == Throughput(30.0, 15.0, 5.0)
    assert Throughput.of([*good, record((2.0, 9), error="broken")], 4.0) == Throughput(60.0, 30.0, 10.0)
    assert Throughput.of([record((2.0, 10), cached=-1)], 1.0) == Throughput(110.0, None, 10.0)
    assert Throughput.of(good, 0.0) == Throughput()


def test_parity() -> None:
    assert parity([record(predicted=30), record(predicted=60)]) == 0.75
    assert parity([record(predicted=0, cached=0)]) == 1.0
    assert parity([record(predicted=-1), record(predicted=5, cached=-1)]) is None


def test_acceptance_length() -> None:
    assert acceptance_length([record(rounds=10, accepted=15), record()]) == 2.5
    assert acceptance_length([record()]) is None
