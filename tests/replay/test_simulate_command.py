"""`bien simulate`: bad input is one paragraph, and is noticed before a long run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MEMORY = "ulimit -v 8000000; exec "


def simulate(*arguments: str, cwd: Path) -> tuple[int, str]:
    command = " ".join([MEMORY, sys.executable, "-m", "bien.replay.cli", "simulate", *arguments])
    done = subprocess.run(["bash", "-c", command], cwd=cwd, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ("kv_tokens = 99999999999999", "not enough memory: .*; lower count, kv_tokens or slots"),
        (
            'executor = { use = "simulated", step_ms = -1.0 }',
            ".*step_ms: Expected float >= 0",
        ),
        (
            'executor = { use = "simulated", step_ms = nan }',
            ".*step_ms: Expected float >= 0",
        ),
        (
            'executor = { use = "simulated", token_ms = inf }',
            ".*token_ms: Expected float <= 1",
        ),
    ],
)
def test_absurd_numbers_in_a_deployment(pool: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(f"[[pool]]\n{pool}\n")
    code, err = simulate("--deployment", "d.toml", cwd=tmp_path)
    assert code == 2
    (line,) = err.splitlines()
    assert re.fullmatch(f"error: {message}.*", line), line


def test_the_result_is_tried_first_and_outlives_a_closed_pipe(tmp_path: Path) -> None:
    code, err = simulate("--json", "none/r.json", cwd=tmp_path)
    assert code == 2 and err.startswith("error: cannot write result none/r.json: No such file"), err
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` leaves it
    command = [sys.executable, "-m", "bien.replay.cli", "simulate", "--sessions", "1"]
    subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.DEVNULL, timeout=60)
    os.close(writer)
    assert (tmp_path / "result.json").is_file()
