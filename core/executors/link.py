"""`Link`: a socket between rank 0 and one other rank that carries framed messages, with blocking calls."""

from __future__ import annotations

import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")
_SIZE = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()


class LinkClosed(Exception):
    """The other side has closed it, or is gone."""


class Link(Generic[T]):
    """One thread sends and one receives."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        """`kind`: the type of the messages that come in."""
        sock.setblocking(True)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def send(self, message: Any) -> None:
        self.send_packed(pack(message))

    def send_packed(self, frame: bytes) -> None:
        """What `pack` made, so that several links need it only once."""
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise LinkClosed(str(error)) from None

    def receive(self) -> T:
        """The next message. LinkClosed at the end, or when what comes is none."""
        (size,) = _SIZE.unpack(self._read(_SIZE.size))
        try:
            return self._decoder.decode(self._read(size))
        except (msgspec.DecodeError, MemoryError, OverflowError) as error:
            raise LinkClosed(f"not a message: {error}") from None

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        except OSError:
            pass
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            try:
                n = self._socket.recv_into(view[at:])
            except OSError as error:
                raise LinkClosed(str(error)) from None
            if not n:
                raise LinkClosed("its end")
            at += n
        return data


def pack(message: Any) -> bytes:
    """A message with its length before it."""
    buffer = bytearray(_SIZE.size)
    _encoder.encode_into(message, buffer, _SIZE.size)
    _SIZE.pack_into(buffer, 0, len(buffer) - _SIZE.size)
    return bytes(buffer)
