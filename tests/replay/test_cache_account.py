from __future__ import annotations

from bien.core.request import BlockRuns
from bien.replay.cache_account import CacheAccount
from bien.replay.record import TurnRecord


def send(account: CacheAccount, at: float, prompt: list[tuple[int, int]], output: int = 0) -> TurnRecord:
    content = BlockRuns.of(prompt)
    start, n = prompt[-1]
    out = BlockRuns.of([(start + n, output)])
    record = TurnRecord("s", 0, 0, sent=at, prompt_tokens=len(content))
    account.sent("", "scope", content, out, record)
    return record


def end(account: CacheAccount, record: TurnRecord, at: float, worker: str, cached: int) -> None:
    record.worker, record.cached = worker, cached
    record.chunk(at, 1)
    record.ended = at
    account.settle()


def test_loss_is_split_by_cause() -> None:
    account = CacheAccount(16)
    end(account, send(account, 0, [(0, 100)], output=10), 1, "w0", 0)
    assert account.ideal == 0
    # 110 tokens are shared: 6 blocks of w0; it had lost two of them.
    end(account, send(account, 2, [(0, 120)]), 3, "w0", 64)
    assert (account.ideal, account.achieved) == (96, 64)
    assert (account.loss.rounding, account.loss.capacity, account.loss.other_replica) == (14, 32, 0)
    # The other worker has nothing of it.
    end(account, send(account, 4, [(0, 120)]), 5, "w1", 0)
    assert account.loss.other_replica == 112
    end(account, send(account, 6, [(0, 120)]), 7, "", 16)
    assert account.loss.unknown == 112 - 16


def test_turns_settle_in_the_order_of_sending() -> None:
    account = CacheAccount(16)
    slow = send(account, 0, [(0, 100)])
    quick = send(account, 1, [(0, 100)])
    end(account, quick, 2, "w0", 0)
    assert account.prompt_tokens == 0
    end(account, slow, 3, "w0", 0)
    assert account.prompt_tokens == 200
    assert account.ideal == 96 and account.loss.capacity == 96


def test_outputs_count_from_their_end_on() -> None:
    account = CacheAccount(16)
    early = send(account, 0, [(0, 96)], output=64)
    while_running = send(account, 1, [(0, 160)])
    end(account, early, 2, "w0", 0)
    end(account, while_running, 3, "w0", 0)
    assert account.ideal == 96
    end(account, send(account, 4, [(0, 160), (1000, 1)]), 5, "w0", 0)
    assert account.ideal == 96 + 160


def test_failed_turns_and_unknown_counts_stay_out() -> None:
    account = CacheAccount(16)
    failed = send(account, 0, [(0, 100)])
    failed.ended = 1.0
    account.settle()
    end(account, send(account, 2, [(0, 100)]), 3, "w0", -1)
    assert account.prompt_tokens == account.ideal == 0
    end(account, send(account, 4, [(0, 100)]), 5, "w0", 96)
    assert account.ideal == account.achieved == 96


def test_a_forgotten_scope_takes_no_memory() -> None:
    account = CacheAccount(16)
    record = send(account, 0, [(0, 100)])
    account.forget("", "scope")
    end(account, record, 1, "w0", 0)
    assert account.prompt_tokens == 100
    assert account._trees == {} and account._over == set()


def test_answers_that_are_not_the_recorded_ones_are_in_no_cache() -> None:
    """A server that is not told its output writes its own."""
    for outputs, ideal in ((True, 160), (False, 96)):
        account = CacheAccount(16, outputs)
        end(account, send(account, 0, [(0, 96)], output=64), 1, "w0", 0)
        end(account, send(account, 2, [(0, 160), (1000, 1)]), 3, "w0", 0)
        assert account.ideal == ideal
