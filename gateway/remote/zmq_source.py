"""`ZmqSource`: an engine's published events (SUB) and its earlier ones (DEALER to its ROUTER)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Union

from bien.core.errors import ResourceError
from bien.gateway.remote.follow import Lost, Numbered

HIGH_WATER = 100_000  # messages, as engines have it
REPLAY_SECONDS = 10.0  # without a word of the answer
END = (-1).to_bytes(8, "big", signed=True)


def load_zmq() -> Any:
    """The library. ResourceError: it is not installed."""
    try:
        import zmq
        import zmq.asyncio
        import zmq.utils.monitor
    except ImportError:
        raise ResourceError(
            "KV events of other engines come over ZeroMQ, and pyzmq is not installed; "
            "install it (pip install 'bien[remote]'), or leave `events` out of the pool's engine"
        ) from None
    return zmq


class ZmqSource:
    """Made inside a running loop."""

    def __init__(self, events: str, replay: str | None, topic: str = "") -> None:
        """`events`: address of the publisher; behind "@", or with "*", it is ours and publishers connect."""
        zmq = self._zmq = load_zmq()
        self.replays = replay is not None
        self._replay = replay
        self._context = zmq.asyncio.Context()
        self._sub = self._socket(zmq.SUB)
        self._sub.set_hwm(HIGH_WATER)
        self._sub.subscribe(topic.encode())
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._items: asyncio.Queue[Union[Numbered, Lost]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        try:
            if events.startswith("@") or "*" in events:
                self._sub.bind(events.removeprefix("@"))
            else:
                self._sub.connect(events)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ResourceError(f"no KV events from {events}: {error}") from None
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def __aiter__(self) -> AsyncIterator[Union[Numbered, Lost]]:
        while True:
            yield await self._items.get()

    async def replay(self, start: int) -> list[Numbered] | None:
        found: list[Numbered] = []
        socket = self._socket(self._zmq.DEALER)
        try:
            socket.connect(self._replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_SECONDS):
                    # Newer engines put the topic before the number: count from the end.
                    *_, seq, payload = await socket.recv_multipart()
                if seq == END:
                    return found
                found.append(Numbered(int.from_bytes(seq, "big"), payload))
        except (TimeoutError, ValueError, self._zmq.ZMQError):
            return None
        finally:
            socket.close(linger=0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sub.disable_monitor()
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        return socket

    async def _receive(self) -> None:
        while True:
            frames = await self._sub.recv_multipart()
            # Short ones are nobody's: a payload that cannot be decoded has a number at least.
            if len(frames) >= 2 and len(frames[-2]) == 8:
                self._items.put_nowait(Numbered(int.from_bytes(frames[-2], "big"), frames[-1]))

    async def _watch(self) -> None:
        while True:
            await self._zmq.utils.monitor.recv_monitor_message(self._monitor)
            self._items.put_nowait(Lost())
