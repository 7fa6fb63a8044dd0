"""Framing: a uint32-LE length, then one msgpack value of `ToWorker` or `FromWorker`. No I/O here."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec

from bien.core.worker.messages import FromWorker, ToWorker

MAX_JOIN = 4096
"""Largest frame from a peer that has not proved itself yet."""
MAX_TO_WORKER = 16 << 20
MAX_FROM_WORKER = 256 << 20
"""Snapshots are the large ones: 16 bytes per cached block."""

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


class WireError(Exception):
    """The peer sent what is no frame of this protocol; the connection must be closed."""


def frame(message: Any) -> bytearray:
    """One message as bytes for the wire. A fresh buffer each time: a transport may keep it."""
    buffer = bytearray(4)
    _encoder.encode_into(message, buffer, 4)
    buffer[:4] = (len(buffer) - 4).to_bytes(4, "little")
    return buffer


class FrameReader(Generic[T]):
    """Turns received bytes into messages, however they were cut."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], limit: int) -> None:
        self.limit = limit  # largest frame; the owner may raise it
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> list[T]:
        """Every message that `data` completes, in order. WireError: too large or not decodable."""
        buffer = self._buffer
        buffer += data
        messages: list[T] = []
        at, end = 0, len(buffer)
        with memoryview(buffer) as view:
            while end - at >= 4:
                size = int.from_bytes(view[at : at + 4], "little")
                if size > self.limit:
                    raise WireError(f"a frame of {size} bytes; at most {self.limit} are allowed")
                if end - at - 4 < size:
                    break
                messages.append(self._decode(view[at + 4 : at + 4 + size]))
                at += 4 + size
        if at:
            del buffer[:at]
        return messages

    def _decode(self, body: memoryview) -> T:
        with body:
            try:
                return self._decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise WireError(f"a frame of {len(body)} bytes is not decodable: {error}") from None


def to_worker_reader() -> FrameReader[ToWorker]:
    """The worker's side; its limit is `MAX_JOIN` until the gateway has joined."""
    return FrameReader(_to_worker, MAX_JOIN)


def from_worker_reader() -> FrameReader[FromWorker]:
    """The gateway's side; who dials lowers its limit to `MAX_JOIN` until the worker has proved itself."""
    return FrameReader(_from_worker, MAX_FROM_WORKER)


def tune(transport: asyncio.BaseTransport) -> None:
    """No waiting to fill packets; a peer on a dead host is noticed within about a minute."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
