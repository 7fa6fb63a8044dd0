"""`Served`: what the handlers of one application share."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

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

    def admit(self) -> AbstractContextManager[Any]:
        """A slot to work on one request; OverloadError when there is none."""
        ...

    def generate(
        self, request: GenerateRequest, slot: Any = None
    ) -> AbstractAsyncContextManager[AsyncIterable[Output]]:
        """Outputs of one generation. Leaving before its end aborts it."""
        ...


@dataclass(slots=True)
class Served:
    gateway: Generator
    prompts: Prompts
    models: Models
    metrics: HttpMetrics
    epoch: Callable[[], float]  # seconds since 1970
    draining: bool = False  # set by the server when it closes


SERVED = web.AppKey("served", Served)
