from __future__ import annotations

from bien.core.report import SequenceOutput
from bien.core.worker.newest import Newest


def gained(id: str) -> SequenceOutput:
    return SequenceOutput(id, 1, b"")


def test_what_others_have_sent_counts_until_stats_or_outputs_tell() -> None:
    newest = Newest()
    newest.add("a", client=1, tokens=100)
    newest.add("b", client=2, tokens=30)
    assert [newest.ahead_of(client) for client in (1, 2, 3)] == [30, 100, 130]
    newest.reported([], queued=0, received=0)  # of a step that began before
    assert newest.ahead_of(3) == 130
    newest.reported([], queued=0, received=2)  # both are in the step that runs now, which stats do not count
    assert [newest.ahead_of(client) for client in (1, 2, 3)] == [30, 100, 130]
    newest.reported([gained("b")], queued=0, received=2)
    assert newest.ahead_of(3) == 0, "a is older than two reports: what is left of it, stats count"


def test_what_waits_and_is_counted_does_not_count_twice() -> None:
    newest = Newest()
    newest.add("a", client=1, tokens=100)
    newest.add("b", client=1, tokens=50)
    newest.reported([], queued=50, received=2)  # one is computed, one waits
    newest.add("c", client=1, tokens=7)
    assert newest.ahead_of(2) == 100 + 7
    newest.reported([], queued=150, received=3)
    assert newest.ahead_of(2) == 0


def test_what_is_gone_counts_no_more() -> None:
    newest = Newest()
    for n in range(3):
        newest.add(f"r{n}", client=n, tokens=10 + n)
    newest.remove("r1")  # aborted, or refused
    newest.remove("never there")
    assert newest.ahead_of(5) == 10 + 12
    newest.reported([gained("r0"), gained("r2")], queued=0, received=3)
    assert newest.ahead_of(5) == 0
