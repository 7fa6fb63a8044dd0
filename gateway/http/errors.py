"""Errors as clients expect them, in their API's form and with the right status."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from aiohttp import web

from bien.core.errors import BienError, ContextLengthError, OverloadError, UserError
from bien.gateway.protocols.refusal import Refusal

REQUEST_ID = web.RequestKey("request_id", str)
log = logging.getLogger("bien.gateway")


class UnsupportedMedia(UserError):
    status = 415
    code = "unsupported_media_type"


def of_anthropic(request: web.Request) -> bool:
    """Whether a request speaks Anthropic's API: by its path, or where both have it by a header of theirs."""
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def refusal(error: Exception, request: web.BaseRequest | None = None) -> Refusal:
    """What was not raised on purpose is logged, and its text kept from the client."""
    found = _refusal(error)
    return found if request is None else replace(found, request_id=request.get(REQUEST_ID, ""))


def response(error: Exception, request: web.Request) -> web.Response:
    found = refusal(error, request)
    text = found.anthropic() if of_anthropic(request) else found.openai()
    status = 529 if of_anthropic(request) and isinstance(error, OverloadError) else found.status
    answer = web.Response(status=status, body=text, content_type="application/json")
    if isinstance(error, OverloadError):
        answer.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
        answer.headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after * 1000)))
    if isinstance(error, web.HTTPMethodNotAllowed):
        answer.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    return answer


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, BienError):
        field = error.field if isinstance(error, UserError) else None
        size = (error.tokens, error.most) if isinstance(error, ContextLengthError) and error.tokens else None
        return Refusal(error.status, str(error), error.code, field, size)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return Refusal(413, f"the body is too large. {error.text}", "request_too_large")
    if isinstance(error, web.HTTPException):
        return Refusal(error.status, error.text or error.reason)
    log.error("request failed", exc_info=error)
    return Refusal(500, "internal error; the server's log has the details", "internal_error")
