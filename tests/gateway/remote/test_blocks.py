"""The engine's blocks by our names: any block sizes, tiers, salts; against a model that keeps sets."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.kv.hashing import HASH_BYTES, extend_chain, tenant_key
from bien.core.request import TokenIds
from bien.gateway.remote.blocks import BlockMap
from bien.gateway.remote.wire import Cleared, Removed, Stored, decode

KEY, ALICE = tenant_key(""), tenant_key("alice")


def key_of(salt):
    return {"": KEY, "salt-of-alice": ALICE}.get(salt)


def stored(hashes, parent, tokens, medium="GPU", **more):
    fields = {"adapter": False, "salt": None, "extra": None, "group": 0, "kind": None, "window": None}
    return Stored(hashes, parent, list(tokens), medium=medium, **(fields | more))


def names(tokens, block, key=KEY):
    chain = extend_chain(key, b"", TokenIds.of(tokens), block, len(tokens))
    return [chain[i : i + HASH_BYTES] for i in range(0, len(chain), HASH_BYTES)]


class Held:
    """What an index has, by the events alone."""

    def __init__(self):
        self.parents = {}  # (tier, block) -> parent

    def feed(self, events):
        for event in events:
            blocks = [event.hashes[i : i + HASH_BYTES] for i in range(0, len(event.hashes), HASH_BYTES)]
            parent = event.parent
            if event.op == "cleared":
                self.parents = {key: p for key, p in self.parents.items() if key[0] != event.tier}
            for block in blocks:
                key = event.tier, block
                if event.op == "stored":
                    assert key not in self.parents, "stored twice"
                    self.parents[key] = parent
                    parent = block
                else:
                    del self.parents[key]

    def depth(self, tokens, block, key=KEY, tier="device"):
        """Blocks of a prompt that are there, from its start."""
        parent = b""
        for n, name in enumerate(names(tokens, block, key)):
            if self.parents.get((tier, name)) != parent:
                return n
            parent = name
        return len(tokens) // block


def test_recorded_histories(publisher):
    """What each project's own publisher sent, step by step."""
    blocks, held = BlockMap(4, key_of), Held()
    steps = dict(zip(publisher["what"], (decode(f[-1]) for f in publisher["frames"]), strict=True))
    main, branch = range(100, 116), [*range(100, 108), *range(500, 508)]
    for what, message in steps.items():
        for event in message.events:
            act = {Stored: blocks.store, Removed: blocks.remove, Cleared: blocks.clear}[type(event)]
            held.feed(act(event))
        depths = held.depth(main, 4), held.depth(branch, 4), held.depth(range(100, 108), 4, ALICE)
        expected = {
            "three blocks": (3, 2, 0),
            "a fourth": (4, 4, 0),
            "tokens 100": (4, 4, 2),
            "tokens 900": (4, 4, 2 if len(steps) == 6 else 0),
            "the fourth": (3, 3, 2 if len(steps) == 6 else 0),
            "all cleared": (1, 1, 0),
        }
        assert depths == expected[next(key for key in expected if what.startswith(key))], what
    assert blocks.foreign == 1, "the adapter's"
    assert held.depth(range(900, 904), 4) == 0
    assert held.depth(range(300, 304), 4) == 0, "cleared"


@pytest.mark.parametrize("block", [8, 16, 32, 64])
@pytest.mark.parametrize(("engine", "theirs"), [("vllm-engine", 32), ("dynamo-mocker", 16)])
def test_an_engine_finds_what_its_events_said(recorded, engine, theirs, block):
    """Requests to a real engine: each prompt's prefix that the events before it tell of is what the engine
    says it had cached, up to what blocks of ours that are larger than its own cannot say."""
    blocks, held = BlockMap(block, key_of), Held()
    found = 0
    for step in recorded(engine)["steps"]:
        prompt = step["prompt"][: len(step["prompt"]) - 1]  # its last token is always computed
        depth = held.depth(prompt, block, ALICE if step["salt"] else KEY) * block
        assert depth // theirs * theirs == step["cached"] // max(block, theirs) * max(block, theirs)
        found += depth
        for frame in step["frames"]:
            for event in decode(bytes.fromhex(frame[-1])).events:
                assert isinstance(event, Stored)
                held.feed(blocks.store(event))
    assert found > 2000 and not blocks.orphans and not blocks.foreign


def test_salted_blocks_are_nobody_elses():
    blocks, held = BlockMap(4, key_of), Held()
    tokens = range(8)
    for salt, hashes in (("salt-of-alice", [1, 2]), ("of somebody", [3, 4])):
        held.feed(blocks.store(stored(hashes, None, tokens, extra=[[salt], None])))
    assert held.depth(tokens, 4) == 0, "without a salt nothing is found"
    assert held.depth(tokens, 4, ALICE) == 2
    assert blocks.unknown_salts == {"of somebody"} and blocks.foreign == 2
    held.feed(blocks.store(stored([5], 4, range(8, 12))))
    assert blocks.foreign == 3 and blocks.orphans == 0, "what follows a foreign one is foreign"
    for extra in ([["image", 0]], ["a", "b"], [7]):
        held.feed(blocks.store(stored([6], None, range(4), extra=[extra])))
    held.feed(blocks.store(stored([7], None, range(4), adapter=True)))
    held.feed(blocks.store(stored([8], 2, range(8, 12), extra=[["image", 0]])))
    assert len(held.parents) == 2, "only the two of alice"


def test_a_salt_that_is_learned_later_names_its_blocks():
    known = {"": KEY}
    blocks, held = BlockMap(4, known.get), Held()
    event = stored([1, 2], None, range(8), extra=[["salt-of-alice"], None])
    assert blocks.store(event) == []
    known["salt-of-alice"] = ALICE
    held.feed(blocks.store(event))
    assert held.depth(range(8), 4, ALICE) == 2


def test_orphans_are_counted_and_may_be_told_again():
    blocks, held = BlockMap(4, key_of), Held()
    assert blocks.store(stored([2, 3], 1, range(4, 12))) == []
    assert blocks.orphans == 2
    assert blocks.remove(Removed([2, 9], "GPU", None)) == []
    held.feed(blocks.store(stored([1, 2, 3], None, range(12))))
    assert held.depth(range(12), 4) == 3


def test_tiers_are_told_apart():
    blocks, held = BlockMap(4, key_of), Held()
    held.feed(blocks.store(stored([1, 2], None, range(8))))
    held.feed(blocks.store(stored([1, 2], None, [], medium="CPU")))  # some say no tokens there
    held.feed(blocks.store(stored([5], None, [], medium="CPU")))
    assert blocks.orphans == 1
    held.feed(blocks.remove(Removed([1, 2], "GPU", None)))
    assert held.depth(range(8), 4) == 0 and held.depth(range(8), 4, tier="host") == 2
    held.feed(blocks.store(stored([1], None, range(4), medium="STORAGE")))
    assert held.depth(range(8), 4, tier="disk") == 1
    held.feed(blocks.clear(Cleared("CPU")))
    assert held.depth(range(8), 4, tier="host") == 0 and held.depth(range(8), 4, tier="disk") == 1
    held.feed(blocks.clear(Cleared(None)))
    assert not held.parents and len(blocks) == 0


def _engine_chain(tokens, size):
    """The names that an engine with blocks of `size` gives: any that depend on all before."""
    return [hash((size, *tokens[:end])) for end in range(size, len(tokens) + 1, size)]


@given(st.integers(0, 10**6), st.sampled_from([(4, 4), (4, 16), (16, 4), (8, 12), (12, 8), (6, 4)]))
def test_any_block_sizes_against_a_model(seed, sizes):
    """Random stores and evictions of a few branching prompts, in two tiers: a block of ours is there exactly
    while all blocks of the engine that hold a part of it are."""
    ours, theirs = sizes
    rng = random.Random(seed)
    blocks, held = BlockMap(ours, key_of), Held()
    trunk = [rng.randrange(50) for _ in range(40)]
    prompts = [trunk[: rng.randrange(10, 40)] + [rng.randrange(50) for _ in range(40)] for _ in range(4)]
    there = set()  # (tier, name of the engine)
    for _ in range(40):
        prompt, tier = rng.choice(prompts), rng.choice(["GPU", "GPU", "CPU"])
        chain = _engine_chain(prompt, theirs)
        if rng.random() < 0.6:
            first = rng.randrange(len(chain)) if rng.random() < 0.3 else 0
            last = rng.randrange(first, len(chain)) + 1
            if first and not any((t, chain[first - 1]) in there for t in ("GPU", "CPU")):
                first = 0
            parent = chain[first - 1] if first else None
            event = stored(chain[first:last], parent, prompt[first * theirs : last * theirs], tier)
            held.feed(blocks.store(event))
            there |= {(tier, name) for name in chain[first:last]}
        else:
            gone = rng.sample(chain, rng.randrange(1, len(chain)))
            held.feed(blocks.remove(Removed(gone, tier, None)))
            there -= {(tier, name) for name in gone}
        expected = {}
        for prompt in prompts:
            chain, parent = _engine_chain(prompt, theirs), b""
            for n, name in enumerate(names(prompt, ours)):
                parts = range(n * ours // theirs, ((n + 1) * ours - 1) // theirs + 1)
                for medium, tier_name in (("GPU", "device"), ("CPU", "host")):
                    if all(p < len(chain) and (medium, chain[p]) in there for p in parts):
                        expected[tier_name, name] = parent
                parent = name
        assert held.parents == expected
        again = Held()
        again.feed(blocks.snapshot())
        assert again.parents == expected, "a snapshot says the same"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_block_of_ours_goes_with_any_of_its_parts(cut):
    blocks, held = BlockMap(16, key_of), Held()
    held.feed(blocks.store(stored([1, 2, 3, 4], None, range(16))))
    assert held.depth(range(16), 16) == 1
    held.feed(blocks.remove(Removed([cut], "GPU", None)))
    assert held.depth(range(16), 16) == 0
    parent = cut - 1 or None
    held.feed(blocks.store(stored([cut], parent, range(4 * cut - 4, 4 * cut))))
    assert held.depth(range(16), 16) == 1
