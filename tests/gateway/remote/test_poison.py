"""Messages that nobody foresaw: whatever one holds, it is counted, and the next ones are followed."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bien.core.clock import VirtualClock
from bien.core.kv.hashing import tenant_key
from bien.gateway.remote.alarms import EventWatch
from bien.gateway.remote.blocks import BlockMap
from bien.gateway.remote.follow import Follower, Numbered
from bien.gateway.remote.wire import UndecodableError, decode

KEY = tenant_key("")
STORED = ["BlockStored", [7], None, [1, 2, 3, 4], 4, None, None]


def packed(*events, rank=0):
    return msgspec.msgpack.encode([0.0, list(events), rank])


class Kept:
    """A source whose engine keeps all that it has said."""

    replays = True

    def __init__(self, payloads):
        self.kept = [Numbered(n, payload) for n, payload in enumerate(payloads)]
        self.items = asyncio.Queue()

    async def __aiter__(self):
        while True:
            yield await self.items.get()

    async def replay(self, start):
        return [m for m in self.kept if m.seq >= start]

    async def say(self, payload):
        self.kept.append(Numbered(len(self.kept), payload))
        self.items.put_nowait(self.kept[-1])
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def close(self):
        pass


class Follows:
    def __init__(self, *payloads, kinds=("full",), key_of=lambda salt: None if salt else KEY):
        self.clock = VirtualClock()
        self.source = Kept(payloads)
        self.groups = [BlockMap(4, key_of, g) for g in range(len(kinds))]
        self.watch = EventWatch("w", self.clock, 10.0)
        self.events, self.lives = [], 0
        self.follower = Follower(
            self.source, self.groups, kinds, 0, self.watch, self.events.extend, self.renewed
        )
        self.task = asyncio.get_running_loop().create_task(self.follower.run())

    def renewed(self):
        self.lives += 1
        self.events.clear()

    @property
    def held(self):
        return sum(len(e.hashes) // 16 * (1 if e.op == "stored" else -1) for e in self.events)


POISON = {
    "a map as extra keys": packed([*STORED, None, [{"cache_salt": "a"}]]),
    "a number as extra keys": packed([*STORED, None, [5]]),
    "a text as extra keys": packed([*STORED, None, ["s"]]),
    "a negative group": packed([*STORED, None, None, -5]),
    "a negative group of removals": packed(["BlockRemoved", [7], None, -7]),
    "the group before the first": packed([*STORED, None, None, -1]),
    "removals of the group before the first": packed(["BlockRemoved", [1], None, -1]),
    "a huge group": packed([*STORED, None, None, 1 << 62]),
    "deep arrays": b"\x91" * 100_000,
    "deep maps": b"\x81\xa1x" * 100_000,
    "deep events": b"\x93\x00\x91" + b"\x91" * 900 + b"\x90",
    "a deep field": packed(["BlockStored", msgspec.Raw(b"\x91" * 900 + b"\x90"), None, [1], 1]),
    "NaN tokens": packed(["BlockStored", [7], None, [math.nan] * 4, 4]),
    "huge tokens": packed(["BlockStored", [7], None, [1 << 63] * 4, 4]),
    "a rank that is a map": packed(rank={}),
    "an array that says it is giant": b"\xdd\xff\xff\xff\xff\xc0",
    "a giant array": packed(["BlockStored", [None] * 200_000, None, [], 4]),
    "a giant name": packed(["x" * 1_000_000]),
}


@pytest.mark.parametrize("what", POISON)
def test_decoding_raises_nothing_else(what):
    try:
        decode(POISON[what])
    except UndecodableError as error:
        assert len(str(error)) < 300


@pytest.mark.parametrize("what", POISON)
@pytest.mark.parametrize("before", [True, False], ids=["said before we came", "said while we follow"])
def test_a_message_that_nobody_foresaw_ends_nothing(what, before):
    async def main():
        rig = Follows(*([packed(["BlockStored", [1], None, [1] * 4, 4]), POISON[what]] if before else []))
        await rig.clock.sleep(0.1)
        assert rig.follower.ready.is_set()
        if not before:
            await rig.source.say(packed(["BlockStored", [1], None, [1] * 4, 4]))
            await rig.source.say(POISON[what])
        counts = rig.watch.counts
        assert counts.undecodable + counts.misplaced == 1
        if counts.undecodable:
            await rig.clock.sleep(11)
            rig.watch.check()
        [text] = rig.watch.alarms.values()
        assert len(text) < 400
        await rig.source.say(packed(["BlockStored", [2, 3], None, [2] * 8, 4]))
        assert not rig.task.done() and rig.held >= 2

    VirtualClock.run(main())


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "events", "type", "GPU"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
small = st.integers(-3, 8)


def near(valid):
    """Mostly what it should be."""
    return st.one_of(valid, valid, valid, valid, values)


names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
extras = st.lists(near(st.none() | st.lists(near(st.text(max_size=2)), max_size=2)), max_size=4)
fields = st.tuples(
    near(st.lists(near(small), max_size=4)),
    near(st.none() | small),
    near(st.lists(near(small), max_size=16)),
    near(small),
    near(st.none()),
    near(st.none() | st.sampled_from(["GPU", "CPU"])),
    near(st.none()),
    near(st.none() | extras),
    near(st.none() | small),
    near(st.none() | st.just("full_attention")),
    near(st.none() | small),
)


def both(f):
    """The two forms of the same event."""
    named = {"type": "BlockStored", "extra_keys": f[7], "group_idx": f[8]} | dict(zip(names, f, strict=False))
    return st.sampled_from([["BlockStored", *f], named])


stores = fields.flatmap(both)
removals = st.tuples(
    near(st.lists(near(small), max_size=4)), near(st.none() | st.just("CPU")), near(small)
).map(lambda f: ["BlockRemoved", *f])
clears = near(st.none() | st.just("GPU")).map(lambda medium: ["AllBlocksCleared", medium])
events = st.one_of(stores, stores, removals, clears, values)
forms = st.one_of(
    st.lists(events, max_size=4).map(lambda e: [0.0, e, 0]),
    st.lists(events, max_size=4).map(lambda e: {"ts": 0, "events": e}),
    values,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(forms, min_size=1, max_size=8), st.booleans())
def test_no_sequence_of_messages_ends_the_following(raws, knows_salts):
    async def main():
        rig = Follows(kinds=("full", "window"), key_of=lambda salt: KEY if knows_salts or not salt else None)
        await rig.clock.sleep(0.1)
        for raw in raws:
            await rig.source.say(msgspec.msgpack.encode(raw))
        await rig.follower.relearn()
        assert not rig.task.done()
        assert rig.follower._next == len(raws)
        before = rig.watch.counts.messages
        await rig.source.say(packed(["BlockStored", [100], None, [9] * 4, 4]))
        assert rig.watch.counts.messages == before + 1 and len(rig.groups[0]) >= 1
        clear = [group.snapshot() for group in rig.groups]
        told = Told()
        told.take(rig.events)
        assert told.there == {(e.group, e.tier, e.hashes) for found in clear for e in found}

    VirtualClock.run(main())


class Told:
    """What an index knows that was told all events since the newest life began."""

    def __init__(self):
        self.there = set()

    def take(self, events):
        for e in events:
            names = {(e.group, e.tier, e.hashes[i : i + 16]) for i in range(0, len(e.hashes), 16)}
            if e.op == "stored":
                self.there |= names
            elif e.op == "removed":
                self.there -= names
            else:
                self.there = {t for t in self.there if t[:2] != (e.group, e.tier)}


@given(values)
def test_no_value_raises_anything_else(value):
    try:
        decode(msgspec.msgpack.encode(value))
    except UndecodableError as error:
        assert len(str(error)) < 300


def test_a_fault_of_our_own_costs_what_is_known_and_no_more(monkeypatch):
    async def main():
        rig = Follows()
        await rig.clock.sleep(0.1)
        await rig.source.say(packed(["BlockStored", [1], None, [1] * 4, 4]))
        with monkeypatch.context() as broken:
            broken.setattr(BlockMap, "store", lambda self, event: 1 / 0)
            await rig.source.say(packed(STORED))
        assert (rig.lives, rig.held, rig.watch.counts.undecodable) == (1, 0, 1)
        await rig.source.say(packed(STORED))
        assert rig.held == 1 and not rig.task.done()

    VirtualClock.run(main())


def test_what_an_unknown_message_may_have_removed_is_not_learned_again():
    """A salt that becomes known lets all be heard again, but nothing of what was before such a message."""

    async def main():
        known = {}
        rig = Follows(key_of=lambda salt: known.get(salt) if salt else KEY)
        await rig.clock.sleep(0.1)
        await rig.source.say(packed(["BlockStored", [1], None, [1] * 4, 4]))
        await rig.source.say(b"\xc1")
        salted = ["BlockStored", [2], None, [2] * 4, 4, None, None, None, [["a"]]]
        await rig.source.say(packed(salted))
        assert rig.held == 0
        known["a"] = tenant_key("a")
        await rig.follower.relearn()
        assert rig.held == 1 and rig.lives == 1

    VirtualClock.run(main())


def test_bad_messages_among_good_ones_are_alarmed_in_time():
    clock = VirtualClock()

    async def main():
        watch = EventWatch("w", clock, 10.0)
        watch.undecodable("x")
        for _ in range(4):
            await clock.sleep(3)
            watch.understood()
            watch.check()
        assert not watch.alarms, "one among many"
        for n in range(6):
            watch.undecodable("y")
            watch.understood()
            await clock.sleep(3)
            watch.check()
            assert bool(watch.alarms) == (n >= 4)
        await clock.sleep(8)
        watch.check()
        assert not watch.alarms, "it is over"

    VirtualClock.run(main())
