"""Gaps, restarts, duplicates and damage, from a script in place of the sockets."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from bien.core.clock import VirtualClock
from bien.core.kv.hashing import tenant_key
from bien.gateway.remote.alarms import EventWatch
from bien.gateway.remote.blocks import BlockMap
from bien.gateway.remote.follow import Follower, Lost, Numbered

KEY = tenant_key("")


def stored(first, count, parent=None):
    """Blocks of 4 tokens, named by their numbers."""
    tokens = list(range(4 * first, 4 * (first + count)))
    return ["BlockStored", list(range(first, first + count)), parent, tokens, 4, None]


def removed(*names):
    return ["BlockRemoved", list(names)]


def message(*events, rank=None):
    return msgspec.msgpack.encode([0.0, list(events), rank])


class Script:
    """A source that gives what its test puts, and keeps what the engine would keep."""

    def __init__(self, replays=True):
        self.replays = replays
        self.kept = []  # of the engine's
        self.asked = []
        self.silent = False
        self._items = asyncio.Queue()

    async def __aiter__(self):
        while True:
            yield await self._items.get()

    def put(self, item):
        self._items.put_nowait(item)

    async def replay(self, start):
        self.asked.append(start)
        return None if self.silent else [m for m in self.kept if m.seq >= start]

    async def close(self):
        pass


class Rig:
    def __init__(self, replays=True, kinds=("full",), kept=()):
        self.clock = VirtualClock()
        self.source = Script(replays)
        self.source.kept = list(kept)
        self.groups = [BlockMap(4, lambda salt: None if salt else KEY, g) for g in range(len(kinds))]
        self.watch = EventWatch("w", self.clock, 10.0)
        self.events, self.lives = [], 0
        self.follower = Follower(
            self.source, self.groups, kinds, 0, self.watch, self.events.extend, self._renewed
        )
        self.task = asyncio.get_running_loop().create_task(self.follower.run())
        self._next = len(self.source.kept)

    def _renewed(self):
        self.lives += 1
        self.events.clear()

    async def tell(self, *events, lose=False, **about):
        """The engine publishes; with `lose` it does not reach us."""
        item = Numbered(self._next, message(*events, **about))
        self._next += 1
        self.source.kept.append(item)
        if not lose:
            self.source.put(item)
        await self.settle()

    async def give(self, seq, payload):
        self.source.put(Numbered(seq, payload))
        await self.settle()

    async def restart(self):
        self.source.kept, self._next = [], 0

    async def settle(self):
        await self.clock.sleep(0.01)

    @property
    def held(self):
        """Names of the blocks that the index has by now."""
        return sum(len(e.hashes) // 16 * (1 if e.op == "stored" else -1) for e in self.events)


def run(test):
    def wrapped(*args, **kwargs):
        VirtualClock.run(test(*args, **kwargs))

    wrapped.__name__ = test.__name__
    return wrapped


@run
async def test_what_was_before_is_asked_for_first():
    rig = Rig(kept=[Numbered(0, message(stored(0, 3))), Numbered(1, message(removed(2)))])
    await rig.settle()
    assert rig.follower.ready.is_set() and rig.held == 2 and rig.source.asked == [0]
    await rig.give(1, message(removed(2)))  # published while we asked
    await rig.tell(stored(2, 2, parent=1))
    assert rig.held == 4 and rig.lives == 0 and rig.watch.counts.gaps == 0


@run
async def test_a_gap_is_filled():
    rig = Rig()
    await rig.tell(stored(0, 2))
    await rig.tell(stored(2, 2, parent=1), lose=True)
    await rig.tell(removed(3), lose=True)
    await rig.tell(stored(8, 1))
    assert (rig.held, rig.lives, rig.watch.counts.gaps, rig.watch.counts.lost) == (4, 0, 2, 0)
    assert rig.source.asked == [0, 1]


@pytest.mark.parametrize("replays", [False, True])
def test_a_gap_that_cannot_be_filled_forgets_all(replays):
    async def main():
        rig = Rig(replays)
        await rig.tell(stored(0, 2))
        await rig.tell(removed(1), lose=True)
        rig.source.kept.clear()
        await rig.tell(stored(8, 1))
        assert (rig.held, rig.lives, rig.watch.counts.lost) == (1, 1, 1)

    VirtualClock.run(main())


@run
async def test_a_buffer_that_has_moved_on_forgets_what_was():
    rig = Rig()
    await rig.tell(stored(0, 2))
    for _ in range(3):
        await rig.tell(stored(20, 1), lose=True)
    del rig.source.kept[:3]
    await rig.tell(stored(8, 1))
    assert rig.lives == 1 and rig.held == 2, "the blocks of the messages 3 and 4"


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("before", [1, 5])
def test_an_engine_that_starts_again_has_nothing(replays, before):
    """Its numbers begin at 0 again, whether or not we hear that one."""

    async def main():
        rig = Rig(replays)
        for n in range(before):
            await rig.tell(stored(10 * n, 2))
        assert rig.held == 2 * before
        await rig.restart()
        await rig.tell(stored(100, 3), lose=before > 1)
        if before > 1:
            await rig.tell(stored(103, 1, parent=102))
        assert rig.lives >= 1 and rig.watch.counts.restarts == 1
        seen = 3 if before == 1 else 4 if replays else 0  # without a replay, a child of the unknown
        assert rig.held == seen

    VirtualClock.run(main())


@pytest.mark.parametrize("replays", [False, True])
def test_another_process_that_is_ahead_is_found_out_by_the_broken_connection(replays):
    async def main():
        rig = Rig(replays)
        await rig.tell(stored(0, 2))
        await rig.restart()
        rig.source.put(Lost())
        for n in range(1, 4):  # the first ones are not heard: the subscription was not there yet
            await rig.tell(stored(10 * n, 1), lose=n < 3)
        assert rig.lives == 1 and rig.held == (3 if replays else 1)

    VirtualClock.run(main())


@run
async def test_undecodable_messages_forget_and_alarm_after_a_while():
    rig = Rig()
    await rig.tell(stored(0, 2))
    await rig.give(1, b"\xc1")
    rig._next = 2
    assert rig.lives == 1 and rig.held == 0 and rig.watch.counts.undecodable == 1
    rig.watch.check()
    assert not rig.watch.alarms, "not at once"
    await rig.clock.sleep(11)
    rig.watch.check()
    assert "cannot be decoded" in rig.watch.alarms["undecodable"]
    await rig.tell(stored(4, 1))
    assert not rig.watch.alarms and rig.held == 1


@run
async def test_events_of_unknown_types_are_counted_and_alarmed_too():
    rig = Rig()
    for _ in range(3):
        await rig.tell(["BlockMoved", [1]])
        await rig.clock.sleep(6)
        rig.watch.check()
    assert rig.watch.counts.undecodable == 3 and "BlockMoved" in rig.watch.alarms["undecodable"]


@run
async def test_an_engine_that_never_says_a_word_is_alarmed():
    rig = Rig()
    rig.watch.owed()
    await rig.clock.sleep(9)
    rig.watch.check()
    assert not rig.watch.alarms
    await rig.clock.sleep(2)
    rig.watch.check()
    assert "no KV event for 10 s" in rig.watch.alarms["silent"]
    await rig.tell(stored(0, 1))
    assert not rig.watch.alarms


@run
async def test_other_ranks_and_groups_are_refused_with_a_word():
    rig = Rig()
    await rig.tell(stored(0, 1), rank=2)
    assert rig.held == 0 and "rank 2" in rig.watch.alarms["rank"]
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128}
    await rig.tell(event | {"group_idx": 1} | window)
    assert rig.held == 0 and rig.watch.counts.misplaced == 2
    assert "group 1 of kind 'sliding_window', window 128" in rig.watch.alarms["groups"]
    await rig.tell(event | window)
    assert rig.held == 0, "its kind is another one"


@run
async def test_groups_are_kept_apart():
    rig = Rig(kinds=("full", "window"))
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
    await rig.tell(event | {"group_idx": 0}, event | {"group_idx": 1})
    await rig.tell({"type": "BlockRemoved", "block_hashes": [1], "group_idx": 1})
    assert [(e.op, e.group) for e in rig.events] == [("stored", 0), ("stored", 1), ("removed", 1)]


@run
async def test_an_engine_that_does_not_answer_is_alarmed_and_followed():
    rig = Rig()
    rig.source.silent = True
    await rig.tell(stored(0, 1))
    await rig.tell(stored(1, 1, parent=0), lose=True)
    await rig.tell(stored(5, 1))
    assert "replay" in rig.watch.alarms and rig.lives == 1 and rig.held == 1
    rig.source.silent = False
    await rig.restart()
    await rig.tell(stored(0, 1))
    assert "replay" not in rig.watch.alarms and rig.held == 1
