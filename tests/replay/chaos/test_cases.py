"""Every case can fail: it does when the fault that it is about is planted in the gateway, and not else."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from bien.core.deployment import Selection
from bien.gateway.remote import follow
from bien.gateway.remote.blocks import BlockMap
from bien.gateway.remote.client import RemoteClient
from bien.gateway.remote.follow import Follower
from bien.gateway.remote.load import Load
from bien.gateway.remote.wire import UndecodableError, decode
from bien.gateway.remote.zmq_source import ZmqSource
from bien.gateway.routing import Decision
from bien.gateway.verify import verifier
from bien.plugins.routers.kv_aware import KVAwareRouter
from bien.replay.chaos.gateways import start_process

Put = Callable[..., Any]
Patch = pytest.MonkeyPatch
MEMORY = 6
pytestmark = pytest.mark.usefixtures("small")


def no_restart(patch: Patch) -> None:
    """Numbers that go back are ignored, and so is a connection that broke (llm-d-router#2853)."""

    async def take(self: Follower, item: Any) -> None:
        self._apply(item.payload)

    patch.setattr(Follower, "_take", take)


def no_clear(patch: Patch) -> None:
    patch.setattr(BlockMap, "clear", lambda self, event: [])


def no_gap(patch: Patch) -> None:
    no_restart(patch)


def no_replay(patch: Patch) -> None:
    async def nothing(self: ZmqSource, start: int) -> None:
        return None

    patch.setattr(ZmqSource, "replay", nothing)


def leak(patch: Patch) -> None:
    kept: list[bytes] = []
    apply = Follower._apply

    def keep(self: Follower, payload: bytes, again: bool = False) -> None:
        kept.append(bytes(payload) * 8)
        apply(self, payload, again)

    patch.setattr(Follower, "_apply", keep)


def blind_to_others(patch: Patch) -> None:
    report = Load.report

    def own_only(self: Load, now: float) -> Any:
        self._others = 0, 0
        return report(self, now)

    patch.setattr(Load, "report", own_only)


def hash_of_its_own(patch: Patch) -> None:
    """The engine's names and ours are taken for the same chain under another key."""
    follow_ = BlockMap._follow

    def other(self: BlockMap, before: Any, last: Any, hash: Any, tokens: bytes) -> Any:
        before.key = b"another gateway's key".ljust(32, b".")
        return follow_(self, before, last, hash, tokens)

    patch.setattr(BlockMap, "_follow", other)


def no_cause(patch: Patch) -> None:
    patch.setattr(verifier, "name_cause", lambda evidence: ("unknown", ""))


def one_size(patch: Patch) -> None:
    store = BlockMap.store

    def same(self: BlockMap, event: Any) -> Any:
        fits = len(event.tokens) == self.block_tokens * len(event.hashes)
        return store(self, event) if fits else []

    patch.setattr(BlockMap, "store", same)


def arrays_only(patch: Patch) -> None:
    """Another form is nothing, without a word (vllm#42892's followers)."""

    def old(payload: bytes) -> Any:
        found = decode(payload)
        if b"BlockStored" in payload and b"block_hashes" in payload:
            return found._replace(events=[], unknown=[])
        return found

    def silent(payload: bytes) -> Any:
        try:
            return old(payload)
        except UndecodableError:
            return decode(b"\x93\x00\x90\xc0")

    patch.setattr(follow, "decode", silent)


def no_salt(patch: Patch) -> None:
    patch.setattr(RemoteClient, "_salt", lambda self, request: "")


def no_abort(patch: Patch) -> None:
    patch.setattr(RemoteClient, "abort", lambda self, rid: None)


def first_unknown_ends_it(patch: Patch) -> None:
    """One name that is not known, and the rest of a removal is dropped (dynamo#14652)."""
    remove = BlockMap.remove

    def strict(self: BlockMap, event: Any) -> Any:
        known = next((i for i, h in enumerate(event.hashes) if h not in self._blocks), len(event.hashes))
        return remove(self, event._replace(hashes=event.hashes[:known]))

    patch.setattr(BlockMap, "remove", strict)


def no_load_term(patch: Patch) -> None:
    terms = KVAwareRouter._terms

    def own_cost(self: KVAwareRouter, request: Any, targets: Any) -> Any:
        return [(prefill, loaded, *[0.0] * 6) for prefill, loaded, *_ in terms(self, request, targets)]

    patch.setattr(KVAwareRouter, "_terms", own_cost)


def nothing(patch: Patch) -> None:
    pass


def failures(report: Any) -> str:
    return "; ".join(f"{c.what}: {c.evidence}" for c in report.checks if c.verdict == "fail")


@pytest.mark.parametrize("number", [2, 13, 16])
async def test_it_passes_as_it_is(put: Put, number: int, monkeypatch: Patch) -> None:
    fleet_less(monkeypatch)
    report = await put(number)
    assert report.verdict == "pass", failures(report)


@pytest.mark.parametrize(("number", "plant"), [(2, no_clear), (13, no_salt), (16, first_unknown_ends_it)])
async def test_a_planted_fault_is_seen(put: Put, number: int, plant: Any, monkeypatch: Patch) -> None:
    fleet_less(monkeypatch)
    plant(monkeypatch)
    report = await put(number)
    assert report.verdict == "fail", report.checks


async def test_hits_of_a_balancer_are_luck(put: Put, monkeypatch: Patch) -> None:
    fleet_less(monkeypatch)
    report = await put(15, router=Selection("round-robin"))
    assert report.verdict == "fail" and "by chance 33%" in failures(report)
    assert report.checks[0].verdict == "pass", "prompts were absent before"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 18))
async def test_all_pass_as_they_are(put: Put, number: int) -> None:
    # Memory is that of a gateway alone only where it has a process of its own.
    report = await put(number, start=start_process) if number == MEMORY else await put(number)
    assert report.verdict == "pass", failures(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "plant", "fields"),
    [
        (1, no_restart, {}),
        (3, nothing, {"index": {"lease_seconds": 600.0}}),
        (4, no_gap, {}),
        (5, no_replay, {}),
        (7, no_load_term, {}),
        (8, blind_to_others, {}),
        (9, hash_of_its_own, {}),
        (10, no_cause, {}),
        (11, one_size, {}),
        (12, arrays_only, {}),
        (14, no_abort, {}),
        (17, nothing, {"router": Selection("round-robin")}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_other_planted_faults(
    put: Put, number: int, plant: Any, fields: dict[str, Any], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    report = await put(number, **fields)
    assert report.verdict == "fail", report.checks


@pytest.mark.slow
async def test_an_engine_that_had_no_core_for_a_while_is_no_hot_spot(put: Put, monkeypatch: Patch) -> None:
    """A router that avoids it as long as it looks slow, and not for ever."""
    fleet_less(monkeypatch)
    choose, calls = KVAwareRouter.choose, itertools.count()

    def avoiding(self: KVAwareRouter, request: Any, targets: Any) -> Any:
        return Decision(0, 0) if next(calls) < 26 else choose(self, request, targets)

    monkeypatch.setattr(KVAwareRouter, "choose", avoiding)
    report = await put(7)
    assert report.verdict == "pass", failures(report)
    assert "at try 2 of 2" in report.checks[0].evidence


@pytest.mark.slow
async def test_a_leak_is_seen(put: Put, monkeypatch: Patch) -> None:
    leak(monkeypatch)
    report = await put(MEMORY)
    found = re.search(r"(\d+) bytes each", report.checks[0].evidence)
    assert report.verdict == "fail" and found and int(found[1]) > 400, "more than this process's own noise"


def fleet_less(patch: Patch) -> None:
    """Without real workers: their parts say that they do not apply."""
    from bien.replay.chaos.case import NotApplicable
    from bien.replay.chaos.world import World

    async def none(self: World) -> None:
        raise NotApplicable("not here")

    patch.setattr(World, "fleet", none)
