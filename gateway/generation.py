"""`Generation`: what `Gateway.generate` returns."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from bien.core.request import GenerateRequest
from bien.gateway.admission import Slot
from bien.gateway.stream import Stream

if TYPE_CHECKING:
    from bien.gateway.core import Gateway


class Generation:
    """Enter it for the stream, leave it to have done with the request."""

    __slots__ = ("_gateway", "_own", "_request", "_restart", "_slot", "_stream")

    def __init__(
        self,
        gateway: Gateway,
        request: GenerateRequest,
        slot: Slot | None,
        restart: Callable[[], None] | None,
    ) -> None:
        self._gateway = gateway
        self._request = request
        self._restart = restart
        self._slot = slot
        self._own = slot is None

    async def __aenter__(self) -> Stream:
        slot = self._slot = self._slot or self._gateway.admit()
        try:
            self._stream = await self._gateway.begin(self._request, slot, self._restart)
        except BaseException:
            self._release()
            raise
        return self._stream

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gateway.leave(self._stream)
        self._release()

    def _release(self) -> None:
        if self._own and self._slot is not None:
            self._slot.release()
