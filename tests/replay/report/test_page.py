from __future__ import annotations

import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from bien.core.errors import ResourceError, UserError
from bien.replay.driver import Driver
from bien.replay.files import pretty
from bien.replay.ladder import Ladder, Percentiles, Rung
from bien.replay.measure import measure
from bien.replay.metrics import Throughput
from bien.replay.report import figures
from bien.replay.report.page import draw, render
from bien.replay.report.timeline import timelines
from bien.replay.result import Result, read_result, write_result
from bien.replay.turns_file import TurnLine, turn_lines, turns_path, write_turns
from bien.traces.model import Stream, TraceMeta
from tests.replay.fakes import FakeTarget, chain, drive, session

SECTIONS = {"validity", "figures", "timelines", "latency", "cache", "card", "deployment"}
NASTY = """<script>alert("1")</script>&amp;'$x_1$\x07\u0416"""


def run(name: str = "a", label: str = "explore") -> Driver:
    child = Stream(1, chain(9000, (1, 30, 5)), parent=0, spawned_after=0, joined_before=1, label=label)
    sessions = [session(name, (2, 50, 11), (3, 20, 3), extra=(child,)), session("b", (0, 50, 4))]
    return drive(FakeTarget(cached=lambda r: 16), sessions)


def result_of(driver: Driver, name: str = "t") -> Result:
    deployment = {"pool": [{"name": name, "slots": 8}], "gateway": {"secret": "set"}, "none": []}
    return measure(driver, TraceMeta("weka", 64, name), kind="simulated", deployment=deployment)


def page(text: str) -> ET.Element:
    """The page parses as XML: every element is closed, every name escaped."""
    return ET.fromstring(text)


def cells(root: ET.Element, id_: str) -> list[float | None]:
    (row,) = root.findall(f".//tr[@id='{id_}']")
    return [float(v) if (v := c.get("data-value")) else None for c in row.findall("td[@data-value]")]


@pytest.fixture(scope="module")
def made() -> tuple[Result, ET.Element]:
    driver = run()
    result = result_of(driver)
    return result, page(render(result, turn_lines(driver.records, driver.started), "r.json"))


def test_it_has_every_section_and_figure(made: tuple[Result, ET.Element]) -> None:
    _, root = made
    assert {s.get("id") for s in root.findall(".//section")} == SECTIONS
    drawn = {s.get("id"): len(list(s.iter("{http://www.w3.org/2000/svg}svg"))) for s in root.iter("section")}
    # The run and two sessions; histograms; the bar.
    assert (drawn["timelines"], drawn["latency"], drawn["cache"]) == (3, 1, 1)
    text = "".join(root.itertext())
    for word in ("main", "explore", "TTFT ms", "p99", "pool[0].slots", "gateway.secret", "Valid."):
        assert word in text


def test_numbers_are_the_results(made: tuple[Result, ET.Element]) -> None:
    result, root = made
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "interactivity"):
        assert cells(root, name) == list(msgspec.structs.astuple(getattr(result, name)))
    assert cells(root, "jobs") == list(msgspec.structs.astuple(result.jobs.seconds))
    loss = result.cache.loss
    assert loss is not None and result.cache.ideal is not None
    assert cells(root, "cache-ideal") == [result.cache.ideal]
    assert cells(root, "cache-achieved") == [result.cache.achieved]
    assert cells(root, "cache-rounding") == [loss.rounding]
    assert cells(root, "cache-capacity") == [loss.capacity]
    tiles = {
        t.findtext("span"): float(t.findall("b")[0].attrib["data-value"])
        for t in root.findall(".//div[@class='tile']")
    }
    assert tiles["turns"] == 4 and tiles["seconds"] == result.throughput.seconds
    assert tiles["output tokens/s"] == result.throughput.output
    assert tiles["cache hit"] == result.cache.achieved


def test_it_needs_nothing_else(made: tuple[Result, ET.Element]) -> None:
    _, root = made
    assert not list(root.iter("script")) and not list(root.iter("link"))
    for element in root.iter():
        for key, value in element.attrib.items():
            if key.endswith(("href", "src")):
                assert value.startswith(("#", "data:")), value
            assert not re.search(r"url\((?!#)", value), value
    assert "@import" not in "".join(root.itertext())


def test_names_are_text() -> None:
    driver = run(name=NASTY, label=NASTY)
    result = result_of(driver, NASTY.replace("\x07", ""))
    result.validity.valid, result.validity.reasons = False, [NASTY.replace("\x07", "")]
    text = render(result, turn_lines(driver.records, driver.started), "<r>.json")
    assert "<script" not in text
    root = page(text)
    shown = "".join(root.itertext())
    assert "Not valid." in shown and NASTY.replace("\x07", "\N{REPLACEMENT CHARACTER}") in shown
    assert "<r>.json" in shown


def test_a_broken_run_is_drawn_too() -> None:
    driver = drive(FakeTarget(fails=lambda r: True, max_context=60), [session("a", (0, 50, 1))])
    lines = turn_lines(driver.records, driver.started)
    root = page(render(result_of(driver), lines, "r.json"))
    text = "".join(root.itertext())
    assert "100.0% of turns failed" in text and "No turn ended well." in text
    assert "does not say how many tokens were cached" not in text, "that is not why"
    causes = root.findall(".//section[@id='figures']//tr")
    assert ["".join(c.itertext()) for c in causes] == ["1broken"]
    assert root.find(".//section[@id='latency']//figure") is None, "no empty axes"
    assert cells(root, "ttft_ms") == [None] * 5
    for turns in ([], None):
        assert (
            page(render(result_of(driver), turns, "r.json")).find(".//section[@id='timelines']//figure")
            is None
        )


def test_what_a_server_does_not_say_is_said() -> None:
    driver = drive(FakeTarget(cached=lambda r: -1), [session("a", (0, 50, 4))])
    root = page(render(result_of(driver), turn_lines(driver.records, driver.started), "r.json"))
    text = "".join(root.itertext())
    assert "The server does not say how many tokens were cached." in text
    assert "cached tokens are not known" in text, "where the third drawing would be"


FAILED = figures.COLOURS["failed"]
ODD = {
    "failed at once": [TurnLine("a", 0, 0, sent=0.0, ended=0.0, error="refused")],
    "never sent": [TurnLine("a", 0, 0, ready=0.0, planned=0.0)],
    "no time": [
        TurnLine("a", 0, 0, sent=0.0, first=0.0, last=0.0, ended=0.0, got=1, first_count=1, cached=0)
    ],
    "its own parent": [TurnLine("a", 3, 0, parent=3, sent=0.0, first=1.0, last=2.0, ended=2.0, got=9)],
    "far from the percentiles": [
        TurnLine("a", 0, i, sent=0.0, first=1e6 + i, last=2e6, ended=2e6, got=9, first_count=1, cached=0)
        for i in range(3)
    ],
    "spread over decades": [
        TurnLine("a", 0, i, sent=0.0, first=10.0**i, last=1e4, ended=1e4, prompt=10**i, got=9, cached=0)
        for i in range(-3, 4)
    ],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_turns_are_drawn_quietly(name: str) -> None:
    result = result_of(run())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        root = page(render(result, ODD[name], "r.json"))
    assert root.find(".//section[@id='timelines']//figure") is not None


def test_what_failed_at_once_can_be_seen() -> None:
    turns = [
        TurnLine("a", 0, 0, sent=5.0, ended=5.0, error="refused"),
        TurnLine("b", 0, 0, sent=0.0, first=1.0, last=60.0, ended=60.0),
    ]
    svg = figures.draw_run(timelines(turns))
    # A line around it: the bar itself has no width.
    assert re.search(rf"fill: {FAILED}; stroke: {FAILED}; stroke-width: 1\.2", svg)
    assert "stroke: " + figures.COLOURS["decode"] not in svg


def test_turns_that_were_cut_off_are_counted() -> None:
    result = result_of(run())
    for cut, shown in ((0, None), (3, "3")):
        result.turns.unfinished = cut
        tiles = page(render(result, None, "r.json")).findall(".//div[@class='tile']")
        assert {t.findtext("span"): t.findtext("b") for t in tiles}.get("turns cut off") == shown


def test_equal_runs_give_equal_pages() -> None:
    pages = []
    for _ in range(2):
        driver = run()
        pages.append(render(result_of(driver), turn_lines(driver.records, driver.started), "r.json"))
    assert pages[0] == pages[1]


def test_a_result_is_drawn_with_or_without_its_turns(tmp_path: Path) -> None:
    driver = run()
    path, out = tmp_path / "r.json", tmp_path / "r.html"
    write_result(path, result_of(driver))
    draw(path, out)
    assert "turns of this run were not given" in out.read_text()
    other = write_turns(path, turn_lines(driver.records, driver.started)).rename(tmp_path / "x.zst")
    draw(path, out, other)
    assert "explore" in out.read_text()
    other.rename(turns_path(path))
    draw(path, out)
    assert "explore" in out.read_text()
    with pytest.raises(ResourceError, match="cannot write report"):
        draw(path, tmp_path / "none" / "r.html")
    with pytest.raises(UserError, match="is no result"):
        draw(out, tmp_path / "y.html")
    assert not (tmp_path / "y.html").exists()


def saved(folder: Path, driver: Driver, name: str = "r.json") -> Path:
    path = folder / name
    write_result(path, result_of(driver))
    write_turns(path, turn_lines(driver.records, driver.started))
    return path


def test_what_a_page_is_made_from_is_not_overwritten(tmp_path: Path) -> None:
    path = saved(tmp_path, run())
    turns = turns_path(path)
    other = turns.rename(tmp_path / "x.zst")
    (tmp_path / "link.html").symlink_to(path)
    (tmp_path / "sub").mkdir()
    for out in (path, other, tmp_path / "link.html", tmp_path / "sub" / ".." / "x.zst"):
        before = out.read_bytes()
        with pytest.raises(UserError, match=r"is read to make the report; valid: another place for it"):
            draw(path, out, other)
        assert out.read_bytes() == before
    other.rename(turns)
    with pytest.raises(UserError, match=r"r\.turns\.jsonl\.zst is read to make the report"):
        draw(path, turns)


def test_turns_that_are_not_all_there_are_refused(tmp_path: Path) -> None:
    driver = run()
    path = saved(tmp_path, driver)
    write_turns(path, turn_lines(driver.records, driver.started)[:-1])
    with pytest.raises(UserError, match=r"holds 3 turns of the 4 of .*r\.json; valid: the whole file"):
        draw(path, tmp_path / "r.html")


def rung(cap: int, result: Result, name: str) -> Rung:
    p50 = Percentiles(result.interactivity.p50, None)
    through = result.throughput.per_accelerator
    return Rung(cap, 2 * cap, name, p50, through, Percentiles(cap * 1000.0, None), 0.5, True, [], [], True)


def test_a_rung_shows_its_ladder(tmp_path: Path) -> None:
    driver, out = run(), tmp_path / "r.html"
    path, result = saved(tmp_path, driver, "r-cap2.json"), result_of(driver)
    rungs = [rung(1, result, "r-cap1.json"), rung(2, result, "r-cap2.json")]
    ladder = Ladder(kind="live", model=NASTY, workers=2, accelerators=2, rungs=rungs)

    def drawn() -> ET.Element:
        (tmp_path / "ladder.json").write_bytes(pretty(ladder))
        draw(path, out)
        return page(out.read_text())

    root = drawn()
    assert root.find(".//section[@id='ladder']//figure") is not None
    assert cells(root, "rung-1")[1] == result.throughput.per_accelerator.output
    assert cells(root, "rung-2")[4] == 2000.0
    assert "rung with cap 2, in the ring" in "".join(root.itertext())
    with pytest.raises(
        UserError, match=r"ladder\.json is a ladder; valid: .* \(r-cap1\.json, r-cap2\.json\)"
    ):
        draw(tmp_path / "ladder.json", out)
    rungs[1].throughput = Throughput(output=1.0)  # of an earlier ladder
    assert drawn().find(".//section[@id='ladder']") is None
    rungs.pop()
    assert drawn().find(".//section[@id='ladder']") is None
    (tmp_path / "ladder.json").write_text("{}")
    draw(path, out)
    with pytest.raises(UserError, match=r"ladder\.json is no result"):
        draw(tmp_path / "ladder.json", out)


def test_the_commands(tmp_path: Path) -> None:
    def bien(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bien.replay.cli", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    done = bien("simulate", "--sessions", "2", "--report", "a.html")
    assert done.returncode == 0, done.stderr
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["a.html", "result.json", "result.turns.jsonl.zst"]
    assert bien("report", "result.json").returncode == 0
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "a.html").read_bytes()
    root = page((tmp_path / "report.html").read_text())
    assert cells(root, "ttft_ms")[1] == read_result(tmp_path / "result.json").ttft_ms.p50
    refused = bien("simulate", "--report", "none/a.html")
    assert refused.returncode == 2 and refused.stderr.startswith("error: cannot write report none/a.html")
