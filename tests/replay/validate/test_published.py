"""`bien validate published` on tables whose truth is known, and on the published table when it is there."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bien.core.errors import UserError
from bien.replay.cli import make_app
from bien.replay.validate.points import read_points
from bien.replay.validate.published import FEWEST, Outcome, validate
from tests.replay.validate.tables import answered, ladder, write

PUBLISHED = os.environ.get("BIEN_PUBLISHED_POINTS", "")


def trend(row: dict[str, str]) -> tuple[float, float]:
    """An engine that is 1.6 and 2.5 times the roofline, more so at high concurrency."""
    more = math.log(int(row["concurrency"]))
    return 1.6 * math.exp(0.08 * more), 2.5 * math.exp(-0.15 * more)


def run(path: Path, rows: list[dict[str, str]], calibrate: int = 8) -> Outcome:
    return validate(read_points(write(path, rows)), calibrate)


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, str]]:
    four = answered(tmp_path / "t.csv", ladder(), trend)
    return four + answered(tmp_path / "t.csv", ladder(parallelism="tp8pp1dp1etp8ep1"), trend)


def test_a_trend_is_found_from_eight_points(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    outcome = run(tmp_path / "p.csv.xz", rows)
    [group] = outcome.groups
    assert len(group.calibrated_on) == 8 and group.tpot.points == 22
    plain, fitted = outcome.median_error_uncalibrated, outcome.median_error
    assert plain["tpot"] is not None and plain["tpot"] > 0.4 and fitted["tpot"] is not None
    assert fitted["tpot"] < 0.02 and fitted["ttft"] is not None and fitted["ttft"] < 0.05
    assert outcome.covered["tpot"] == 1.0
    kinds = {c.calibrated.provenance for c in outcome.compared["tpot"]}
    assert kinds <= {"interpolated", "extrapolated"} and "interpolated" in kinds
    assert {c.uncalibrated.provenance for c in outcome.compared["tpot"]} == {"roofline"}


def test_where_to_measure_does_not_hang_on_the_answers(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    other = [{**r, "ttft_ms": str(3 + i), "tpot_ms": str(1 + 7 * i % 5)} for i, r in enumerate(rows)]
    a, b = run(tmp_path / "a.csv", rows), run(tmp_path / "b.csv", other)
    assert a.groups[0].calibrated_on == b.groups[0].calibrated_on


def test_no_repeat_of_a_calibration_point_stands_in_an_error(
    tmp_path: Path, rows: list[dict[str, str]]
) -> None:
    repeats = [
        {**r, "id": r["id"] + "-again", "tpot_ms": str(9 * float(r["tpot_ms"])), "framework_version": "2"}
        for r in rows
    ]
    garbled = [  # the same measurements under the layout that one dump wrote
        {**r, "id": r["id"] + "-copy", "parallelism": "tp2pp1dp1etp2ep1"} for r in rows
    ]
    outcome = run(tmp_path / "p.csv", rows + repeats + garbled)
    [group] = outcome.groups
    compared = {c.id for c in outcome.compared["tpot"]}
    used = set(group.calibrated_on)
    assert used and not used & compared
    assert not {f"{name}-again" for name in used} & compared
    assert not {f"{name}-copy" for name in used} & compared
    assert outcome.copies == len(rows)  # each measurement counts once
    assert len(compared) == group.points - 2 * len(used)


def test_groups_are_apart(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    slow = [
        {**r, "framework": "sglang", "tpot_ms": str(5 * float(r["tpot_ms"])), "id": r["id"] + "s"}
        for r in rows
    ]
    both, alone = run(tmp_path / "p.csv", rows + slow), run(tmp_path / "p.csv", rows)
    [kept] = [g for g in both.groups if g.framework == "vllm"]
    assert kept == alone.groups[0]
    assert {g.tpot.calibrated for g in both.groups if g.framework == "sglang"} != {kept.tpot.uncalibrated}


def test_few_configurations_are_not_calibrated_on_all(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    outcome = run(tmp_path / "p.csv", rows[:FEWEST])
    assert len(outcome.groups[0].calibrated_on) == FEWEST // 2
    outcome = run(tmp_path / "p.csv", rows[: FEWEST - 1])
    assert outcome.groups[0].why_not and outcome.median_error["tpot"] is None


def test_uncalibrated_alone(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    outcome = run(tmp_path / "p.csv", rows, calibrate=0)
    assert outcome.groups[0].calibrated_on == [] and outcome.groups[0].tpot.points == len(rows)
    assert outcome.median_error == outcome.median_error_uncalibrated
    assert {c.calibrated.provenance for c in outcome.compared["ttft"]} == {"roofline"}
    with pytest.raises(UserError, match="-1"):
        run(tmp_path / "p.csv", rows, calibrate=-1)


def test_unknown_models_and_gpus_stay_out_of_the_figures(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    strange = [
        {**r, "gpu": "tpu9", "model": "someone/else", "tpot_ms": str(50 * float(r["tpot_ms"])), "id": f"x{i}"}
        for i, r in enumerate(rows)
    ]
    outcome, alone = run(tmp_path / "p.csv", rows + strange), run(tmp_path / "p.csv", rows)
    assert outcome.median_error == alone.median_error and outcome.groups_calibrated == 1
    [unknown] = [g for g in outcome.groups if not g.known]
    assert len(unknown.assumed) == 2 and unknown.tpot.points == outcome.stand_ins["tpot"].points == 22
    assert unknown.tpot.calibrated is not None and unknown.tpot.calibrated < 0.05  # a calibration mends it


def test_noise_is_what_repeats_differ_by(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    again = [{**r, "tpot_ms": str(1.5 * float(r["tpot_ms"])), "id": r["id"] + "b"} for r in rows[:10]]
    noise = run(tmp_path / "p.csv", rows + again).noise["agg"]["tpot"]
    assert noise.configurations == 10 and noise.median == pytest.approx(0.2)  # 1 and 1.5 about 1.25


def test_nothing_that_can_be_predicted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rows"):
        run(tmp_path / "p.csv", [])
    with pytest.raises(UserError, match="no isl"):
        run(tmp_path / "p.csv", [{**ladder()[0], "isl": ""}])


def command(*arguments: str) -> Any:
    return CliRunner().invoke(make_app(), ["validate", "published", *arguments])


def test_the_command_writes_json_and_a_plot(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    strange = [{**r, "model": "someone/else", "id": "x" + r["id"]} for r in rows[:6]]
    path = write(tmp_path / "p.csv.xz", [*rows, *strange, {**rows[0], "isl": ""}])
    out, png = tmp_path / "v.json", tmp_path / "v.png"
    done = command("--points", str(path), "--calibrate", "6", "--json", str(out), "--plot", str(png))
    assert done.exit_code == 0, done.output
    assert done.output.index("uncalibrated: TPOT") < done.output.index("calibrated on at most 6 points")
    assert "1 row dropped: no isl" in done.output and "(stand-in)" in done.output
    found = json.loads(out.read_text())
    assert found["groups"][0]["calibrated_on"] and len(found["groups"][0]["calibrated_on"]) == 6
    assert 0 <= found["median_error"]["tpot"] < 0.1 and 0 <= found["median_error"]["ttft"] < 0.2
    first = found["compared"]["tpot"][0]["calibrated"]
    assert first["low"] < first["seconds"] < first["high"]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_command_spares_its_input(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    path = write(tmp_path / "p.csv", rows)
    before = path.read_bytes()
    done = command("--points", str(path), "--json", str(path))
    assert done.exit_code != 0 and path.read_bytes() == before


@pytest.mark.skipif(not PUBLISHED, reason="BIEN_PUBLISHED_POINTS names no table")
def test_published_points_are_predicted_within_the_goals() -> None:
    outcome = validate(read_points(Path(PUBLISHED)), 8)
    for target, goal in outcome.goals.items():
        error, plain = outcome.median_error[target], outcome.median_error_uncalibrated[target]
        assert error is not None and plain is not None and error <= goal < plain
        covered = outcome.covered[target]
        assert covered is not None and covered > 0.8
    assert all(len(g.calibrated_on) <= 8 for g in outcome.groups)
