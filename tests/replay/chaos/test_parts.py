"""What the cases are made of: stand-in caches, forms of messages, and what is said at the end."""

from __future__ import annotations

import io
import json
import random
import tempfile
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from bien.core.errors import UserError
from bien.core.kv.hashing import HASH_BYTES, extend_chain, tenant_key
from bien.core.request import TokenIds
from bien.gateway.remote.blocks import BlockMap
from bien.gateway.remote.wire import Removed, Stored, UndecodableError, decode
from bien.replay.chaos import run as runner
from bien.replay.chaos.ask import Reply
from bien.replay.chaos.cache import PrefixCache
from bien.replay.chaos.case import Case, CaseReport, Check, Log
from bien.replay.chaos.cases import CASES
from bien.replay.chaos.display import print_report
from bien.replay.chaos.engine import TRUTH
from bien.replay.chaos.run import ChaosReport, chosen, put_through
from bien.replay.chaos.wire import FORMS, encode
from bien.replay.chaos.world import given_world
from bien.replay.cli import make_app
from tests.replay.chaos.conftest import small_world

RECORDED = Path(__file__).parents[2] / "gateway" / "remote" / "recorded"
OF = {"arrays": "vllm-arrays", "maps": "vllm-maps", "whole maps": "vllm-whole-maps"}


def shape(payload: bytes) -> tuple[type, type, list[str]]:
    raw = msgspec.msgpack.decode(payload)
    events = raw["events"] if isinstance(raw, dict) else raw[1]
    event = events[0]
    return type(raw), type(event), sorted(event) if isinstance(event, dict) else [event[0]]


@pytest.mark.parametrize("form", FORMS)
def test_messages_have_the_form_of_vllms_own_encoder(form) -> None:
    frames = json.loads((RECORDED / f"{OF[form]}.json").read_text())["frames"]
    theirs = shape(bytes.fromhex(frames[0][-1]))
    cache = PrefixCache(4, 100, "bytes", "")
    mine = shape(encode(cache.store(list(range(100, 112)), ""), form))
    assert mine[:2] == theirs[:2] and set(mine[2]) <= set(theirs[2])


def test_the_strange_form_is_nothing_that_anybody_reads() -> None:
    with pytest.raises(UndecodableError):
        decode(encode([{"type": "AllBlocksCleared"}], "strange"))


@pytest.mark.parametrize("naming", ["bytes", "ints", "counted"])
def test_events_tell_exactly_what_is_found(naming) -> None:
    """Through our own map of blocks, for random prompts with common beginnings, evictions and removals."""
    rng = random.Random(5)
    cache = PrefixCache(4, 12, naming, "seed")
    blocks, there = BlockMap(4, lambda salt: tenant_key("")), set()
    beginnings = [[rng.randrange(9) for _ in range(16)] for _ in range(3)]
    for _ in range(200):
        ids = rng.choice(beginnings)[: rng.randrange(17)] + [
            rng.randrange(9) for _ in range(rng.randrange(14))
        ]
        events = cache.drop(ids, keep=rng.randrange(4)) if rng.random() < 0.3 else cache.store(ids, "")
        for event in decode(encode(events, "maps")).events:
            assert isinstance(event, (Stored, Removed))
            for one in blocks.store(event) if isinstance(event, Stored) else blocks.remove(event):
                names = {one.hashes[i : i + HASH_BYTES] for i in range(0, len(one.hashes), HASH_BYTES)}
                there = there | names if one.op == "stored" else there - names
        probe = ids + [1, 2, 3]
        chain = extend_chain(tenant_key(""), b"", TokenIds.of(probe), 4, len(probe) - 1)
        names = [chain[i : i + HASH_BYTES] for i in range(0, len(chain), HASH_BYTES)]
        found = next((i for i, name in enumerate(names) if name not in there), len(names))
        assert cache.found(probe, "") == 4 * found


def test_an_answer_says_who_found_how_much() -> None:
    assert TRUTH.match("e2 64/100 ....").groups() == ("2", "64", "100")


def test_a_log_of_hits() -> None:
    log = Log()
    good = Reply(200, whole=True, prompt=100, cached=96, engine=1)
    log.found("all", [good, good])
    log.found("half", [good, Reply(200, whole=True, prompt=100, cached=0, engine=0)], chance=0.5)
    log.found("not answered", [good] * 20 + [Reply(500, error="no")])
    assert [check.verdict for check in log.checks] == ["pass", "fail", "fail"]
    assert "48.0% of 2" in log.checks[1].evidence and "by chance 50%" in log.checks[1].evidence
    assert "1 failed: 500 no" in log.checks[2].evidence and log.verdict == "fail"
    empty = Log()
    empty.skip("x", "why")
    assert empty.verdict == "not applicable"


def test_cases_are_numbered_and_chosen() -> None:
    assert [case.number for case in CASES] == list(range(1, 18))
    assert [case.number for case in chosen([5, 2, 5])] == [2, 5]
    with pytest.raises(UserError, match="--case is 18; valid: 1, 2, 3"):
        chosen([18])


async def test_a_case_that_hangs_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SECONDS", 0.05)

    async def hang(world, log) -> None:
        await world.never.wait()

    class Nowhere:
        import asyncio

        never = asyncio.Event()

    report = await put_through(Nowhere(), Case(1, "hangs", "", hang))
    assert report.verdict == "fail" and "it waits in wait:" in report.checks[0].evidence
    assert "hang:" in report.checks[0].evidence


def report(verdict) -> ChaosReport:
    checks = [Check("done", verdict, "7 of [9]")]
    return ChaosReport(
        router="bien", cases=[CaseReport(1, "a case", "x#1", verdict, 0.1, checks)], seconds=1.0
    )


def test_the_table() -> None:
    console = Console(file=io.StringIO(), width=120)
    print_report(report("fail"), console)
    text = console.file.getvalue()
    assert "7 of [9]" in text and "1 fail: 1" in text


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 1), ("not applicable", 0)])
def test_the_command(verdict, code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def done(*_: object) -> ChaosReport:
        return report(verdict)

    monkeypatch.setattr(runner, "run", done)
    out = tmp_path / "r.json"
    result = CliRunner().invoke(make_app(), ["route", "chaos", "--case", "1", "--json", str(out)])
    assert result.exit_code == code, result.output
    assert json.loads(out.read_text())["cases"][0]["verdict"] == verdict


def test_url_and_workers_belong_together() -> None:
    result = CliRunner().invoke(make_app(), ["route", "chaos", "--url", "http://127.0.0.1:1"])
    assert isinstance(result.exception, UserError) and "--workers" in str(result.exception)


@pytest.mark.parametrize(
    ("option", "url"),
    [
        ("--url", "nonsense"),
        ("--url", "http://"),
        ("--url", "http://x:99999"),
        ("--url", "http://x:port"),
        ("--url", "http://[::1"),
        ("--workers", "http://127.0.0.1:99999"),
        ("--workers", "http://127.0.0.1:65000"),
        ("--workers", "http://127.0.0.1:-1"),
        ("--workers", "http://[::1"),
        ("--workers", "127.0.0.1:80"),
    ],
)
def test_urls_that_are_none_are_named(option: str, url: str) -> None:
    words = {"--url": "http://127.0.0.1:1", "--workers": "http://127.0.0.1:2,http://127.0.0.1:3"}
    words[option] = url if option == "--url" else f"{url},{url}"
    flat = [word for pair in words.items() for word in pair]
    result = CliRunner().invoke(make_app(), ["route", "chaos", *flat])
    assert isinstance(result.exception, UserError), result.exception
    assert f"{option} has {url!r}; valid: http" in str(result.exception)


async def test_workers_are_on_loopback() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(UserError, match="engines are started here"):
        async with given_world(
            Path(folder), "http://127.0.0.1:1", ["http://10.0.0.1:80", "http://10.0.0.2:80"]
        ):
            pass


@pytest.mark.slow
async def test_a_router_by_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own gateway as if it were somebody else's."""
    async with small_world() as own, own.router() as router:
        urls = [engine.url for engine in own.engines]
        with tempfile.TemporaryDirectory() as folder:
            monkeypatch.setattr("bien.replay.chaos.world.ChaosEngine.start", _already(own.engines))
            async with given_world(Path(folder), router.url, urls) as world:
                world.engines[:] = own.engines
                world.given.engines = own.engines
                reports = [await put_through(world, case) for case in chosen([2, 3, 13, 15])]
    verdicts = {one.number: one.verdict for one in reports}
    assert verdicts == {2: "pass", 3: "not applicable", 13: "pass", 15: "pass"}, reports


def _already(engines):
    async def start(self, port=None):
        self.publisher = next(e for e in engines if e.port == port).publisher
        return self

    return start
