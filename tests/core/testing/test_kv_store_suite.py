"""The suite of KV stores passes a correct store and catches every planted fault."""

from __future__ import annotations

import pytest

from bien.core.clock import WallClock
from bien.core.providers import Context
from bien.core.testing.kv_bench import GROUPS, split
from bien.core.testing.kv_store import KVStoreSuite
from bien.core.testing.suites import failures
from bien.core.worker.transfers import make_transfers

ROOM = 10 * 32


class Handle:
    def __init__(self, store, job, end):
        self.store, self.job, self.end, self.bad = store, job, end, False

    def done(self):
        if self.end is not None and self.job.done():
            end, self.end = self.end, None
            try:
                data = self.job.result()
            except Exception:
                self.bad = True
                data = None
            end(data)
        return self.end is None

    def failed(self):
        return self.bad


class Ended:
    def __init__(self, bad):
        self.bad = bad

    def done(self):
        return True

    def failed(self):
        return self.bad


class Plain:
    """Correct: first in, first out. Faults override one method each."""

    def __init__(self, ctx: Context):
        self.ctx, self.io = ctx, ctx.io
        self.transfers = make_transfers(ctx.clock, 1, 1000.0)
        self.data, self.saving, self.dropped = {}, {}, set()
        self.events, self.running = [], []

    def key(self, group, name):
        return group, name

    def keys(self, group, hashes):
        return [self.key(group, name) for name in split(hashes)]

    def poll(self):
        self.running = [t for t in self.running if not t.done()]

    def lookup(self, group, hashes):
        self.poll()
        return [key in self.data for key in self.keys(group, hashes)]

    def size(self):
        return sum(GROUPS[g].block_bytes for g, _ in [*self.data, *self.saving])

    def save(self, group, hashes, blocks):
        self.poll()
        new = [
            (key, block)
            for key, block in zip(self.keys(group, hashes), blocks, strict=True)
            if key not in self.data and key not in self.saving
        ]
        new = new[: ROOM // 32]
        if not new:
            return None
        self.make_room(len(new) * 32)
        self.saving |= dict(new)
        return self.start(
            lambda: self.read(group, [b for _, b in new]), new, lambda data: self.saved(new, data)
        )

    def start(self, work, new, end):
        self.running.append(Handle(self, self.transfers.start(work, 32 * len(new)), end))
        return self.running[-1]

    def read(self, group, blocks):
        return [self.io.read(group, [b]) if self.io else b"" for b in blocks]

    def write(self, group, blocks, data):
        for block, part in zip(blocks, data, strict=True):
            if self.io:
                self.io.write(group, [block], part)

    def make_room(self, size):
        while self.data and self.size() + size > ROOM:
            self.drop(next(iter(self.data)))

    def saved(self, new, data):
        for i, (key, _) in enumerate(new):
            del self.saving[key]
            if data is None or key in self.dropped:
                self.dropped.discard(key)
                continue
            self.data[key] = data[i]
            self.note("stored", key)

    def drop(self, key):
        del self.data[key]
        self.note("removed", key)

    def note(self, op, key):
        if self.events and self.events[-1][:2] == (op, key[0]):
            self.events[-1] = (op, key[0], self.events[-1][2] + key[1])
        else:
            self.events.append((op, *key))

    def load(self, group, hashes, blocks):
        self.poll()
        keys = self.keys(group, hashes)
        if any(key not in self.data for key in keys):
            return Ended(True)
        data = [self.data[key] for key in keys]
        return self.start(lambda: self.write(group, blocks, data), keys, lambda _: None)

    def pin(self, group, hashes, ttl):
        pass

    def evict(self, group, hashes):
        self.poll()
        for key in self.keys(group, hashes):
            if key in self.saving:
                self.dropped.add(key)
            if key in self.data:
                self.drop(key)

    def take_events(self):
        self.poll()
        events, self.events = self.events, []
        return events

    @property
    def usage(self):
        self.poll()
        return self.size(), ROOM

    def close(self):
        self.transfers.close()
        self.poll()


class LosesData(Plain):
    def saved(self, new, data):
        super().saved(new, data and [data[0]] * len(data))


class LosesABlock(Plain):
    def saved(self, new, data):
        super().saved(new, data)
        if len(new) > 2:
            self.data.pop(new[1][0], None)


class SaysDoneAtOnce(Plain):
    def save(self, group, hashes, blocks):
        return super().save(group, hashes, blocks) and Ended(False)


class LoadsAreDoneAtOnce(Plain):
    def load(self, group, hashes, blocks):
        return Ended(super().load(group, hashes, blocks).failed())


class FindsTooEarly(Plain):
    def lookup(self, group, hashes):
        self.poll()
        return [key in self.data or key in self.saving for key in self.keys(group, hashes)]


class AnnouncesTooEarly(Plain):
    def save(self, group, hashes, blocks):
        transfer = super().save(group, hashes, blocks)
        for key in self.saving:
            self.note("stored", key)
        return transfer


class CopiesOnTheSpot(Plain):
    def start(self, work, new, end):
        handle = super().start(work, new, end)
        while not self.ctx.clock.virtual and not handle.done():
            WallClock().block(0.001)
        return handle


class IgnoresCapacity(Plain):
    def make_room(self, size):
        pass


class OverflowsWhenPinned(Plain):
    """Correct until all that it holds is pinned."""

    def __init__(self, ctx: Context):
        super().__init__(ctx)
        self.pinned = set()

    def pin(self, group, hashes, ttl):
        self.pinned |= {*self.keys(group, hashes)} & {*self.data}

    def make_room(self, size):
        for key in [key for key in self.data if key not in self.pinned]:
            if self.size() + size > ROOM:
                self.drop(key)


class HidesWhatItUses(IgnoresCapacity):
    @property
    def usage(self):
        return min(self.size(), ROOM), ROOM


class KeepsNothing(Plain):
    def make_room(self, size):
        while self.data:
            self.drop(next(iter(self.data)))


class MixesGroups(Plain):
    def key(self, group, name):
        return 0, name


class HasEveryGroupsKeys(Plain):
    def lookup(self, group, hashes):
        self.poll()
        names = {name for _, name in self.data}
        return [name in names for name in split(hashes)]


class ForgetsToTellOfEvictions(Plain):
    def drop(self, key):
        del self.data[key]


class TellsTwice(Plain):
    def note(self, op, key):
        super().note(op, key)
        if op == "stored":
            super().note(op, key)


class TellsOfAnotherGroup(Plain):
    def note(self, op, key):
        super().note(op, (1 if key[0] == 0 else key[0], key[1]))


class TellsInItsOwnWords(Plain):
    def note(self, op, key):
        super().note({"removed": "evicted"}.get(op, op), key)


class SucceedsWithoutData(Plain):
    def load(self, group, hashes, blocks):
        return Ended(False) if not all(self.lookup(group, hashes)) else super().load(group, hashes, blocks)


class LoadsWhatItHas(Plain):
    def load(self, group, hashes, blocks):
        names = [n for n in split(hashes) if all(self.lookup(group, n))]
        return super().load(group, b"".join(names), blocks[: len(names)]) if names else Ended(True)


class EvictsNothing(Plain):
    def evict(self, group, hashes):
        pass


class EvictsEveryGroup(Plain):
    def evict(self, group, hashes):
        for g in range(len(GROUPS)):
            super().evict(g, hashes)


class StoresWhatFailed(Plain):
    def saved(self, new, data):
        super().saved(new, data or [None] * len(new))


class LeaksRoomOfFailures(Plain):
    def saved(self, new, data):
        if data is not None:
            super().saved(new, data)


class HidesFailures(Plain):
    def start(self, work, new, end):
        handle = super().start(work, new, end)
        handle.failed = lambda: False
        return handle


class NeverEndsAfterClose(Plain):
    def close(self):
        self.transfers.close()
        for handle in self.running:
            handle.done = lambda: False


class CountsTwice(Plain):
    def save(self, group, hashes, blocks):
        before = list(self.keys(group, hashes))
        for key in before:
            if key in self.data:
                self.extra = getattr(self, "extra", 0) + 1
        return super().save(group, hashes, blocks)

    @property
    def usage(self):
        self.poll()
        return min(ROOM, self.size() + getattr(self, "extra", 0) * 32), ROOM


class TakesNoTime(Plain):
    def start(self, work, new, end):
        if not self.ctx.clock.virtual:
            return super().start(work, new, end)
        end(work())
        return Ended(False)


class NeedsADevice(Plain):
    def read(self, group, blocks):
        return [self.io.read(group, [b]) for b in blocks]


class TooLarge(Plain):
    @property
    def usage(self):
        self.poll()
        return self.size(), 1 << 30


def suite(store):
    return type(f"{store.__name__}Suite", (KVStoreSuite,), {"build": lambda self, ctx: store(ctx)})


def test_a_correct_store_passes():
    assert failures(suite(Plain)) == []


FAULTS = {
    LosesData: "test_blocks_come_back_as_they_were",
    LosesABlock: "test_blocks_come_back_as_they_were",
    SaysDoneAtOnce: "test_a_save_ends_when_the_data_is_there",
    LoadsAreDoneAtOnce: "test_a_load_ends_when_the_data_is_there",
    FindsTooEarly: "test_a_save_ends_when_the_data_is_there",
    AnnouncesTooEarly: "test_a_save_ends_when_the_data_is_there",
    CopiesOnTheSpot: "test_a_save_ends_when_the_data_is_there",
    IgnoresCapacity: "test_capacity_is_kept",
    HidesWhatItUses: "test_capacity_is_kept",
    KeepsNothing: "test_capacity_is_kept",
    OverflowsWhenPinned: "test_pins_do_not_make_room",
    MixesGroups: "test_groups_are_apart",
    HasEveryGroupsKeys: "test_groups_are_apart",
    ForgetsToTellOfEvictions: "test_events_tell_what_can_be_loaded",
    TellsTwice: "test_events_tell_what_can_be_loaded",
    TellsOfAnotherGroup: "test_events_tell_what_can_be_loaded",
    TellsInItsOwnWords: "test_events_tell_what_can_be_loaded",
    SucceedsWithoutData: "test_a_load_of_what_is_absent_fails",
    LoadsWhatItHas: "test_a_load_of_what_is_absent_fails",
    EvictsNothing: "test_a_load_of_what_is_absent_fails",
    EvictsEveryGroup: "test_groups_are_apart",
    StoresWhatFailed: "test_a_failed_copy_leaves_nothing_behind",
    LeaksRoomOfFailures: "test_a_failed_copy_leaves_nothing_behind",
    HidesFailures: "test_a_failed_copy_leaves_nothing_behind",
    NeverEndsAfterClose: "test_close_ends_transfers",
    CountsTwice: "test_saving_again_is_harmless",
    TakesNoTime: "test_simulation",
    NeedsADevice: "test_simulation",
    TooLarge: "test_blocks_come_back_as_they_were",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(fault):
    # Only the test that is about it, so that the fault is caught for what it is.
    name = FAULTS[fault]
    only = {n: None for n in dir(KVStoreSuite) if n.startswith("test_") and n != name}
    cut = type("Cut", (suite(fault),), {n: staticmethod(lambda: None) for n in only})
    assert [line.split(":")[0] for line in failures(cut)] == [name]
