"""Errors as clients expect them, in their API's form and with the right status."""

from __future__ import annotations

import logging
import math

from aiohttp import web

from bien.core.errors import BienError, OverloadError, UserError
from bien.gateway.protocols.refusal import Refusal

log = logging.getLogger("bien.gateway")


class UnsupportedMedia(UserError):
    status = 415
    code = "unsupported_media_type"


def refusal(error: Exception) -> Refusal:
    """What was not raised on purpose is logged, and its text kept from the client."""
    if isinstance(error, BienError):
        field = error.field if isinstance(error, UserError) else None
        return Refusal(error.status, str(error), error.code, field)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return Refusal(413, f"the body is too large. {error.text}", "request_too_large")
    if isinstance(error, web.HTTPException):
        return Refusal(error.status, error.text or error.reason)
    log.error("request failed", exc_info=error)
    return Refusal(500, "internal error; the server's log has the details", "internal_error")


def response(error: Exception, anthropic_id: str | None = None) -> web.Response:
    """`anthropic_id`: of a request to Anthropic's API; None: to OpenAI's."""
    found = refusal(error)
    text = found.openai() if anthropic_id is None else found.anthropic(anthropic_id)
    answer = web.Response(status=found.status, body=text, content_type="application/json")
    if isinstance(error, OverloadError):
        answer.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
        answer.headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after * 1000)))
    if isinstance(error, web.HTTPMethodNotAllowed):
        answer.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    return answer
