"""The compiled table and Python's, against a model that keeps sets and looks at every block."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from bien.core.errors import ResourceError, UserError
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.kv.hashing import HASH_BYTES
from bien.core.kv.prefix import groups_from, usable_from_counts
from bien.core.providers import Context
from bien.core.worker.messages import WorkerInfo
from bien.gateway.index import TieredIndex
from bien.gateway.testing.index import HandClock, Teller, make_chain
from bien.plugins.indexes._mirror import native
from bien.plugins.indexes._mirror.engine import MAX_PREDICTIONS
from bien.plugins.indexes._mirror.native.library import library
from bien.plugins.indexes._mirror.table import make_table
from bien.plugins.indexes.memory import MemoryConfig, MemoryIndex, _build

BLOCK = 4
TIERS = ("device", "host", "disk")
Rank = tuple[str, int]


class Model:
    """What the contract says, with nothing made fast."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.held: set[tuple[int, str, bytes]] = set()
        self.coming: list[tuple[bytes, float]] = []

    def feed(self, events: list[KVEvent]) -> None:
        for event in events:
            keys = {(event.group, event.tier, block) for block in split(event.hashes)}
            if event.op == "stored":
                self.held |= keys
            elif event.op == "removed":
                self.held -= keys
            else:
                self.held = {key for key in self.held if key[1] != event.tier}
        kinds = self.info.group_kinds
        witness = next((g for g, kind in enumerate(kinds) if kind == "full"), 0)
        there = {block for group, tier, block in self.held if (group, tier) == (witness, self.info.tiers[0])}
        self.coming = [c for c in self.coming if c[0][-HASH_BYTES:] not in there]

    def usable(self, chain: list[bytes], tiers: tuple[str, ...]) -> int:
        info = self.info
        there = {(group, block) for group, tier, block in self.held if tier in tiers}
        have = [
            [i for i, block in enumerate(chain) if (g, block) in there] for g in range(len(info.group_kinds))
        ]
        return usable_from_counts(
            groups_from(info.group_kinds, info.group_windows, info.block_tokens), have, len(chain)
        )

    def reach(self, chain: list[bytes], now: float) -> tuple[int, int]:
        near = first = self.usable(chain, self.info.tiers[:1])
        for hashes, expires in self.coming if first < len(chain) else ():
            coming = split(hashes)
            same = sum(
                1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(coming, chain, strict=False))
            )
            if expires > now and same > first:
                near = max(near, same if same == len(coming) else self.snapshot(same))
        return near, max(near, self.usable(chain, TIERS)) - near

    def snapshot(self, shared: int) -> int:
        """States of a prompt on its way: where all groups take regular ones."""
        every = [
            tokens // self.info.block_tokens
            for kind, tokens in zip(self.info.group_kinds, self.info.snapshot_tokens, strict=True)
            if kind == "state"
        ]
        if 0 in every:
            return 0
        return max(p for p in range(shared + 1) if all(p % each == 0 for each in every))


class Fleet:
    """Random events of a few workers, told to both indexes and to models."""

    def __init__(self, rng: random.Random, blocks: int) -> None:
        self.rng = rng
        self.clock = HandClock()
        self.indexes = [MemoryIndex(self.clock, "native"), MemoryIndex(self.clock, "python")]
        self.models: dict[Rank, Model] = {}
        self.seqs: dict[Rank, int] = {}
        self.names = [rng.randbytes(HASH_BYTES) for _ in range(blocks)]
        # A tree: mostly of long runs.
        self.parents = [-1] + [
            i - 1 if rng.random() < 0.85 else rng.randrange(-1, i) for i in range(1, blocks)
        ]

    def path(self, end: int) -> list[bytes]:
        out = []
        while end >= 0:
            out.append(self.names[end])
            end = self.parents[end]
        return out[::-1]

    def join(self) -> None:
        rng = self.rng
        kinds = tuple(rng.choice(["full", "full", "window", "state"]) for _ in range(rng.randint(1, 3)))
        info = WorkerInfo(
            f"w{rng.randrange(4)}",
            f"g{rng.randrange(100)}",
            "fp",
            dp_ranks=rng.randint(1, 2),
            block_tokens=BLOCK,
            group_kinds=kinds,
            group_windows=tuple(rng.randint(1, 14) if kind == "window" else 0 for kind in kinds),
            snapshot_tokens=tuple(rng.choice([0, 8, 12]) if kind == "state" else 0 for kind in kinds),
            tiers=TIERS[: rng.randint(1, 3)],
        )
        self.leave(info.id)
        for index in self.indexes:
            index.join(info)
        for rank in range(info.dp_ranks):
            self.models[info.id, rank] = Model(info)
            self.seqs[info.id, rank] = 0

    def leave(self, worker: str) -> None:
        for index in self.indexes:
            index.leave(worker)
        for at in [at for at in self.models if at[0] == worker]:
            del self.models[at]

    def event(self, model: Model) -> KVEvent:
        rng = self.rng
        group = rng.randrange(len(model.info.group_kinds))
        tier = rng.choice(model.info.tiers)
        if rng.random() < 0.03:
            return KVEvent("cleared", 0, b"", b"", tier)
        way = self.path(rng.randrange(len(self.names)))
        first = rng.randrange(len(way)) if rng.random() < 0.7 else 0
        some = way[first : rng.randint(first + 1, len(way))]
        if rng.random() < 0.6:
            parent = way[first - 1] if first and tier == "device" else b""
            return KVEvent("stored", group, parent, b"".join(some), tier)
        if rng.random() < 0.3:
            rng.shuffle(some)
        return KVEvent("removed", group, b"", b"".join(some), tier)

    def step(self) -> None:
        rng = self.rng
        if not self.models or rng.random() < 0.04:
            return self.join()
        at = rng.choice(sorted(self.models))
        model, dice = self.models[at], rng.random()
        if dice < 0.02:
            return self.leave(at[0])
        if dice < 0.2:
            hashes = b"".join(self.path(rng.randrange(len(self.names))))
            known = [c[0] for c in model.coming]
            if known and rng.random() < 0.4:
                hashes = rng.choice(known)
                # That which would last longest: then it is no matter who has dropped what is over.
                del model.coming[max((c[1], i) for i, c in enumerate(model.coming) if c[0] == hashes)[1]]
                ttl = 0.0
            else:
                ttl = rng.choice([0.5, 5.0])
                model.coming.append((hashes, self.clock.now + ttl))
            for index in self.indexes:
                index.predict(*at, hashes, ttl)
            return None
        self.clock.now += rng.choice([0.0, 0.1])
        events = [self.event(model) for _ in range(rng.randint(1, 3))]
        generation = model.info.generation
        if dice < 0.24:  # a snapshot, and perhaps of another life
            model.held = set()
            if rng.random() < 0.5:
                generation += "'"
                model.coming = []
                model.info = structs_replace(model.info, generation)
            self.seqs[at] = rng.randint(0, 9)
            for index in self.indexes:
                index.reset(*at, generation, self.seqs[at], events)
        else:
            self.seqs[at] += 1
            for index in self.indexes:
                assert index.apply(EventBatch(*at, generation, self.seqs[at], events))
        model.feed(events)
        return None

    def check(self) -> None:
        way = self.path(self.rng.randrange(len(self.names)))
        if self.rng.random() < 0.3:
            way = way[: self.rng.randint(0, len(way))] + [self.rng.randbytes(HASH_BYTES) for _ in range(2)]
        targets = [*sorted(self.models), ("stranger", 0)]
        expected = [self.models[at].reach(way, self.clock.now) for at in targets[:-1]] + [(0, 0)]
        for index in self.indexes:
            near = index.overlaps(b"".join(way), targets)
            far = index.loadable(b"".join(way), targets)
            assert list(zip(near, far, strict=True)) == expected, index.table
        held = {(at, *key) for at, model in self.models.items() for key in model.held}
        assert self.indexes[0].size[:2] == (len({key[-1] for key in held}), len(held))


def structs_replace(info: WorkerInfo, generation: str) -> WorkerInfo:
    import msgspec

    return msgspec.structs.replace(info, generation=generation)


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


@given(st.integers(0, 2**32), st.integers(4, 40))
def test_both_say_what_the_model_says(seed: int, blocks: int) -> None:
    fleet = Fleet(random.Random(seed), blocks)
    for _ in range(40):
        fleet.step()
        fleet.check()
    for index in fleet.indexes:
        index.close()
    assert fleet.indexes[0].size == fleet.indexes[0].size._replace(blocks=0, holdings=0)


@pytest.mark.parametrize("seed", range(2))
def test_numbers_are_used_again(seed: int) -> None:
    """Thousands of blocks come and go: tables grow, freed numbers are found again."""
    rng = random.Random(seed)
    index = MemoryIndex(HandClock(), "native")
    infos = [WorkerInfo(name, "1", "fp", block_tokens=BLOCK) for name in "abc"]
    held: dict[str, set[bytes]] = {info.id: set() for info in infos}
    seqs = dict.fromkeys(held, 0)
    for info in infos:
        index.join(info)
    chains = [[rng.randbytes(HASH_BYTES) for _ in range(rng.randint(1, 200))] for _ in range(150)]
    peak = 0
    for step in range(2000):
        name, chain = rng.choice("abc"), rng.choice(chains)
        first = rng.randrange(len(chain))
        some = chain[first : rng.randint(first + 1, len(chain))]
        store = rng.random() < (0.7 if step % 400 < 200 else 0.25)
        if rng.random() < 0.2:
            rng.shuffle(some)
        seqs[name] += 1
        event = KVEvent("stored" if store else "removed", 0, b"", b"".join(some))
        assert index.apply(EventBatch(name, 0, "1", seqs[name], [event]))
        held[name] = held[name] | set(some) if store else held[name] - set(some)
        peak = max(peak, index.size.blocks)
        chain = rng.choice(chains)
        depths = [next((i for i, b in enumerate(chain) if b not in held[w]), len(chain)) for w in "abc"]
        assert index.overlaps(b"".join(chain), [(w, 0) for w in "abc"]) == depths
    assert index.size.blocks == len(set().union(*held.values()))
    most = index.size.bytes
    assert most < 48 * peak
    index.leave("a")
    assert index.size[:2] == (len(held["b"] | held["c"]), len(held["b"]) + len(held["c"]))
    index.close()
    assert index.size.bytes < most / 20, "memory is given back"


def test_sets_of_holders_leave_nothing_behind() -> None:
    index = MemoryIndex(HandClock(), "native")
    tellers = []
    for name in "abcdef":
        index.join(WorkerInfo(name, "1", "fp", block_tokens=BLOCK))
        tellers.append(Teller(index, name))
    blocks = make_chain("x", 2)
    for n in range(2000):
        for bit, teller in enumerate(tellers[:5]):
            (teller.stored if n >> bit & 1 else teller.removed)(blocks)
        tellers[5].stored(blocks[:1])
    assert index.size.bytes < 8000


def test_workers_leave_nothing_behind() -> None:
    index = MemoryIndex(HandClock(), "native")
    for n in range(1000):
        index.join(WorkerInfo(f"w{n}", "1", "fp", block_tokens=BLOCK))
        assert Teller(index, f"w{n}").stored(make_chain("x", 3))
        if n >= 2:
            index.leave(f"w{n - 2}")
    assert index.size[:2] == (3, 6) and index.size.bytes < 8000


def test_blocks_are_compared_whole() -> None:
    """Two that the table of hashes cannot tell apart: both halves that it uses are equal."""
    rng = np.random.default_rng(3)
    hashes = rng.integers(0, 2**64, (1 << 21, 2), np.uint64)
    keys = mixed(hashes[:, 0], hashes[:, 1])
    keys = keys & np.uint64(0xFFFFFFFF) | keys >> np.uint64(58) << np.uint64(32)
    order = np.argsort(keys)
    (twins,) = np.nonzero(keys[order[1:]] == keys[order[:-1]])
    assert len(twins), "none among two million: take another seed"
    one, other = (hashes[order[twins[0] + i]].tobytes() for i in (0, 1))
    assert one != other
    index = MemoryIndex(HandClock(), "native")
    index.join(WorkerInfo("w", "1", "fp", block_tokens=BLOCK))
    assert index.apply(EventBatch("w", 0, "1", 1, [KVEvent("stored", hashes=one)]))
    assert index.overlaps(other, [("w", 0)]) == [0]
    assert index.apply(EventBatch("w", 0, "1", 2, [KVEvent("stored", hashes=other)]))
    assert index.size.blocks == 2
    assert index.apply(EventBatch("w", 0, "1", 3, [KVEvent("removed", hashes=one)]))
    assert index.overlaps(one, [("w", 0)]) == [0] and index.overlaps(other, [("w", 0)]) == [1]


def mixed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """`Hash::mixed`."""
    big = np.uint64
    half, first, second = big(32), big(0x9E3779B97F4A7C15), big(0xD6E8FEB86659FD93)
    x = ((low ^ big(0x2D358DCCAA6C78A5)) * first) ^ ((high + big(0x8BB84B93962EACC9)) * second)
    x = (x ^ x >> half) * second
    x = (x ^ x >> half) * first
    return x ^ x >> big(29)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("table", ["native", "python"])
def test_what_is_taken_back_is_no_prediction_that_is_over(table: str, looks: bool) -> None:
    """Whether or not somebody has looked, and so dropped it, before."""
    clock = HandClock()
    index = MemoryIndex(clock, table)  # type: ignore[arg-type]
    index.join(WorkerInfo("w", "1", "fp", block_tokens=BLOCK))
    chain = b"".join(make_chain("x", 3))
    place = [("w", 0)]
    for ttls in ((0.5, 5.0), (0.5, 5.0, 5.0), (5.0, 9.0)):  # one of them is taken back after a second
        for ttl in ttls:
            index.predict("w", 0, chain, ttl)
        clock.now += 1.0
        if looks:
            index.overlaps(chain, place)
        index.predict("w", 0, chain, 0.0)
        left = sorted(ttls)[:-1]
        assert index.overlaps(chain, place) == [3 if left[-1] > 1.0 else 0]
        clock.now += left[-1]
        assert index.overlaps(chain, place) == [0]
        clock.now += 100.0
    index.close()


@pytest.mark.parametrize("table", ["native", "python"])
def test_the_oldest_predictions_go_first(table: str) -> None:
    index = MemoryIndex(HandClock(), table)  # type: ignore[arg-type]
    index.join(WorkerInfo("w", "1", "fp", block_tokens=BLOCK))
    chains = [n.to_bytes(HASH_BYTES, "big") for n in range(MAX_PREDICTIONS + 1)]
    for chain in chains:
        index.predict("w", 0, chain, 9.0)
    assert [index.overlaps(c, [("w", 0)])[0] for c in (chains[0], chains[1], chains[-1])] == [0, 1, 1]


def test_a_prompt_may_take_a_place_twice_or_not_at_all() -> None:
    index = MemoryIndex(HandClock(), "native")
    assert index.overlaps(b"x" * 16, []) == [] and index.loadable(b"x" * 16, []) == []
    index.join(WorkerInfo("w", "1", "fp", block_tokens=BLOCK))
    assert index.apply(EventBatch("w", 0, "1", 1, [KVEvent("stored", hashes=b"x" * 16)]))
    assert index.overlaps(b"x" * 16, [("w", 0), ("v", 0), ("w", 0)]) == [1, 0, 1]
    assert index.overlaps(b"", [("w", 0)]) == [0]


def test_events_that_make_no_sense_are_refused() -> None:
    index = MemoryIndex(HandClock(), "native")
    index.join(WorkerInfo("w", "1", "fp", block_tokens=BLOCK))
    for event in (KVEvent("stored", 1, b"", b"x" * 16), KVEvent("removed", -1, b"", b"x" * 16)):
        with pytest.raises(IndexError, match=f"group {event.group} of an engine with 1"):
            index.apply(EventBatch("w", 0, "1", 1, [event]))
    with pytest.raises(ValueError, match="17 bytes"):
        index.apply(EventBatch("w", 0, "1", 1, [KVEvent("stored", 0, b"", b"x" * 17)]))
    many = ("full",) * 65
    with pytest.raises(UserError, match="65 KV groups; the compiled index takes 64"):
        index.join(
            WorkerInfo("v", "1", "fp", group_kinds=many, group_windows=(0,) * 65, snapshot_tokens=(0,) * 65)
        )


def test_without_a_compiler_it_is_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library()
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("BIEN_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "library", library.__wrapped__)
    with caplog.at_level(logging.WARNING):
        assert make_table("auto").kind == "python"
    assert "the index keeps its blocks in Python" in caplog.text and "/nonexistent" in caplog.text
    with pytest.raises(
        ResourceError, match=r"the index's functions are compiled at first use.*table = \"python\""
    ):
        make_table("native")


def test_sources_that_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such thing' >&2; exit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("BIEN_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "library", library.__wrapped__)
    with pytest.raises(UserError, match="no such thing") as caught:
        make_table("native")
    assert caught.value.field == "gateway.kv_index.table"
    assert make_table("auto").kind == "python"


@pytest.mark.parametrize("table", ["native", "python"])
def test_it_says_what_it_is_and_how_large(table: str) -> None:
    registry = CollectorRegistry()
    index = _build(MemoryConfig(table), Context(clock=HandClock(), metrics=registry))  # type: ignore[arg-type]
    assert isinstance(index, TieredIndex)
    for name in "ab":
        index.join(WorkerInfo(name, "1", "fp", block_tokens=BLOCK))
        assert index.apply(EventBatch(name, 0, "1", 1, [KVEvent("stored", hashes=bytes(range(64)))]))
    assert registry.get_sample_value("bien_index_table", {"kind": table}) == 1
    assert registry.get_sample_value("bien_index_held_blocks") == 8
    assert registry.get_sample_value("bien_index_blocks") == (4 if table == "native" else 8)
    assert (registry.get_sample_value("bien_index_bytes") or 0) > 0 or table == "python"
