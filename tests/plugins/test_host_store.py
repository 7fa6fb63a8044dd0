from __future__ import annotations

import msgspec
import pytest

from bien.core.clock import VirtualClock, WallClock
from bien.core.errors import DeploymentError
from bien.core.providers import Context
from bien.core.testing.harness import Harness, toy_groups
from bien.core.testing.kv_bench import GROUPS, Bench, ToyIO, chain, split
from bien.core.testing.kv_store import KVStoreSuite
from bien.plugins.kv_stores.host import HostConfig, HostStore, bien_providers, make
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig


class TestHostStore(KVStoreSuite):
    def build(self, ctx):
        return make(HostConfig(capacity_blocks=8), ctx)


class TestHostStoreWithTwoWorkers(KVStoreSuite):
    def build(self, ctx):
        return make(HostConfig(capacity_bytes=320, workers=2), ctx)


def bench(**config) -> Bench:
    io = ToyIO()
    return Bench(make(HostConfig(**config), Context(groups=GROUPS, io=io)), io, 0, 1 << 40)


def there(b: Bench, *names: str) -> str:
    return "".join(str(sum(b.store.lookup(0, chain(n, 3)))) for n in names)


def test_the_least_recently_used_goes_first_and_of_a_chain_its_end():
    with bench(capacity_bytes=9 * 32) as b:
        for name in "abc":
            b.save(0, chain(name, 3))
        b.load(0, chain("a", 3))
        b.save(0, chain("d", 2))
        assert there(b, *"abcd") == "3132"
        assert b.store.lookup(0, chain("b", 3)) == [True, False, False]


def test_saving_what_is_there_renews_it():
    with bench(capacity_bytes=6 * 32) as b:
        b.save(0, chain("a", 3))
        b.save(0, chain("b", 3))
        longer = chain("a", 5)
        b.save(0, longer)
        assert b.store.lookup(0, longer) == [True] * 5
        assert there(b, "b") == "1"


def test_pinned_blocks_stay_until_their_time_is_up():
    async def main():
        clock = VirtualClock()
        store = make(HostConfig(capacity_bytes=3 * 32), Context(groups=GROUPS, clock=clock))
        saved = store.save(0, chain("a", 3), [1, 2, 3])
        store.pin(0, chain("a", 2), 5.0)  # while it is being saved
        await clock.sleep(1.0)
        assert saved.done()
        second = store.save(0, chain("b", 3), [4, 5, 6])
        await clock.sleep(1.0)
        assert second.done()
        assert store.lookup(0, chain("a", 3)) == [True, True, False]
        assert store.lookup(0, chain("b", 3)) == [True, False, False]  # one fits: the first of the chain
        assert store.save(0, chain("c", 1) * 0, []) is None
        store.pin(0, chain("b", 1), 60.0)
        assert store.save(0, chain("c", 1), [7]) is None  # no room at all
        await clock.sleep(5.0)
        assert store.save(0, chain("c", 1), [7]) is not None
        store.close()

    VirtualClock.run(main())


def test_simulated_transfers_queue_for_the_lane():
    async def main():
        clock = VirtualClock()
        config = HostConfig(capacity_blocks=100, bandwidth_bytes_per_s=32.0)
        store = make(config, Context(groups=GROUPS, clock=clock))
        first = store.save(0, chain("a", 2), [1, 2])  # 64 bytes: two seconds
        second = store.save(0, chain("b", 1), [3])
        await clock.sleep(1.9)
        assert not first.done()
        await clock.sleep(0.2)
        assert first.done() and not second.done()
        await clock.sleep(1.0)
        assert second.done()
        store.close()

    VirtualClock.run(main())


def test_closing_a_simulation_ends_its_transfers():
    async def main():
        store = make(HostConfig(), Context(groups=GROUPS, clock=VirtualClock()))
        running = store.save(0, chain("a", 2), [1, 2])
        store.close()
        assert running.done() and running.failed() and store.usage[0] == 0

    VirtualClock.run(main())


def test_capacity():
    def capacity(config, groups=GROUPS):
        return make(config, Context(groups=groups, io=ToyIO())).usage[1]

    assert capacity(HostConfig()) == 1 << 30
    assert capacity(HostConfig(capacity_bytes=77)) == 77
    assert capacity(HostConfig(capacity_blocks=10)) == 10 * (32 + 32)
    assert capacity(HostConfig(capacity_blocks=10), GROUPS[2:]) == 10 * 32
    with pytest.raises(DeploymentError, match="capacity_bytes = 1 and capacity_blocks = 2; valid: one"):
        capacity(HostConfig(capacity_bytes=1, capacity_blocks=2))
    with pytest.raises(DeploymentError, match="needs an executor"):
        make(HostConfig(), Context(groups=GROUPS))


@pytest.mark.parametrize(
    "raw", [{"workers": 0}, {"capacity_bytes": -1}, {"bandwidth_bytes_per_s": 0}, {"capacity": 1}]
)
def test_parameters_are_strict(raw):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, HostConfig)


def test_the_provider_says_what_it_is():
    (provider,) = bien_providers()
    assert (provider.kind, provider.name, provider.config_type) == ("kv_store", "host", HostConfig)
    store = provider.factory(HostConfig(), Context(groups=GROUPS, io=ToyIO()))
    assert isinstance(store, HostStore) and store.lookup(0, chain("a", 1)) == [False]
    assert len(split(chain("a", 2))) == 2
    store.close()


@pytest.mark.parametrize("kinds", ["full", "full+window+state"])
def test_an_engine_gets_blocks_back_without_computing_them(kinds):
    groups = toy_groups(kinds)

    stores = []

    def store(executor):
        stores.append(make(HostConfig(capacity_blocks=64), Context(groups=groups, io=executor.io)))
        return stores[0]

    harness = Harness(Fcfs(FcfsConfig()), groups=groups, blocks=16, slots=2, store=store)
    first = [i % 50 for i in range(40)]
    harness.submit("first", first)
    harness.run()
    for i in range(3):  # push it off the device
        harness.submit(f"other{i}", [(7 * i + j) % 50 for j in range(1, 41)])
        harness.run()
    for _ in range(10_000):  # nobody waits for saves; this test does
        if stores[0].usage[0] and not stores[0]._saving:
            break
        WallClock().block(0.001)
    on_device = {h for e in harness.cache.snapshot() for h in split(e.hashes)}
    told = [e for e in harness.events if e.op == "stored"]
    assert not on_device & set(split(told[0].hashes)), "still there: this test would prove nothing"
    again = first + harness.tokens["first"][:6]
    harness.submit("again", again)
    harness.run()
    for id, prompt in (("first", first), ("again", again)):
        harness.expect(id, prompt)
    assert harness.cached["again"] == 44
    assert {e.tier for e in harness.events} == {"device", "host"}
    harness.engine.close()
