"""`Dialect`: what a kind of server is asked, and how it answers. Subclass it for a server of another kind.

Generations go to `/v1/completions`, with the prompt as token ids: the router knows the very tokens, whatever
template or tokenizer the server would have used. Answers are token ids where the server gives them; else its
text is passed on as it is, because a text does not say which tokens made it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from bien.core.errors import UserError
from bien.core.request import GenerateRequest, SamplingParams, TokenIds

_EXTENSIONS = ("top_k", "min_p", "min_tokens", "ignore_eos", "repetition_penalty", "stop_token_ids")
_OFF = SamplingParams()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached(self) -> int:
        """-1: the server does not say."""
        details = self.prompt_tokens_details
        return -1 if details is None or details.cached_tokens is None else details.cached_tokens


class Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or string
    matched_stop: int | str | None = None


class Chunk(msgspec.Struct):
    """One event of a streamed answer."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class Readings(msgspec.Struct):
    """What a server's /metrics say. None: nothing of it."""

    running: int | None = None
    waiting: int | None = None
    usage: float | None = None  # share of the KV blocks that are in use
    blocks: int | None = None
    block_tokens: int | None = None


class Dialect:
    """An OpenAI-compatible server of which nothing else is known."""

    health = "/v1/models"
    metrics: str | None = None
    path = "/v1/completions"
    extensions = False  # whether it takes sampling parameters beyond OpenAI's, by vLLM's names
    salts = False  # whether it takes `cache_salt`
    token_ids = False  # whether it takes `return_token_ids`
    top_k_off = 0  # what says "any token" there

    @property
    def refuses(self) -> tuple[str, ...]:
        """Fields of our API that requests may not use here."""
        always = ("trace_decode_token_ids", "logprobs", "prompt_logprobs")
        ids = () if self.token_ids else ("return_token_ids",)
        return (*always, *ids, *(() if self.extensions else _EXTENSIONS))

    def headers(self, rank: int | None) -> dict[str, str]:
        """`rank`: None where the server has one only."""
        return {}

    def body(self, model: str, request: GenerateRequest, rank: int | None, salt: str) -> dict[str, Any]:
        """The JSON of one generation. UserError: it asks for what the server cannot do."""
        s, prompt = request.sampling, request.prompt
        self._check(request)
        assert isinstance(prompt, TokenIds)
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt.ids().tolist(),
            "max_tokens": s.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if s.temperature > 0 and s.seed is not None:
            body["seed"] = _seed(s)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(s, name):
                body[name] = getattr(s, name)
        if s.logit_bias:
            body["logit_bias"] = {str(token): value for token, value in s.logit_bias}
        if self.extensions:
            body["top_k"] = s.top_k or self.top_k_off
            for name in _EXTENSIONS[1:]:
                if getattr(s, name) != getattr(_OFF, name):
                    body[name] = getattr(s, name)
        if self.token_ids:
            body["return_token_ids"] = True
        if salt:
            body["cache_salt"] = salt
        return body

    def read(self, data: bytes) -> Chunk:
        """One event of the answer. msgspec.DecodeError: it is none."""
        return _chunk.decode(data)

    def readings(self, samples: Mapping[str, float], labels: Mapping[str, Mapping[str, str]]) -> Readings:
        """From /metrics: the sum over each name's samples, and the labels of its last one."""
        return Readings()

    def _check(self, request: GenerateRequest) -> None:
        s = request.sampling
        if not isinstance(request.prompt, TokenIds):
            raise UserError(
                "the prompt is no token ids; valid: token ids, for a server that is no simulation"
            )
        if request.forced is not None:
            raise UserError(
                "this model is served by a remote engine, which cannot be told its output; "
                "valid: requests without trace_decode_token_ids",
                field="trace_decode_token_ids",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(s, name) >= 0:
                raise UserError(
                    f"this model is served by a remote engine, whose {name} are not passed on; "
                    f"valid: requests without {name}",
                    field=name,
                )
        for name in () if self.extensions else _EXTENSIONS:
            if getattr(s, name) != getattr(_OFF, name):
                raise UserError(
                    f"{name} is {getattr(s, name)}; valid: {getattr(_OFF, name)!r}, because this model is "
                    "served by an engine that takes no parameters beyond OpenAI's",
                    field=name,
                )


def salt_of(key: bytes) -> str:
    """What keeps a tenant's blocks apart inside an engine: says nothing of the key of its chain."""
    return hashlib.blake2b(key, person=b"bien-salt", digest_size=24).hexdigest()


def _seed(s: SamplingParams) -> int:
    # Answers of one seed draw independently; engines know one seed per request.
    if not s.choice:
        return s.seed or 0
    mixed = hashlib.blake2b(f"{s.seed}/{s.choice}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "big") >> 1


_chunk = msgspec.json.Decoder(Chunk)
