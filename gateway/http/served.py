"""`Served`: what the handlers of one application share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from bien.core.errors import OverloadError
from bien.core.request import GenerateRequest
from bien.core.worker.messages import Output
from bien.gateway.http.metrics import HttpMetrics
from bien.gateway.prompt import Prompts
from bien.gateway.protocols.models import Models


class Generator(Protocol):
    """The part of `bien.gateway.core.Gateway` that the shell uses."""

    @property
    def ready(self) -> bool:
        """Whether it would take a request now."""
        ...

    def admit(self, places: int = 1) -> AbstractContextManager[Any]:
        """A slot to work on one request, with so many generations at a time; OverloadError when there is
        none."""
        ...

    def generate(
        self, request: GenerateRequest, slot: Any = None, restart: Callable[[], None] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterable[Output]]:
        """Outputs of one generation. Leaving before its end aborts it. `restart` is called when all comes
        again from the start, because a worker died; without it such a death ends what had begun."""
        ...


class Answers:
    """Those under way: a server that closes ends them, and tells their clients."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """The current task makes an answer. OverloadError when a closing server ends it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._closing:  # its client has left
                raise
            task.uncancel()
            raise OverloadError("this server is shutting down") from None
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()


@dataclass(slots=True)
class Served:
    gateway: Generator
    prompts: Prompts
    models: Models
    metrics: HttpMetrics
    epoch: Callable[[], float]  # seconds since 1970
    health: Callable[[], dict[str, Any]] = dict  # what /health says beside its status
    draining: bool = False  # set by the server; no new generations then
    answers: Answers = field(default_factory=Answers)


SERVED = web.AppKey("served", Served)
