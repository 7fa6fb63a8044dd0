"""The index is made to lie in each of six ways; the cause that is named must be the one, and when the lying
is over it must be believed again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from bien.core.clock import VirtualClock
from bien.gateway.verify.canary import Sighting
from bien.gateway.verify.diagnosis import Evidence, name_cause
from bien.gateway.verify.options import VerifyOptions
from bien.gateway.verify.standing import Mode, Standing
from bien.gateway.verify.verifier import Verifier
from bien.gateway.verify.window import Comparison, Space
from tests.gateway.verify import engines as e
from tests.gateway.verify.traffic import make, run

CLOCK = VirtualClock()
BLOCK = e.BLOCK
IDS = ("w0", "w1", "w2")


class Lie(NamedTuple):
    cause: str
    worker: Callable[[str], e.Cacher]
    index: Callable[[], e.Believes | None] = lambda: None
    at_once: bool = True  # whether a worker that has just joined shows it, and it matters to any request


LIES = {
    "another hash": Lie("hash", e.OtherHash),
    "blocks in multiples": Lie("block size", e.LargerBlocks),
    "blocks of twice the size": Lie("block size", lambda id: e.OtherBlocks(id, 2 * e.BLOCK)),
    "blocks of three times the size": Lie("block size", lambda id: e.OtherBlocks(id, 3 * e.BLOCK)),
    "blocks larger than most prompts": Lie("block size", lambda id: e.OtherBlocks(id, 16 * e.BLOCK)),
    "blocks of half the size": Lie("block size", lambda id: e.OtherBlocks(id, e.BLOCK // 2)),
    "tokens in front": Lie("template", lambda id: e.Inserts(id, at=0)),
    "tokens inside, not counted": Lie("template", lambda id: e.Inserts(id, counts=False)),
    "tokens replaced": Lie("template", lambda id: e.Inserts(id, replace=True)),
    "a tenant that never hits": Lie("salt", lambda id: e.KeepsNames(id, ("b",)), at_once=False),
    "no tenant ever hits": Lie("salt", lambda id: e.KeepsNames(id, ()), at_once=False),
    "a tenant by other names": Lie("salt", lambda id: e.OtherSalt(id, ("b",), False), at_once=False),
    "all tenants by other names": Lie("salt", lambda id: e.OtherSalt(id, (), False), at_once=False),
    "no events": Lie("staleness", e.Silent),
    "late events": Lie("staleness", lambda id: e.Silent(id, 90.0)),
    "lost events": Lie("staleness", e.Lossy, e.Believes, at_once=False),
    "events not taken": Lie("staleness", e.Cacher, lambda: e.Believes(deaf=True)),
    "restarts missed": Lie("staleness", e.Restarts, e.Believes, at_once=False),
    "silent evictions": Lie("eviction", lambda id: e.Forgetful(id, 250), at_once=False),
    "removals not taken": Lie(
        "eviction", lambda id: e.Cacher(id, 250), lambda: e.Believes(removals=False), at_once=False
    ),
}
ONE_EACH = ("another hash", "blocks in multiples", "tokens in front", "a tenant that never hits")
ONE_EACH += ("late events", "silent evictions")


@pytest.mark.parametrize("name", LIES)
def test_the_cause_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    lie = LIES[name]

    async def main() -> None:
        gateway = make([lie.worker(id) for id in IDS], VerifyOptions(canary=False), lie.index())
        await run(gateway, 60)
        standings = fallen(gateway.verifier)
        assert standings
        assert {standing.cause for standing in standings} == {lie.cause}
        assert all(standing.why for standing in standings)
        await gateway.close()

    with caplog.at_level(logging.WARNING, "bien.verify"):
        VirtualClock.run(main())
    assert f": {lie.cause}: " in caplog.text
    assert len(caplog.records) <= 8 * len(IDS)  # of 480 requests: once per change, and changes get rarer


@pytest.mark.parametrize("name", LIES)
def test_a_canary_shows_it_before_any_request(name: str) -> None:
    lie = LIES[name]

    async def main() -> None:
        gateway = make([lie.worker(id) for id in IDS], VerifyOptions(), lie.index())
        verifier = gateway.verifier
        assert verifier is not None
        await verifier.greeted(100.0)
        causes = [standing.cause for standing in verifier.standings.values()]
        assert causes == [lie.cause if lie.at_once else ""] * len(IDS)
        assert {verifier.mode(id) for id in IDS} == {Mode.APPROXIMATE if lie.at_once else Mode.PRECISE}
        assert gateway.totals.started == gateway.totals.prompt_tokens == 0  # users' only
        assert gateway.totals.finished == {}
        await gateway.close()

    VirtualClock.run(main())


ODD = {
    **{f"{n} blocks less": (lambda id, n=n: e.Finds(id, n)) for n in (2, 3, 4, 8, 12)},
    "half": lambda id: e.Finds(id, share=0.5),
    "a third": lambda id: e.Finds(id, share=0.34),
    "six blocks more": lambda id: e.Finds(id, -6),
}


@pytest.mark.parametrize("canary", [True, False])
@pytest.mark.parametrize("tenants", [("",), ("", "a", "b", "c")], ids=["alone", "tenants"])
@pytest.mark.parametrize("name", ODD)
def test_an_engine_that_finds_something_else_is_no_fault_of_an_index(
    name: str, tenants: tuple[str, ...], canary: bool
) -> None:
    async def main() -> None:
        gateway = make([ODD[name](id) for id in IDS], VerifyOptions(canary=canary))
        await run(gateway, 24, tenants=tenants)
        standings = fallen(gateway.verifier)
        assert standings or ("more" in name and not canary)  # which is excused: it costs nobody anything
        assert {standing.cause for standing in standings} <= {"engine"}
        assert all("has just computed the engine finds" in standing.why for standing in standings)
        await gateway.close()

    VirtualClock.run(main())


@pytest.mark.parametrize(("wrong", "cause"), [(0, "salt"), (1, "salt"), (2, "staleness"), (8, "staleness")])
def test_it_is_no_salt_where_requests_without_one_are_wrong(wrong: int, cause: str) -> None:
    """Names that are wrong by chance make one probe wrong and another one right."""
    plain, other = Space(b"p", False), Space(b"t", True)
    sent = [Comparison(0.0, 0, 40, -40 if i < wrong else 0, 50, 50, plain) for i in range(8)]
    sent += [Comparison(0.0, 0, 40, -40, 50, 50, other)] * 8
    right = Sighting(31, BLOCK, 0, 28, 31, 28, 7, 0, 0)
    spaced = right._replace(claimed=4)
    assert name_cause(Evidence(BLOCK, sent, plain=[right], spaced=spaced))[0] == cause


def test_one_probe_that_is_wrong_is_no_salt_either() -> None:
    right = Sighting(31, BLOCK, 0, 28, 31, 28, 7, 0, 0)
    for plain in ([right._replace(second=8)], [right._replace(second=8), right]):
        assert name_cause(Evidence(BLOCK, plain=plain, spaced=right._replace(second=8)))[0] != "salt"


@pytest.mark.parametrize("name", ONE_EACH)
def test_an_index_that_is_right_again_is_believed_again(name: str) -> None:
    lie = LIES[name]

    async def main() -> None:
        workers = [lie.worker(id) for id in IDS]
        gateway = make(workers, VerifyOptions(), lie.index())
        verifier = gateway.verifier
        assert verifier is not None
        await run(gateway, 60)
        assert fallen(verifier)
        for worker in workers:
            worker.repair()
        for turn in range(8):
            await run(gateway, 40, first=1000 * (turn + 1))
            if not fallen(verifier):
                break
        assert not fallen(verifier)
        assert all(standing.cause == "" for standing in verifier.standings.values())
        before = gateway.totals.overpredicted_tokens + gateway.totals.underpredicted_tokens
        await run(gateway, 40, first=90_000)
        assert not fallen(verifier)
        totals = gateway.totals
        assert totals.overpredicted_tokens + totals.underpredicted_tokens == before  # exact again
        await gateway.close()

    VirtualClock.run(main())


@pytest.mark.parametrize("liars", [1, 2])
def test_one_worker_alone_is_doubted_alone_and_most_of_them_all(liars: int) -> None:
    async def main() -> None:
        workers = [e.OtherHash(id) for id in IDS[:liars]] + [e.Cacher(id) for id in IDS[liars:]]
        gateway = make(workers, VerifyOptions())
        verifier = gateway.verifier
        assert verifier is not None
        await run(gateway, 40)
        assert [standing.mode for standing in verifier.standings.values()] == [1] * liars + [0] * (3 - liars)
        everyone = Mode.APPROXIMATE if liars > 1 else Mode.PRECISE
        assert verifier.mode("w2") == everyone
        await gateway.close()

    VirtualClock.run(main())


def test_what_our_own_history_gets_wrong_too_leaves_sessions_where_they_were() -> None:
    async def main() -> None:
        gateway = make([e.KeepsNames("w0", ())], VerifyOptions(dwell=1e6, longest=1e6))
        verifier = gateway.verifier
        assert verifier is not None
        seen: list[str] = []
        for wave in range(12):
            await run(gateway, 4, 6, first=100 * wave, pause=3.0, tenants=("a",))
            if not seen or seen[-1] != verifier.health["mode"]:
                seen.append(verifier.health["mode"])
        assert seen[-2:] == ["approximate", "sticky"] or seen == ["sticky"]
        assert verifier.health["workers"]["w0"]["cause"] == "salt"
        await gateway.close()

    VirtualClock.run(main())


def fallen(verifier: Verifier | None) -> Sequence[Standing]:
    assert verifier is not None
    return [standing for standing in verifier.standings.values() if standing.mode is not Mode.PRECISE]
