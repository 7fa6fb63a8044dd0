"""`Refusal`: why there is no answer, and how each API writes it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

_OPENAI = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(slots=True, frozen=True)
class Refusal:
    status: int  # of HTTP
    message: str
    code: str | None = None
    field: str | None = None  # of the request
    too_long: tuple[int, int] | None = None  # tokens of the prompt, and how many it may have
    request_id: str = ""

    @property
    def client_fault(self) -> bool:
        return self.status < 500

    def openai(self) -> bytes:
        """{"error": {message, type, param, code}}"""
        kind = _OPENAI.get(self.status) or ("invalid_request_error" if self.client_fault else "server_error")
        error = {"message": self._text, "type": kind, "param": self.field, "code": self.code}
        return msgspec.json.encode({"error": error})

    def anthropic(self) -> bytes:
        """{"type": "error", "error": {type, message}, request_id}"""
        kind = _ANTHROPIC.get(self.status) or ("invalid_request_error" if self.client_fault else "api_error")
        message = self._text
        if self.too_long is not None:  # the words by which clients know that they must compact
            message = "prompt is too long: {} tokens > {} maximum".format(*self.too_long)
        error = {"type": kind, "message": message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": self.request_id})

    def event(self) -> bytes:
        """The last event of a stream of chat or text completions that failed."""
        return b"data: " + self.openai() + b"\n\n"

    @property
    def _text(self) -> str:
        return self.message.encode(errors="backslashreplace").decode()  # it may quote a path of any bytes
