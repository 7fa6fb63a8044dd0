"""The limit on open files, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource
from bien.core.open_files import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(allow_open_files({connections}))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def after(soft: int, hard: int, connections: int) -> list[str]:
    code = CODE.format(soft=soft, hard=hard, connections=connections)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split("\n")[:2]


def test_it_is_raised_as_far_as_needed() -> None:
    assert after(256, 1024, 512) == ["", "640"]
    assert after(700, 1024, 512) == ["", "700"], "enough stays as it is"


def test_what_cannot_be_raised_is_said() -> None:
    warning, limit = after(256, 600, 512)
    assert limit == "600"
    assert warning.startswith(
        "this process may open 600 files, 512 connections need 640: raise the hard limit"
    )
