"""What children say on stderr reaches whoever started them, at the level it had there."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys

import pytest

from bien.core.child_log import FORMAT, LINES, ChildLog

CHILD = f"""
import logging, sys
logging.basicConfig(level="INFO", format={FORMAT!r})
print("printed by a library", file=sys.stderr)
logging.info("loading")
logging.warning("it will be slow: %s", "no compiler")
try:
    raise ValueError("of a plugin")
except ValueError:
    logging.exception("left out")
logging.info("serving")
"""


async def test_levels_of_a_child_survive(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", CHILD), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said = ChildLog(logging.getLogger("bien.test"), "w0")
    async for text in process.stderr:
        said.add(text)
    await process.wait()
    records = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "bien.test"]
    assert records[:4] == [
        ("INFO", "w0: printed by a library"),
        ("INFO", "w0: loading"),
        ("WARNING", "w0: it will be slow: no compiler"),
        ("ERROR", "w0: left out"),
    ]
    assert records[4:-2] and {level for level, _ in records[4:-1]} == {"ERROR"}, "its traceback"
    assert records[-2:] == [("ERROR", "w0: ValueError: of a plugin"), ("INFO", "w0: serving")]
    assert said.last.startswith("printed by a library | INFO loading | WARNING it will be slow")


def test_only_the_last_lines_are_kept() -> None:
    said = ChildLog(logging.getLogger("bien.test"), "w0")
    assert said.last == ""
    for n in range(2 * LINES):
        said.add(b"%d\xff\n" % n)
    assert said.last.split(" | ") == [f"{n}\N{REPLACEMENT CHARACTER}" for n in range(LINES, 2 * LINES)]


@pytest.mark.parametrize(
    ("level", "begins"), [("nonsense", "WARNING BIEN_LOG is 'nonsense'; "), ("info", "")]
)
def test_a_level_that_is_none_stops_no_worker(level: str, begins: str) -> None:
    code = "from bien.core.child_log import log_to_parent; log_to_parent()"
    environment = {**os.environ, "BIEN_LOG": level}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stderr.startswith(begins) and bool(done.stderr) == bool(begins)
