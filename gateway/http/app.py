"""`make_app`: the routes, and what holds for every request: ids, error bodies, counts."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from bien.core.clock import WallClock
from bien.core.deployment import VOLATILE_LINES
from bien.core.errors import nearest
from bien.core.text.model import TextModel
from bien.gateway.http import errors, handlers, tokens
from bien.gateway.http.metrics import HttpMetrics
from bien.gateway.http.served import SERVED, Generator, Served
from bien.gateway.parsing.dialects import Dialect
from bien.gateway.parsing.parser import Parser
from bien.gateway.prompt import Prompts
from bien.gateway.protocols.models import Models

MAX_BODY_BYTES = 64 << 20

ROUTES: tuple[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]], ...] = (
    ("POST", "/v1/chat/completions", handlers.chat_completions),
    ("POST", "/v1/completions", handlers.text_completions),
    ("POST", "/v1/responses", handlers.responses),
    ("POST", "/v1/messages", handlers.messages),
    ("POST", "/v1/messages/count_tokens", tokens.count_tokens),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("GET", "/v1/models", handlers.models),
    ("GET", "/v1/models/{id:.+}", handlers.model),
    ("GET", "/health", handlers.health),
    ("GET", "/ready", handlers.ready),
    ("GET", "/metrics", handlers.metrics),
    ("GET", "/version", handlers.version),
)
_PATTERN = re.compile(r":[^}]*}")  # in a route: what a part of its path must match
_PLAIN = re.compile(r"[\x21-\x7e]{1,128}")


def make_app(
    gateway: Generator,
    text: TextModel,
    model_name: str,
    *,
    max_context: int,
    vocab_size: int | None = None,
    refuses: Iterable[str] = (),
    registry: CollectorRegistry | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    epoch: Callable[[], float] | None = None,
    health: Callable[[], dict[str, Any]] = dict,
    parser: Parser | None = None,
    volatile_lines: Iterable[str] = VOLATILE_LINES,
) -> web.Application:
    """The application of one gateway and one model.

    `max_context` and `vocab_size` (None: the tokenizer's) limit requests; `refuses`: fields of them that a
    worker cannot serve; `registry` is what /metrics shows; `epoch` gives seconds since 1970; `health` what
    /health says beside its status; `parser` reads answers to conversations (None: they are text);
    `volatile_lines`: patterns of what is taken out of system prompts.
    """
    epoch = epoch or WallClock().epoch
    app = web.Application(client_max_size=max_body_bytes, middlewares=[_frame])
    dialect = Dialect(parser, text) if parser is not None else None
    prompts = Prompts(
        text,
        max_context=max_context,
        vocab_size=vocab_size,
        dialect=dialect,
        volatile_lines=volatile_lines,
    )
    app[SERVED] = Served(
        gateway=gateway,
        prompts=prompts,
        models=Models(model_name, int(epoch()), max_context, prompts.vocab_size, refuses),
        metrics=HttpMetrics(registry or CollectorRegistry(), text.tails),
        epoch=epoch,
        health=health,
    )
    for method, path, handler in ROUTES:
        app.router.add_route(method, path, handler)
        if method == "GET":
            app.router.add_route("HEAD", path, handler)
    app.on_response_prepare.append(_prepare)
    return app


@web.middleware
async def _frame(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    counts = request.app[SERVED].metrics
    given = request.headers.get("x-request-id", "")
    request[errors.REQUEST_ID] = given if _PLAIN.fullmatch(given) else uuid.uuid4().hex
    status = 499
    try:
        response = await handler(request)
        status = response.status
        return response
    except ConnectionResetError:  # the client left in the middle of a write: nobody is there to answer
        return web.Response(status=499)
    except Exception as error:
        refusal = errors.response(_explained(error, request), request)
        status = refusal.status
        return refusal
    finally:
        counts.count(request, status)


async def _prepare(request: web.Request, response: web.StreamResponse) -> None:
    id = request.get(errors.REQUEST_ID) or uuid.uuid4().hex
    response.headers["x-request-id"] = id
    if errors.of_anthropic(request):
        response.headers["request-id"] = id


def _explained(error: Exception, request: web.Request) -> Exception:
    """The router's refusals, with what would have been valid."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        valid = ", ".join(sorted(error.allowed_methods))
        error.text = f"{request.method} is not allowed on {request.path}; valid: {valid}"
    elif isinstance(error, web.HTTPNotFound):
        paths = (_PATTERN.sub("}", path) for _, path, _ in ROUTES)
        error.text = f"no such path: {request.path}; {nearest(request.path, paths)}"
    return error
