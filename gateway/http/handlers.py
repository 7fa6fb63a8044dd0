"""The endpoints' handlers: decode, take a slot, tokenise, generate, write."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable

from aiohttp import web

from bien.core import __version__
from bien.core.errors import OverloadError, UserError, WorkerDiedError
from bien.core.request import GenerateRequest, TokenIds
from bien.gateway.http import errors
from bien.gateway.http.progress import Progress
from bien.gateway.http.scoring import Scoring
from bien.gateway.http.served import SERVED, Served
from bien.gateway.http.sse import EventStream
from bien.gateway.protocols import chat, completions
from bien.gateway.protocols.ask import Answer, Ask
from bien.gateway.protocols.fields import MAX_SESSION_LENGTH
from bien.gateway.protocols.scores import Score

ATTEMPTS = 3  # of an answer that is not streamed, when its worker dies
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, chat.read, chat.ChatAnswer, "chatcmpl-")


async def text_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, completions.read, completions.CompletionAnswer, "cmpl-")


async def models(request: web.Request) -> web.Response:
    return web.json_response(request.app[SERVED].models.all())


async def model(request: web.Request) -> web.Response:
    return web.json_response(request.app[SERVED].models.one(request.match_info["id"]))


async def health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    served = request.app[SERVED]
    if served.draining:
        raise OverloadError("this server is shutting down")
    if not served.gateway.ready:
        raise OverloadError("no worker is ready")
    return web.json_response({"status": "ready"})


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": __version__})


async def metrics(request: web.Request) -> web.Response:
    return request.app[SERVED].metrics.page(request)


async def _answer(
    request: web.Request,
    read: Callable[[bytes], Ask],
    answer_type: Callable[[Ask, str, int], Answer],
    prefix: str,
) -> web.StreamResponse:
    served = request.app[SERVED]
    if served.draining:
        raise OverloadError("this server is shutting down")
    _check_media(request)
    ask = read(await request.read())
    served.models.check(ask.model)
    answer = answer_type(ask, prefix + uuid.uuid4().hex, int(served.epoch()))
    with served.gateway.admit() as slot:
        work = await served.prompts.request(
            ask,
            answer.id,
            tenant=_tenant(request),
            session=ask.session or _session(request),
            traceparent=_traceparent(request),
        )
        if ask.stream:
            with served.metrics.streams.track_inprogress():
                return await _stream(request, served, ask, answer, work, slot)
        with served.answers.one():
            return await _whole(served, ask, answer, work, slot)


async def _stream(
    request: web.Request, served: Served, ask: Ask, answer: Answer, work: GenerateRequest, slot: object
) -> web.StreamResponse:
    events = EventStream(request)
    progress = _progress(served, ask, work)
    data = b""
    try:
        with served.answers.one():
            async with served.gateway.generate(work, slot) as outputs:
                async for output in outputs:
                    piece = progress.take(output)
                    data = b"" if events.begun else answer.opening()
                    if not events.begun:
                        events.headers |= _placement(outputs)
                    if piece.text or piece.scores or (ask.return_token_ids and piece.ids):
                        usage = progress.usage if ask.continuous_usage else None
                        ids = piece.ids if ask.return_token_ids else None
                        data += answer.piece(piece.text, ids, usage, piece.scores)
                    if progress.finish is not None:
                        break
                    await events.write(data)
        # Outside: a client that reads slowly must not hold an engine's place for what is over.
        speculation = progress.speculation if ask.return_token_ids else None
        return await events.end(data + answer.closing(progress.reason, progress.usage, speculation))
    except Exception as error:
        if not events.begun or isinstance(error, ConnectionResetError):
            raise
        return await events.end(errors.event(error))


async def _whole(
    served: Served, ask: Ask, answer: Answer, work: GenerateRequest, slot: object
) -> web.StreamResponse:
    for attempt in range(ATTEMPTS):
        texts: list[str] = []
        ids: list[bytes] = []
        scores: list[Score] | None = None
        progress = _progress(served, ask, work)
        try:
            async with served.gateway.generate(work, slot) as outputs:
                async for output in outputs:
                    piece = progress.take(output)
                    texts.append(piece.text)
                    if ask.return_token_ids:
                        ids.append(piece.ids)
                    if piece.scores is not None:
                        scores = scores or []
                        scores += piece.scores
                    if progress.finish is not None:
                        break
            break
        except WorkerDiedError:  # its client has seen nothing: another worker may do it
            if attempt == ATTEMPTS - 1 or not texts:  # without a token the gateway has tried several already
                raise
    body = answer.whole(
        "".join(texts),
        b"".join(ids) if ask.return_token_ids else None,
        progress.reason,
        progress.usage,
        progress.speculation if ask.return_token_ids else None,
        scores,
    )
    return web.Response(body=body, content_type="application/json")


def _progress(served: Served, ask: Ask, work: GenerateRequest) -> Progress:
    assert isinstance(work.prompt, TokenIds)
    scoring = None if ask.logprobs is None else Scoring(served.prompts.text.tokenizer)
    return Progress(work.prompt_tokens, served.prompts.output(ask, work.prompt), scoring)


def _placement(outputs: object) -> dict[str, str]:
    """Headers for who measures: the worker, and the cached tokens that the router expected there."""
    worker, decision = getattr(outputs, "worker", ""), getattr(outputs, "decision", None)
    if not worker or decision is None:
        return {}
    return {"x-bien-worker": worker, "x-bien-predicted-cached-tokens": str(decision.predicted_cached)}


def _check_media(request: web.Request) -> None:
    kind = request.content_type
    if "Content-Type" in request.headers and kind != "application/json":
        raise errors.UnsupportedMedia(
            f"Content-Type is {kind!r}; valid: 'application/json'", field="Content-Type"
        )


def _tenant(request: web.Request) -> str:
    """A name for whoever holds the key; the key itself goes no further."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = ""
    key = key.strip() or request.headers.get("x-api-key", "")
    return hashlib.blake2b(key.encode(), person=b"bien-api-key", digest_size=16).hexdigest() if key else ""


def _session(request: web.Request) -> str:
    session = request.headers.get("X-Session-ID", "")
    if len(session) > MAX_SESSION_LENGTH:
        raise UserError(
            f"X-Session-ID has {len(session)} characters; valid: at most {MAX_SESSION_LENGTH}",
            field="X-Session-ID",
        )
    return session


def _traceparent(request: web.Request) -> str:
    value = request.headers.get("traceparent", "")
    return value if _TRACEPARENT.fullmatch(value) else ""
