"""Errors as OpenAI clients expect them: {"error": {message, type, param, code}} and the right status."""

from __future__ import annotations

import logging
import math

import msgspec
from aiohttp import web

from bien.core.errors import BienError, OverloadError, UserError

log = logging.getLogger("bien.gateway")

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class UnsupportedMedia(UserError):
    status = 415
    code = "unsupported_media_type"


def body(message: str, status: int, code: str | None = None, param: str | None = None) -> bytes:
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    message = message.encode(errors="backslashreplace").decode()  # it may quote a path of any bytes
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def describe(error: Exception) -> tuple[int, bytes]:
    """Status and body. What was not raised on purpose is logged, and its text kept from the client."""
    if isinstance(error, BienError):
        field = error.field if isinstance(error, UserError) else None
        return error.status, body(str(error), error.status, error.code, field)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return 413, body(f"the body is too large. {error.text}", 413, "request_too_large")
    if isinstance(error, web.HTTPException):
        return error.status, body(error.text or error.reason, error.status)
    log.error("request failed", exc_info=error)
    return 500, body("internal error; the server's log has the details", 500, "internal_error")


def response(error: Exception) -> web.Response:
    status, text = describe(error)
    answer = web.Response(status=status, body=text, content_type="application/json")
    if isinstance(error, OverloadError):
        answer.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
        answer.headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after * 1000)))
    if isinstance(error, web.HTTPMethodNotAllowed):
        answer.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    return answer


def event(error: Exception) -> bytes:
    """The last event of a stream that failed."""
    return b"data: " + describe(error)[1] + b"\n\n"
