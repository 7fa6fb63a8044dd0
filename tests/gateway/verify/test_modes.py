"""What is believed, and where it is said."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from bien.core.clock import VirtualClock
from bien.core.kv.hashing import HASH_BYTES
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.gateway.core import Gateway
from bien.gateway.verify.history import Homes, Routed, common_blocks
from bien.gateway.verify.options import VerifyOptions
from bien.gateway.verify.recent import Recent
from bien.gateway.verify.standing import Mode
from tests.gateway.verify.engines import Cacher, OtherHash
from tests.gateway.verify.traffic import make, run

CLOCK = VirtualClock()


def chain(*names: int) -> bytes:
    return b"".join(bytes([name]) * HASH_BYTES for name in names)


def test_routed_knows_what_was_sent_and_forgets_it() -> None:
    routed = Routed(ttl=100.0)
    routed.sent(chain(1, 2, 3), 0.0)
    routed.sent(chain(1, 2, 4, 5), 40.0)
    assert [routed.depth(c, 41.0) for c in (chain(1, 2, 3, 9), chain(1, 2, 4, 5), chain(7), b"")] == [
        3,
        4,
        0,
        0,
    ]
    assert routed.depth(chain(1, 2, 3), 60.0) == 3
    routed.sent(chain(1, 2), 70.0)
    assert routed.depth(chain(1, 2, 3), 110.0) == 2
    assert routed.depth(chain(1, 2, 3), 1000.0) == 0


def test_homes_know_the_last_prompt_of_a_session_only() -> None:
    homes = Homes(limit=2 * (256 + 3 * HASH_BYTES))
    homes.sent(("t", "a"), "w0", chain(1, 2, 3))
    homes.sent(("u", "a"), "w1", chain(1, 2, 3))
    assert homes.depth(("t", "a"), "w0", chain(1, 2, 9)) == 2
    assert homes.depth(("t", "a"), "w1", chain(1, 2, 9)) == 0
    homes.sent(("t", "a"), "w1", chain(5, 6, 7))
    assert homes.depth(("t", "a"), "w0", chain(1, 2, 3)) == 0
    homes.sent(("t", "b"), "w0", chain(1, 2, 3))  # one too many: the least recently used goes
    assert homes.depth(("u", "a"), "w1", chain(1, 2, 3)) == 0
    assert homes.depth(("t", "a"), "w1", chain(5, 6, 7)) == 3


def test_common_blocks() -> None:
    long = bytes(range(256)) * 16
    for cut in (0, 1, 100, 255):
        other = long[: cut * HASH_BYTES] + b"x" * HASH_BYTES * 3
        assert common_blocks(long, other) == cut
    assert common_blocks(long, long) == 256


def test_recent_says_perhaps_when_it_does_not_know() -> None:
    recent = Recent(limit=4 * (64 + HASH_BYTES))
    for at in range(6):
        recent.add(float(at), chain(at))
    assert recent.since(2.0, chain(5))
    assert not recent.since(5.0, chain(4), chain(9))
    assert recent.since(4.0, chain(4))
    assert recent.since(1.0, chain(9))  # what came at 1 is not kept any more
    assert not recent.since(2.0, chain(9))


async def one(
    gateway: Gateway, ids: range, session: str = "s", tenant: str = ""
) -> tuple[str, dict[str, object]]:
    work = GenerateRequest("r", TokenIds.of(ids), SamplingParams(max_tokens=1), tenant, session)
    async with gateway.generate(work) as stream:
        async for _ in stream:
            pass
        return stream.worker, dict(stream.decision.reasons)


def test_it_is_said_in_metrics_and_in_each_decision() -> None:
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    async def main() -> None:
        liar = OtherHash("w0")
        gateway = make([liar], VerifyOptions(), metrics=registry)
        verifier = gateway.verifier
        assert verifier is not None
        assert value("bien_router_mode", worker="w0") == 0
        assert value("bien_parity_cause", worker="w0", cause="hash") == 0
        assert gateway.parity["mode"] == "precise"
        await verifier.greeted(100.0)
        assert value("bien_router_mode", worker="w0") == 1
        assert value("bien_parity_cause", worker="w0", cause="hash") == 1
        assert value("bien_parity_cause", worker="w0", cause="salt") == 0
        sent = value("bien_canary_requests_total")
        assert sent == len(liar.submitted) > 2
        assert all(request.priority == 100 for _, request in liar.submitted)
        assert value("bien_prompt_tokens_total") == 0
        health = gateway.parity
        assert health["mode"] == "approximate"
        assert health["workers"]["w0"]["cause"] == "hash"
        _, reasons = await one(gateway, range(100))
        assert (reasons["mode"], reasons["parity_cause"]) == ("approximate", "hash")
        await CLOCK.sleep(60.0)
        _, reasons = await one(gateway, range(120))
        assert value("bien_parity_comparisons_total", worker="w0", verdict="under") == 1
        # Our own history was right where the index was wrong.
        assert value("bien_parity_predicted_tokens_total", worker="w0") == 100
        assert value("bien_parity_found_tokens_total", worker="w0") == 100
        assert value("bien_parity_ratio", worker="w0") == value("bien_parity_overall_ratio") == 1
        await gateway.close()

    VirtualClock.run(main())


def test_a_gateway_that_does_not_verify_says_nothing_of_it() -> None:
    async def main() -> None:
        gateway = make([Cacher()], None)
        _, reasons = await one(gateway, range(100))
        assert "mode" not in reasons
        assert gateway.parity == {}
        await gateway.close()

    VirtualClock.run(main())


@pytest.mark.parametrize("mode", [Mode.APPROXIMATE, Mode.STICKY])
def test_sessions_go_where_their_prompts_are_though_the_index_knows_nothing(mode: Mode) -> None:
    async def main() -> None:
        gateway = make(
            [OtherHash(f"w{i}") for i in range(3)], VerifyOptions(canary=False, dwell=1e9, longest=1e9)
        )
        verifier = gateway.verifier
        assert verifier is not None
        for standing in verifier.standings.values():
            verifier._change(standing, mode, 0.0)
        await run(gateway, 30, 6, pause=30.0)
        totals = gateway.totals
        assert totals.cached_tokens > 0.7 * totals.prompt_tokens
        assert 0.9 < totals.parity < 1.1
        assert {verifier.mode(f"w{i}") for i in range(3)} == {mode}
        # Of a stranger's prompt that begins the same, only the history knows.
        home, _ = await one(gateway, range(5000, 5200), "x")
        there, reasons = await one(gateway, range(5000, 5300), "y")
        assert reasons["mode"] == mode.name.lower()
        assert (there == home) or mode is Mode.STICKY
        await gateway.close()

    VirtualClock.run(main())
