"""Conformance suite of KV stores. Subclass it in your tests and give `build`:

    class TestMine(KVStoreSuite):
        def build(self, ctx):
            return make(MyConfig(capacity_blocks=12), ctx)

The store must hold at least `least` and at most `most` blocks of the largest group, so that the suite can
fill it. `ctx` has `groups`, `clock`, and an `io` that notices what stores do to the device; `io` is None on
a virtual clock.
"""

from __future__ import annotations

import random

from bien.core.clock import VirtualClock
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.store import KVStore
from bien.core.providers import Context
from bien.core.testing.kv_bench import GROUPS, Bench, ToyIO, chain, split


class KVStoreSuite:
    """What the engine and the index rely on."""

    simulates = True  # it works on a virtual clock, without data
    least, most = 8, 256

    def build(self, ctx: Context) -> KVStore:
        """A fresh, empty store."""
        raise NotImplementedError

    # -- what comes back

    def test_blocks_come_back_as_they_were(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 4)
            for group in range(len(GROUPS)):
                bench.save(group, hashes)
                assert bench.store.lookup(group, hashes) == [True] * 4, "what was saved cannot be loaded"
                bench.load(group, hashes)
                bench.load(group, hashes[HASH_BYTES:-HASH_BYTES])  # any run, not just the saved one

    def test_groups_are_apart(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 2)
            bench.save(0, hashes)
            for other in (1, 2):
                assert bench.store.lookup(other, hashes) == [False, False], (
                    f"group {other} has group 0's keys"
                )
            bench.save(1, hashes)
            bench.load(0, hashes)
            bench.load(1, hashes)
            bench.store.evict(0, hashes)
            bench.load(1, hashes)

    def test_lookup_answers_block_by_block(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 5)
            bench.save(0, hashes[HASH_BYTES : 3 * HASH_BYTES])
            assert bench.store.lookup(0, hashes) == [False, True, True, False, False]
            assert bench.store.lookup(0, b"") == []

    def test_a_load_of_what_is_absent_fails(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 3)
            bench.refuse(0, hashes)
            bench.save(0, hashes[: 2 * HASH_BYTES])
            bench.refuse(0, hashes)  # one block of the run is missing
            bench.store.evict(0, hashes[:HASH_BYTES])
            assert bench.store.lookup(0, hashes) == [False, True, False], "what was evicted is still there"
            bench.refuse(0, hashes[:HASH_BYTES])
            bench.load(0, hashes[HASH_BYTES : 2 * HASH_BYTES])

    def test_saving_again_is_harmless(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 3)
            bench.save(0, hashes)
            used = bench.store.usage[0]
            bench.events()
            bench.save(0, hashes)
            assert bench.store.usage[0] == used, "blocks that were there already count twice"
            bench.events()
            bench.load(0, hashes)

    # -- time

    def test_a_save_ends_when_the_data_is_there(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 3)
            bench.io.held = True
            transfer = bench.store.save(0, hashes, bench.fill(0, hashes))
            assert transfer is not None, "an empty store refused three blocks"
            assert not transfer.done(), "save() waits for the copy, or ends before it"
            assert bench.store.lookup(0, hashes) == [False] * 3, "blocks can be loaded that are not there yet"
            assert bench.store.take_events() == [], "blocks are announced that are not there yet"
            bench.io.held = False
            assert not bench.wait(transfer)
            bench.load(0, hashes)
            assert transfer.done() and not transfer.failed()

    def test_a_load_ends_when_the_data_is_there(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 3)
            bench.save(0, hashes)
            bench.io.held = True
            blocks = bench.take(3)
            transfer = bench.store.load(0, hashes, blocks)
            assert not transfer.done(), "load() waits for the copy, or ends before it"
            bench.io.held = False
            assert not bench.wait(transfer)
            bench.check(0, hashes, blocks)

    def test_eviction_does_not_harm_a_running_load(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 3)
            bench.save(0, hashes)
            bench.io.held = True
            blocks = bench.take(3)
            transfer = bench.store.load(0, hashes, blocks)
            bench.store.evict(0, hashes)
            bench.io.held = False
            if not bench.wait(transfer):
                bench.check(0, hashes, blocks)

    def test_eviction_of_what_is_being_saved(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 3)
            bench.io.held = True
            transfer = bench.store.save(0, hashes, bench.fill(0, hashes))
            bench.store.evict(0, hashes[:HASH_BYTES])
            bench.io.held = False
            bench.wait(transfer)
            for name, there in zip(split(hashes), bench.store.lookup(0, hashes), strict=True):
                if there:
                    bench.load(0, name)
            bench.events()

    # -- room

    def test_capacity_is_kept(self) -> None:
        with self._bench() as bench:
            chains = [chain(f"c{i}", 4) for i in range(bench.room // 2)]
            for hashes in chains:
                for group in range(len(GROUPS)):
                    bench.save(group, hashes)
                    used, capacity = bench.store.usage
                    assert used <= capacity, f"{used} bytes used of {capacity}"
            held = sum(
                GROUPS[g].block_bytes * sum(bench.store.lookup(g, hashes))
                for hashes in chains
                for g in range(len(GROUPS))
            )
            used, capacity = bench.store.usage
            assert held <= capacity, f"{held} bytes can be loaded from a store of {capacity}"
            assert held == used, f"{held} bytes can be loaded, usage says {used}"
            assert held * 2 >= capacity, f"a full store holds {held} bytes of {capacity}"
            bench.events()

    def test_pins_do_not_make_room(self) -> None:
        """When all that it holds is pinned, a store lets go of some of it or takes no more."""
        with self._bench() as bench:
            for i in range(bench.room // 2):
                hashes = chain(f"p{i}", 4)
                transfer = bench.store.save(0, hashes, bench.fill(0, hashes))
                if transfer is not None:
                    bench.wait(transfer)
                bench.store.pin(0, hashes, 1000.0)
                used, capacity = bench.store.usage
                assert used <= capacity, f"{used} bytes used of {capacity}, all of them pinned"

    def test_usage_falls_to_nothing(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 4)
            assert bench.store.usage[0] == 0
            bench.save(0, hashes)
            assert bench.store.usage[0] == 4 * GROUPS[0].block_bytes
            bench.store.pin(0, hashes, 60.0)
            bench.store.pin(0, chain("unknown", 2), 60.0)
            bench.store.evict(0, hashes)  # a pin is against the store's own choice only
            assert bench.store.usage[0] == 0
            bench.events()

    # -- faults and ends

    def test_a_failed_copy_leaves_nothing_behind(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 2)
            bench.io.broken = True
            transfer = bench.store.save(0, hashes, bench.fill(0, hashes))
            assert transfer is not None and bench.wait(transfer), "a failed save does not say so"
            assert bench.store.lookup(0, hashes) == [False, False], "blocks whose copy failed can be loaded"
            assert bench.store.usage[0] == 0 and bench.store.take_events() == []
            bench.io.broken = False
            bench.save(0, hashes)
            bench.io.broken = True
            assert bench.wait(bench.store.load(0, hashes, bench.take(2))), "a failed load does not say so"
            bench.io.broken = False
            bench.load(0, hashes)

    def test_close_ends_transfers(self) -> None:
        with self._bench() as bench:
            hashes = chain("a", 3)
            bench.save(0, hashes[:HASH_BYTES])
            bench.io.held = True
            running = [
                bench.store.save(0, hashes[HASH_BYTES:], bench.fill(0, hashes[HASH_BYTES:])),
                bench.store.load(0, hashes[:HASH_BYTES], bench.take(1)),
            ]
            bench.io.held = False
            bench.store.close()
            assert all(t is None or t.done() for t in running), "a transfer outlives its store"

    def test_events_tell_what_can_be_loaded(self) -> None:
        """A random life; the index knows the store by its events alone."""
        for seed in range(3):
            with self._bench() as bench:
                bench.live(random.Random(seed), 60)

    def test_simulation(self) -> None:
        """On a virtual clock transfers take the clock's time, and move no data."""
        if self.simulates:
            VirtualClock.run(self._simulate())

    def _bench(self) -> Bench:
        io = ToyIO()
        return Bench(self.build(Context(groups=GROUPS, io=io)), io, self.least, self.most)

    async def _simulate(self) -> None:
        clock = VirtualClock()
        store = self.build(Context(clock=clock, groups=GROUPS))
        hashes = chain("a", 4)
        for verb in ("save", "load"):
            start = store.save if verb == "save" else store.load
            transfer = start(0, hashes, [1, 2, 3, 4])
            assert transfer is not None and not transfer.done(), "a transfer takes no time"
            for _ in range(20):
                await clock.sleep(10 * clock.time() + 1e-6)
                if transfer.done():
                    break
            assert transfer.done() and not transfer.failed()
            assert store.lookup(0, hashes) == [True] * 4
        assert store.take_events() == [("stored", 0, hashes)]
        store.close()
