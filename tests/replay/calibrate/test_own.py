"""A real engine, probed and fitted, and a deployment that cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bien.core.costs.factors import read_calibration
from bien.replay.result import read_result


def bien(*arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bien.replay.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_a_running_engine_is_calibrated_and_simulated(tmp_path: Path) -> None:
    done = bien(
        *("calibrate", "one-int8", "--tokens", "4000", "--context", "512", "--plot", "c.png"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "largest residuals" in done.stdout and (tmp_path / "c.png").exists()
    found = read_calibration(tmp_path / "calibration.json")
    assert found.formats["weights"] == "int8" and found.request_seconds > 0
    # A loaded machine spreads steps; a fit that does not follow them at all is off by far more.
    assert found.held_out is not None and found.held_out.places >= 10 and found.held_out.median < 0.3
    places = json.loads((tmp_path / "calibration.json").read_text())["places"]
    assert {p["fitted"] for p in places} == {True, False}
    arguments = ("simulate", "--deployment", "one-int8", "--calibration", "calibration.json")
    done = bien(*arguments, "--sessions", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "result.json")
    assert "calibrated on bien, 1 worker" in result.costs[0].provenance
    assert result.intervals["ttft_ms.p50"][0] < result.intervals["ttft_ms.p50"][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kimi-k3-b300",), "there is no engine to observe"),
        (("one-int8", "--machine", "h9000"), "no machine 'h9000'"),
        (("one-int8", "--tokens", "10"), "--tokens is 10; valid: 1000 or more"),
        (("one-int8", "--out", "nowhere/c.json"), "nowhere"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_before_anything_starts(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = bien("calibrate", *arguments, cwd=tmp_path, timeout=60)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert message in line
