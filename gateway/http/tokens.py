"""Prompts without answers: Anthropic's count_tokens, and vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from aiohttp import web

from bien.core.worker.threads import in_thread
from bien.gateway.http.handlers import check_media, tenant_of
from bien.gateway.http.served import SERVED
from bien.gateway.protocols import messages, tokens


async def count_tokens(request: web.Request) -> web.Response:
    """What the same request to /v1/messages has as its prompt, to the token."""
    served = request.app[SERVED]
    check_media(request)
    ask = messages.read_count(await request.read())
    served.models.check(ask.model)
    with served.gateway.admit(1):
        ids = await served.prompts.encode(ask, tenant=tenant_of(request))
    return web.json_response({"input_tokens": len(ids)})


async def tokenize(request: web.Request) -> web.Response:
    served = request.app[SERVED]
    check_media(request)
    asked = tokens.read_tokenize(await request.read(), served.models.name)
    served.models.check(asked.ask.model)
    with served.gateway.admit(1):
        ids = await served.prompts.encode(asked.ask, tenant=tenant_of(request))
        names = served.prompts.text.tokenizer.piece
        return web.Response(
            body=await in_thread(tokens.tokenized, asked, ids, served.prompts.max_context, names),
            content_type="application/json",
        )


async def detokenize(request: web.Request) -> web.Response:
    served = request.app[SERVED]
    check_media(request)
    asked = tokens.read_detokenize(await request.read(), served.models.name)
    served.models.check(asked.model)
    with served.gateway.admit(1):
        text = await served.prompts.echo(asked, await served.prompts.encode(asked, "tokens"))
    return web.json_response({"prompt": text})
