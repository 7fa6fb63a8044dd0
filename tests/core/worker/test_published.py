from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.kv.events import EventBatch, KVEvent
from bien.core.worker.messages import Snapshot, WorkerInfo
from bien.core.worker.published import (
    DecodingError,
    Keys,
    fps_key,
    join_token,
    lease_fields,
    read_batches,
    read_entry,
    read_lease,
    read_snapshot,
    write_entry,
    write_snapshot,
)
from bien.core.worker.redis_url import check_redis_url, masked

INFO = WorkerInfo(
    "main-0", "boot-1", "fp", "model", max_context=99, eos_token_ids=(1, 2), group_kinds=("full", "state"),
    group_windows=(0, 0), snapshot_tokens=(0, 64),
)  # fmt: skip
blocks = st.integers(0, 4).map(lambda n: random.Random(n).randbytes(16 * n))
events = st.lists(
    st.builds(
        KVEvent,
        st.sampled_from(["stored", "removed", "cleared"]),
        st.integers(0, 1),
        st.sampled_from([b"", bytes(16)]),
        blocks,
        st.sampled_from(["device", "host"]),
    ),
    max_size=4,
)


@given(st.lists(events, min_size=1, max_size=5), st.integers(1, 2**40))
def test_entries_come_back_as_they_were(told: list[list[KVEvent]], first: int) -> None:
    batches = [EventBatch("main-0", 0, "boot-1", first + i, e) for i, e in enumerate(told)]
    entry = read_entry(write_entry(batches))
    assert (entry.worker, entry.generation, entry.dp_rank) == ("main-0", "boot-1", 0)
    assert (entry.first, entry.last) == (first, batches[-1].seq)
    assert read_batches(entry, 2) == batches


@given(events)
def test_snapshots_come_back_as_they_were(told: list[KVEvent]) -> None:
    snapshot = Snapshot("boot-1", 7, told)
    assert read_snapshot(write_snapshot(snapshot, "12-3"), 2) == (snapshot, "12-3")


def test_what_is_stored_are_maps_with_a_version() -> None:
    batch = EventBatch("main-0", 0, "boot-1", 1, [KVEvent("stored", hashes=bytes(16))])
    entry = msgspec.msgpack.decode(write_entry([batch]))
    assert entry["v"] == 1 and entry["batches"] == [
        {"seq": 1, "events": [{"op": "stored", "hashes": bytes(16)}]}
    ]
    assert msgspec.msgpack.decode(write_snapshot(Snapshot("boot-1", 7), "0-0"))["v"] == 1
    fields = lease_fields(INFO, "host", 80, 3)
    assert (fields["v"], fields["endpoint"], fields["generation"]) == ("1", "host:80", "boot-1")
    assert msgspec.json.decode(fields["info"])["group_kinds"] == ["full", "state"]


@given(st.binary(max_size=200))
def test_anything_else_is_a_decoding_error(data: bytes) -> None:
    for read in (lambda: read_batches(read_entry(data), 1), lambda: read_snapshot(data, 1)):
        with pytest.raises(DecodingError):
            read()


@given(st.data())
def test_damage_is_a_decoding_error_or_no_damage(draw: st.DataObject) -> None:
    """No byte that is flipped raises anything else."""
    batch = EventBatch("main-0", 0, "boot-1", 1, [KVEvent("stored", 1, bytes(16), bytes(32))])
    data = bytearray(write_entry([batch]))
    data[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    try:
        read_batches(read_entry(bytes(data)), 2)
    except DecodingError:
        pass


@pytest.mark.parametrize(
    "event",
    [
        KVEvent("stolen"),
        KVEvent("stored", 2, b"", bytes(16)),
        KVEvent("stored", -1, b"", bytes(16)),
        KVEvent("stored", 0, b"", bytes(15)),
        KVEvent("stored", 0, bytes(3), bytes(16)),
    ],
)
def test_events_that_no_worker_has_made_are_refused(event: KVEvent) -> None:
    entry = read_entry(write_entry([EventBatch("main-0", 0, "boot-1", 1, [event])]))
    with pytest.raises(DecodingError, match="no worker has made"):
        read_batches(entry, 2)
    with pytest.raises(DecodingError, match="no worker has made"):
        read_snapshot(write_snapshot(Snapshot("boot-1", 1, [event]), "0-0"), 2)


def test_an_entry_that_lies_about_its_batches_is_refused() -> None:
    entry = read_entry(write_entry([EventBatch("main-0", 0, "boot-1", 1)]))
    entry.last = 5
    with pytest.raises(DecodingError, match="other batches than it says"):
        read_batches(entry, 1)


def as_read(fields: dict[str, str]) -> dict[bytes, bytes]:
    return {key.encode(): value.encode() for key, value in fields.items()}


def test_leases_come_back_as_they_were() -> None:
    lease = read_lease(as_read(lease_fields(INFO, "10.0.0.1", 4711, 5)))
    assert lease.info == INFO
    assert (lease.host, lease.port, lease.seqs) == ("10.0.0.1", 4711, (5,))
    older = lease_fields(INFO, "h", 1, 0)
    older["info"] = '{"id": "main-0", "generation": "boot-1", "fp": "fp"}'
    assert read_lease(as_read(older)).info == WorkerInfo("main-0", "boot-1", "fp"), "fields that came later"


@pytest.mark.parametrize("field", ["v", "generation", "endpoint", "seq", "info"])
@pytest.mark.parametrize("value", [None, "", "x", "[]", '{"id": 3}', '{"id": "a"}'])
def test_a_lease_that_is_none_is_a_decoding_error(field: str, value: str | None) -> None:
    fields = lease_fields(INFO, "h", 1, 0)
    if value is None:
        del fields[field]
    else:
        fields[field] = value
    with pytest.raises(DecodingError):
        read_lease(as_read(fields))
    with pytest.raises(DecodingError):
        read_lease({**as_read(lease_fields(INFO, "h", 1, 0)), field.encode(): b"\xff\xfe"})


def stored_info(**changes: object) -> str:
    return msgspec.json.encode(msgspec.structs.asdict(INFO) | changes).decode()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"info": "[" * 60_000}, "RecursionError"),
        ({"info": '{"x":' * 10_000}, "RecursionError"),
        ({"info": "[" * 200_000}, "200000 bytes of info; valid: up to 65536"),
        ({"info": stored_info(dp_ranks=3_000_000)}, "3000000 dp_ranks; valid: 1 to 1024"),
        ({"info": stored_info(dp_ranks=0)}, "0 dp_ranks"),
        ({"info": stored_info(dp_ranks=-(1 << 70))}, "dp_ranks"),
        ({"endpoint": "h:70000"}, "endpoint is h:70000"),
        ({"endpoint": ":80"}, "endpoint is :80"),
        ({"endpoint": "h:" + "9" * 5000}, "cannot be read"),
        ({"seq": "9" * 5000}, "cannot be read"),
    ],
)
def test_a_lease_that_costs_too_much_is_a_decoding_error(changes: dict[str, str], why: str) -> None:
    fields = lease_fields(INFO, "h", 1, 0) | changes
    with pytest.raises(DecodingError, match=why) as caught:
        read_lease(as_read(fields))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("deep", [b"\x91" * 100_000, b"\x81\xa1v" * 100_000])
def test_what_nests_too_deeply_is_a_decoding_error(deep: bytes) -> None:
    entry = read_entry(write_entry([EventBatch("main-0", 0, "boot-1", 1)]))
    with pytest.raises(DecodingError):
        read_entry(deep)
    with pytest.raises(DecodingError):
        read_entry(msgspec.msgpack.encode({"worker": "w", "batches": msgspec.Raw(deep)}))
    with pytest.raises(DecodingError):
        read_snapshot(deep, 1)
    entry.batches = msgspec.Raw(deep)
    with pytest.raises(DecodingError):
        read_batches(entry, 1)


def test_an_entry_that_says_it_is_endless_costs_nothing() -> None:
    entry = read_entry(write_entry([EventBatch("main-0", 0, "boot-1", 1)]))
    entry.last = 1 << 62
    with pytest.raises(DecodingError, match="other batches than it says"):
        read_batches(entry, 1)


def test_all_keys_of_a_fingerprint_lie_in_one_slot() -> None:
    keys = Keys("bien", "f00d")
    assert keys.lease("main-0") == "bien:{f00d}:worker:main-0"
    assert keys.snapshot("main-0") == "bien:{f00d}:snapshot:main-0"
    assert keys.events == "bien:{f00d}:events"
    assert all("{f00d}" in key for key in (keys.workers, keys.events, keys.lease("a"), keys.snapshot("a")))
    assert fps_key("bien") == "bien:fps"


def test_a_token_needs_the_secret() -> None:
    assert join_token("secret", "bien") == join_token("secret", "bien")
    assert len({join_token("secret", "bien"), join_token("secret", "x"), join_token("other", "bien")}) == 3
    assert "secret" not in join_token("secret", "bien")


@pytest.mark.parametrize(
    "url",
    [
        "redis://host", "redis://host:6379/3", "rediss://u:p@host", "valkey://:p@[::1]:6379/0", "unix:///a/b.sock",
        "unix://:pass@/a/b.sock?db=3", "redis://host?db=2&password=p",
    ],
)  # fmt: skip
def test_urls_that_are_some(url: str) -> None:
    check_redis_url(url)


def test_credentials_are_masked() -> None:
    assert (
        masked("at redis://me:secret@host:1/0, and unix://:secret@/a")
        == "at redis://***@host:1/0, and unix://***@/a"
    )
    assert (
        masked("redis://h?db=1&password=secret&ssl_certfile=a")
        == "redis://h?db=1&password=***&ssl_certfile=a"
    )
    assert masked("a?b=c") == "a?b=c", "no URL"
