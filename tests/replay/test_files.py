from __future__ import annotations

import os
from pathlib import Path

import pytest

from bien.core.errors import ResourceError, UserError
from bien.replay.files import spare, write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for data in (b"long before", b"new"):
        write_whole(path, data, "result")
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "r.json"
    target.write_bytes(b"long before")
    link.symlink_to(target)
    write_whole(link, b"new", "result")
    assert link.is_symlink() and target.read_bytes() == b"new"


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    """A terminal, as /dev/stdout may be one; beside /dev/null a part would be renamed over it."""
    ours, theirs = os.openpty()
    try:
        path = Path(os.ttyname(theirs))
        link = tmp_path / "out"
        link.symlink_to(path)
        for place in (path, link):
            write_whole(place, b"x\n", "result")
            assert os.read(ours, 10) == b"x\r\n"
        assert path.is_char_device() and link.is_symlink()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_folder_is_refused_and_stays(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot write result .*: Is a directory"):
        write_whole(tmp_path, b"x", "result")
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())


def test_what_is_read_is_spared(tmp_path: Path) -> None:
    a, link = tmp_path / "a", tmp_path / "link"
    a.write_bytes(b"")
    link.symlink_to(a)
    spare(tmp_path / "b", [a, tmp_path / "none"], "report")
    for path in (a, link, tmp_path / "." / "a"):
        with pytest.raises(UserError, match="is read to make the report; valid: another place"):
            spare(path, [tmp_path / "none", a], "report")
