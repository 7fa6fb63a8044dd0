"""`EventPublisher`: real ZeroMQ sockets that publish KV events as vLLM does, of whatever bytes."""

from __future__ import annotations

import asyncio
from typing import Any

from bien.gateway.remote.zmq_source import END, load_zmq


class EventPublisher:
    """PUB and ROUTER; `long` with the topic in its replays, as newer ones. Made inside a running loop;
    ResourceError without the library."""

    def __init__(self, events: str, replay: str, long: bool = True, topic: bytes = b"kv@here") -> None:
        zmq = load_zmq()
        self.events, self.replay, self.topic = events, replay, topic
        self.kept: list[tuple[int, bytes]] = []  # number, payload: what it can replay
        self.subscribers = 0  # as they have said, since it was made
        self.asked: list[int] = []  # first numbers of the replays that were asked for
        self._zmq = zmq
        self._long = long
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # which says who subscribes
        self._pub.set_hwm(100_000)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._pub.bind(events)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(replay)
        self._told = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._answer()), loop.create_task(self._listen())]

    async def subscribed(self, seconds: float = 20.0) -> bool:
        """Wait, at most so long, for somebody who listens."""
        try:
            async with asyncio.timeout(seconds):
                await self._told.wait()
        except TimeoutError:
            pass
        return self.subscribers > 0

    async def publish(self, seq: int, payload: bytes, *, keep: bool = True, send: bool = True) -> None:
        if keep:
            self.kept.append((seq, payload))
        if send:
            await self._pub.send_multipart([self.topic, seq.to_bytes(8, "big"), payload])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _listen(self) -> None:
        while True:
            word: Any = await self._pub.recv()
            if word[:1] == b"\x01":
                self.subscribers += 1
                self._told.set()

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            topic = [self.topic] if self._long else []
            for seq, payload in self.kept:
                if seq >= first:
                    await self._router.send_multipart([client, b"", *topic, seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", *([b""] if self._long else []), END, b""])
