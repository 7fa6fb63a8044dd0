"""Messages of all known forms, made by the projects' own encoders, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.gateway.remote.wire import Cleared, Message, Removed, Stored, UndecodableError, decode


def messages(publisher) -> list[Message]:
    return [decode(frame[-1]) for frame in publisher["frames"]]


def test_every_form_says_the_same(publisher):
    found = messages(publisher)
    assert all(not m.unknown and m.rank in (0, None) for m in found)
    first = found[0].events[0]
    assert isinstance(first, Stored)
    assert len(first.hashes) == 3 and len(set(first.hashes)) == 3
    assert (first.parent, first.tokens) == (None, list(range(100, 112)))
    assert not first.adapter and first.group == 0 and not first.salt and not first.extra
    fourth, branch = found[1].events
    assert isinstance(fourth, Stored) and isinstance(branch, Stored)
    assert fourth.parent == first.hashes[2] and fourth.tokens == [112, 113, 114, 115]
    assert branch.parent == first.hashes[1] and branch.tokens == list(range(500, 508))
    adapted, gone, last = (m.events for m in found[-3:])
    assert isinstance(adapted[0], Stored) and adapted[0].adapter
    assert all(isinstance(event, Removed) for event in gone)
    assert gone[0].hashes == fourth.hashes and gone[1].hashes == branch.hashes[1:]
    assert [type(event) for event in last] == [Stored, Cleared, Stored]


def test_media_and_salts_where_they_are_told(publisher):
    found = messages(publisher)
    if publisher["name"] == "sglang-arrays":
        assert len(found) == 5, "it knows neither"
        assert found[0].events[0].medium is None
        return
    assert found[0].events[0].medium == "GPU"
    salted = found[2].events[0]
    assert salted.salt == "salt-of-alice" or salted.extra == [["salt-of-alice"], None]


def test_forms_differ_indeed():
    """Else one of them would not be tested."""
    shapes = set()
    for path in sorted((Path(__file__).parent / "recorded").glob("*s.json")):
        [first, *_] = json.loads(path.read_text())["frames"]
        raw = msgspec.msgpack.decode(bytes.fromhex(first[-1]))
        events = raw["events"] if isinstance(raw, dict) else raw[1]
        shapes.add((type(raw), type(events[0])))
    assert shapes == {(list, list), (list, dict), (dict, dict)}


def test_later_arrays_may_be_longer_and_unknown_events_are_named():
    event = ["BlockRemoved", [1], "GPU", 0, "something new"]
    message = decode(msgspec.msgpack.encode([1.0, [event, ["BlockMoved", [1]]], 3]))
    assert message == Message([Removed([1], "GPU", 0)], 3, ["BlockMoved"])


def test_dictionaries_may_hold_new_keys():
    event = {"type": "BlockStored", "block_hashes": [b"x"], "parent_block_hash": None, "token_ids": [1, 2]}
    event |= {"block_size": 2, "brand_new": {"a": 1}, "metadata": {"cache_salt": "s"}}
    [stored] = decode(msgspec.msgpack.encode({"ts": 1, "events": [event]})).events
    assert isinstance(stored, Stored) and stored.salt == "s" and stored.hashes == [b"x"]


STORED = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"block_hashes": "x"}, "block_hashes are 'x'"),
        ({"block_hashes": [1.5, 2]}, "block_hashes"),
        ({"parent_block_hash": "x"}, "parent_block_hash is 'x'"),
        ({"token_ids": [[1, 2], [2, 3]]}, "token_ids are"),
        ({"token_ids": [-1, 2]}, "token_ids are"),
        ({"token_ids": [1, 2, 3]}, "3 token_ids for 2 blocks"),
        ({"extra_keys": [None]}, "extra_keys are [None] for 2 blocks"),
        ({"medium": 3}, "medium is 3"),
        ({"group_idx": "x"}, "group_idx is 'x'"),
        ({"type": 7}, "no type"),
    ],
)
def test_what_is_wrong_is_said(change, text):
    payload = msgspec.msgpack.encode([1.0, [STORED | change]])
    with pytest.raises(UndecodableError) as caught:
        decode(payload)
    assert text in str(caught.value)


@pytest.mark.parametrize("raw", [1, "x", [], [1.0], [1.0, "x"], {"events": 3}, [1.0, [3]], [1.0, [], "r"]])
def test_other_messages_are_none(raw):
    with pytest.raises(UndecodableError):
        decode(msgspec.msgpack.encode(raw))


@given(st.binary(max_size=60), st.integers(0, 400))
def test_no_bytes_raise_anything_else(noise, at):
    event = ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU"]
    whole = msgspec.msgpack.encode([1.0, [event], 0])
    for payload in (noise, whole[: at % len(whole)] + noise):
        try:
            decode(payload)
        except UndecodableError:
            pass
