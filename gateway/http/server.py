"""`serve`: an application on a port."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from aiohttp import web
from aiohttp.http import HttpProcessingError

from bien.core.errors import ResourceError
from bien.gateway.http.served import SERVED

# Seconds for the ends of answers to reach clients that read slowly; aiohttp waits so long twice.
LAST_WORDS = 0.25
log = logging.getLogger("bien.http")


def _shorten(record: logging.LogRecord) -> bool:
    # Whoever can reach the port can send what is no HTTP: that is one line, and no fault of ours to trace.
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        first = (error.message.splitlines() or [""])[0]
        record.msg, record.args = f"{record.getMessage()}: {first}", ()
        record.exc_info = record.exc_text = None
    return True


log.addFilter(_shorten)


class Server:
    """A running server; made by `serve`."""

    def __init__(self, app: web.Application, runner: web.AppRunner, host: str) -> None:
        self._app = app
        self._runner = runner
        self.host = host
        self.port: int = runner.addresses[0][1]

    @property
    def url(self) -> str:
        return f"http://{address(self.host, self.port)}"

    def drain(self) -> None:
        """Refuse new generations (503) and say so at /ready; it listens on, and those under way go on."""
        self._app[SERVED].draining = True

    async def close(self) -> None:
        """Now: stop listening and end the answers under way: a stream with an error event, another one as
        a 503. Who wants them to reach their own ends drains, and waits, before."""
        self.drain()
        for site in list(self._runner.sites):
            await site.stop()
        self._app[SERVED].answers.end()
        await self._runner.cleanup()


async def serve(app: web.Application, host: str = "127.0.0.1", port: int = 8000) -> Server:
    """Listen; `port` 0 takes any free one.

    ResourceError when the port is taken or the address is none of this machine's.
    """
    _check_range(port)
    # Cancellation on disconnect: without it a client that leaves before the first byte is not noticed.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS, logger=log
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ResourceError(_why(error, host, port), field="port") from error
    return Server(app, runner, host)


def address(host: str, port: int) -> str:
    """host:port, as it stands in URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def check_port(host: str, port: int) -> None:
    """ResourceError, as `serve` would raise it, when nobody could listen there now; takes nothing.

    For whoever has much to do before he serves.
    """
    _check_range(port)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:  # the options are those of the event loop
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise ResourceError(_why(error, host, port), field="port") from error


def _check_range(port: int) -> None:
    if not 0 <= port < 1 << 16:  # uvloop would take it modulo 65536
        raise ResourceError(f"port {port} is none; valid: 1 to 65535, or 0 for any free one", field="port")


def _why(error: OSError, host: str, port: int) -> str:
    number = error.errno
    if number == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use by another process; stop that one, or set another "
            "gateway.port (0 takes any free port)"
        )
    if number == errno.EACCES:
        return f"port {port} on {host} needs privileges; valid: a port from 1024, or 0 for any free one"
    if isinstance(error, socket.gaierror) or number == errno.EADDRNOTAVAIL:
        return f"{host!r} is no address of this machine; valid: one of its own, such as 127.0.0.1"
    return f"cannot listen on {host} port {port}: {error}; set another gateway.host or gateway.port"
