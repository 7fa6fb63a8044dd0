"""The endpoints' handlers: decode, take a slot, tokenise, generate, write."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable

from aiohttp import web

from bien.core import __version__
from bien.core.errors import OverloadError, UserError
from bien.core.request import GenerateRequest
from bien.core.speculation.counts import DraftCounts
from bien.gateway.http import errors
from bien.gateway.http.choices import Choices
from bien.gateway.http.served import SERVED, Served
from bien.gateway.http.sse import EventStream
from bien.gateway.parsing.events import Event, merged
from bien.gateway.protocols import chat, completions
from bien.gateway.protocols import messages as anthropic
from bien.gateway.protocols import responses as openai
from bien.gateway.protocols.acceptance import Speculation
from bien.gateway.protocols.ask import Answer, Ask, Choice
from bien.gateway.protocols.fields import MAX_SESSION_LENGTH
from bien.gateway.protocols.messages_answer import MessageAnswer
from bien.gateway.protocols.responses_answer import ResponseAnswer
from bien.gateway.protocols.scores import Score

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, chat.read, chat.ChatAnswer, "chatcmpl-")


async def text_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, completions.read, completions.CompletionAnswer, "cmpl-")


async def messages(request: web.Request) -> web.StreamResponse:
    anthropic.check_version(request.headers.get("anthropic-version"))
    return await _answer(request, anthropic.read, MessageAnswer, "msg_")


async def responses(request: web.Request) -> web.StreamResponse:
    return await _answer(request, openai.read, ResponseAnswer, "resp_")


async def models(request: web.Request) -> web.Response:
    found, anthropic_form = request.app[SERVED].models, errors.of_anthropic(request)
    return web.json_response(found.all_anthropic() if anthropic_form else found.all())


async def model(request: web.Request) -> web.Response:
    found, id = request.app[SERVED].models, request.match_info["id"]
    return web.json_response(found.one_anthropic(id) if errors.of_anthropic(request) else found.one(id))


async def health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", **request.app[SERVED].health()})


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
    check_media(request)
    ask = read(await request.read())
    served.models.check(ask.model)
    answer = answer_type(ask, prefix + uuid.uuid4().hex, int(served.epoch()))
    with served.gateway.admit(ask.n) as slot:
        work = await served.prompts.request(
            ask,
            answer.id,
            tenant=tenant_of(request),
            session=ask.session or _session(request),
            traceparent=_traceparent(request),
        )
        served.metrics.note(ask.notes)
        if ask.stream:
            with served.metrics.streams.track_inprogress():
                return await _stream(request, served, ask, answer, work, slot)
        with served.answers.one():
            return await _whole(served, ask, answer, work, slot)


async def _stream(
    request: web.Request, served: Served, ask: Ask, answer: Answer, work: GenerateRequest, slot: object
) -> web.StreamResponse:
    events = EventStream(request)
    events.headers |= ask.notes.headers()
    choices = Choices(served, ask, work)
    left, last = ask.n, b""

    async def one(index: int) -> None:
        nonlocal left, last
        progress, data, opened = choices.start(index), b"", False
        async with served.gateway.generate(choices.request(index), slot) as outputs:
            async for output in outputs:
                data = b""
                usage = None
                preface = None
                if not opened:
                    if not index:
                        events.headers |= _placement(outputs)
                    preface = await choices.began(index, output)
                piece = progress.take(output)
                if preface is not None:
                    opened = True
                    data = answer.opening(index, choices.usage)
                    if preface.text or preface.scores:
                        data += answer.piece(index, preface.text, None, choices.usage, preface.scores)
                if piece.text or piece.events or piece.scores or (ask.return_token_ids and piece.ids):
                    usage = choices.usage if ask.continuous_usage else None
                    ids = piece.ids if ask.return_token_ids else None
                    if progress.parsed:
                        data += answer.said(index, piece.events, ids, usage, piece.scores or None)
                    else:
                        data += answer.piece(index, piece.text, ids, usage, piece.scores or None)
                if progress.finish is not None:
                    break
                await events.write(data)
        speculation = _totals(ask, progress.drafts)
        data += answer.closing(index, progress.reason, choices.usage, speculation, progress.stop)
        left -= 1
        if left:
            await events.write(data)
        else:
            last = data

    try:
        with served.answers.one():
            await choices.run(one)
        choices.over()
        # Outside: a client that reads slowly must not hold an engine's place for what is over.
        return await events.end(last + answer.end(choices.usage, _alone(ask, choices)))
    except Exception as error:
        if not events.begun or isinstance(error, ConnectionResetError):
            raise
        return await events.end(answer.failed(errors.refusal(error, request)))


async def _whole(
    served: Served, ask: Ask, answer: Answer, work: GenerateRequest, slot: object
) -> web.StreamResponse:
    choices = Choices(served, ask, work)
    made: list[Choice] = [Choice("", "")] * ask.n

    async def one(index: int) -> None:
        progress = choices.start(index)
        texts: list[str] = []
        events: list[Event] = []
        ids: list[bytes] = []
        scores: list[Score] | None = None

        def restart() -> None:  # its client has seen nothing: another worker makes it anew
            nonlocal progress, scores
            progress, scores = choices.start(index), None
            texts.clear()
            events.clear()
            ids.clear()

        async with served.gateway.generate(choices.request(index), slot, restart) as outputs:
            async for output in outputs:
                if not texts:
                    preface = await choices.began(index, output)
                    texts.append(preface.text)
                    scores = None if preface.scores is None else list(preface.scores)
                piece = progress.take(output)
                texts.append(piece.text)
                events += piece.events
                if ask.return_token_ids:
                    ids.append(piece.ids)
                if piece.scores is not None:
                    scores = scores or []
                    scores += piece.scores
                if progress.finish is not None:
                    break
        token_ids = b"".join(ids) if ask.return_token_ids else None
        said = merged(events) if progress.parsed else None
        made[index] = Choice("".join(texts), progress.reason, token_ids, scores, progress.stop, said)

    await choices.run(one)
    choices.over()
    speculation = _totals(ask, choices.drafts)
    alone = _alone(ask, choices)
    body = answer.whole(made, choices.usage, speculation, choices.prompt_logprobs, alone)
    return web.Response(body=body, content_type="application/json", headers=ask.notes.headers())


def _totals(ask: Ask, drafts: DraftCounts | None) -> Speculation | None:
    return Speculation.of(drafts) if ask.return_token_ids and drafts is not None else None


def _alone(ask: Ask, choices: Choices) -> DraftCounts | None:
    """For metrics that are of one generation."""
    return choices.drafts if ask.n == 1 else None


def _placement(outputs: object) -> dict[str, str]:
    """Headers for who measures: the worker, and the cached tokens that the router expected there."""
    worker, decision = getattr(outputs, "worker", ""), getattr(outputs, "decision", None)
    if not worker or decision is None:
        return {}
    return {"x-bien-worker": worker, "x-bien-predicted-cached-tokens": str(decision.predicted_cached)}


def check_media(request: web.Request) -> None:
    """UnsupportedMedia for a body that says it is no JSON."""
    kind = request.content_type
    if "Content-Type" in request.headers and kind != "application/json":
        raise errors.UnsupportedMedia(
            f"Content-Type is {kind!r}; valid: 'application/json'", field="Content-Type"
        )


def tenant_of(request: web.Request) -> str:
    """A name for whoever holds the key; the key itself goes no further."""
    scheme, _, key = _header(request, "Authorization").partition(" ")
    if scheme.lower() != "bearer":
        key = ""
    key = key.strip() or _header(request, "x-api-key")
    return hashlib.blake2b(key.encode(), person=b"bien-api-key", digest_size=16).hexdigest() if key else ""


def _header(request: web.Request, name: str) -> str:
    """Empty without one. UserError for bytes that are no text: nobody could pass them on."""
    value = request.headers.get(name, "")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # aiohttp keeps a byte as a lone surrogate
        byte = ord(value[error.start]) & 0xFF
        raise UserError(
            f"header {name} holds the byte 0x{byte:02x}, which is no UTF-8; valid: text in UTF-8", field=name
        ) from None
    return value


def _session(request: web.Request) -> str:
    session = _header(request, "X-Session-ID")
    if len(session) > MAX_SESSION_LENGTH:
        raise UserError(
            f"X-Session-ID has {len(session)} characters; valid: at most {MAX_SESSION_LENGTH}",
            field="X-Session-ID",
        )
    return session


def _traceparent(request: web.Request) -> str:
    value = request.headers.get("traceparent", "")
    return value if _TRACEPARENT.fullmatch(value) else ""
