"""Memory that is left within a control group."""

from __future__ import annotations

from pathlib import Path

import psutil

from bien.core.memory import available_host_bytes


def group(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("900000\n")
    (folder / "memory.stat").write_text(
        "anon 100000\nfile 800000\ninactive_file 500000\nactive_file 300000\n"
    )
    return folder


def test_files_in_the_page_cache_make_room(tmp_path: Path) -> None:
    assert available_host_bytes(group(tmp_path, "1000000")) == 900_000


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", group(tmp_path, "max")):
        assert 900_000 < available_host_bytes(folder) <= psutil.virtual_memory().total
