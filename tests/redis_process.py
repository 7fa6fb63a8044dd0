"""A real Redis for tests: started, stopped, frozen and emptied as they like."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bien.core.errors import ResourceError
from bien.replay.redis_server import SHIM, find_binary


class RedisProcess:
    def __init__(self, *options: str, config: Path | None = None) -> None:
        """`config`: of a sentinel, which writes into it."""
        self._socket = Path(tempfile.gettempdir()) / f"bien-test-{uuid.uuid4().hex[:12]}.sock"
        self._options = options
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"
        self.start()

    @property
    def client(self) -> redis.Redis:
        password = (
            self._options[self._options.index("--requirepass") + 1]
            if ("--requirepass" in self._options)
            else None
        )
        return redis.Redis(unix_socket_path=str(self._socket), password=password, retry=Retry(NoBackoff(), 0))

    def start(self) -> None:
        command = [find_binary(), "--port", "0", "--unixsocket", str(self._socket), "--save", ""]
        if self._config is not None:
            command = [find_binary(), str(self._config), "--sentinel", "--unixsocket", str(self._socket)]
        shim = [sys.executable, "-I", "-S", "-c", SHIM, str(os.getpid())]
        self._process = subprocess.Popen(
            [*shim, *command, *self._options], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(str(self._socket))
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline, "no redis-server"
                time.sleep(0.01)

    def stop(self) -> None:
        """What it held is gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None
        self._socket.unlink(missing_ok=True)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def require_redis() -> None:
    """Skip where there is no binary; fail where tests must not be skipped (BIEN_REQUIRE_REDIS=1: CI)."""
    try:
        find_binary()
    except ResourceError as error:
        if os.environ.get("BIEN_REQUIRE_REDIS") == "1":
            raise
        pytest.skip(f"no Redis to test with: {error}")


@contextmanager
def redis_process(*options: str, config: Path | None = None) -> Iterator[RedisProcess]:
    require_redis()
    server = RedisProcess(*options, config=config)
    try:
        yield server
    finally:
        server.stop()
