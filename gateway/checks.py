"""What a request must be like before work is spent on it. Every error names field, value and choices."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from bien.core.errors import ContextLengthError, UserError
from bien.core.request import GenerateRequest, TokenIds
from bien.core.worker.messages import WorkerInfo

LEAST_REPETITION = 0.01  # smaller ones would take logits out of float32, and with them the step's others
MAX_LOGPROBS = 20  # alternatives per token, as in OpenAI's chat: an answer's size is bounded by it
# Tokens of a prompt whose log-probabilities may be asked for: they are computed whatever is cached, and
# held until the answer begins.
MAX_SCORED_TOKENS = 8192


def check_parameters(request: GenerateRequest) -> None:
    """UserError when prompt or sampling parameters make no sense on any worker."""
    s = request.sampling
    if not request.prompt_tokens:
        raise UserError("the prompt is empty; valid: at least one token", field="prompt")
    if not (math.isfinite(s.temperature) and s.temperature >= 0):
        raise _wrong("temperature", s.temperature, "a number from 0 (greedy)")
    if not 0 < s.top_p <= 1:
        raise _wrong("top_p", s.top_p, "a number above 0, up to 1")
    if s.top_k < 0:
        raise _wrong("top_k", s.top_k, "0 (off) or more")
    if s.max_tokens < 1:
        raise _wrong("max_tokens", s.max_tokens, "1 or more")
    if not 0 <= s.min_tokens <= s.max_tokens:
        raise _wrong("min_tokens", s.min_tokens, f"0 to max_tokens ({s.max_tokens})")
    if not 0 <= s.min_p <= 1:
        raise _wrong("min_p", s.min_p, "a number from 0 (off) to 1")
    if not LEAST_REPETITION <= s.repetition_penalty <= 2:
        raise _wrong("repetition_penalty", s.repetition_penalty, f"{LEAST_REPETITION} to 2 (1: off)")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(s, name) <= 2:
            raise _wrong(name, getattr(s, name), "-2 to 2")
    if not -1 <= s.logprobs <= MAX_LOGPROBS:
        raise _wrong("logprobs", s.logprobs, f"-1 (none) to {MAX_LOGPROBS}")
    if not -1 <= s.prompt_logprobs <= MAX_LOGPROBS:
        raise _wrong("prompt_logprobs", s.prompt_logprobs, f"-1 (none) to {MAX_LOGPROBS}")
    if s.prompt_logprobs >= 0 and request.prompt_tokens > MAX_SCORED_TOKENS:
        raise UserError(
            f"prompt_logprobs of a prompt of {request.prompt_tokens} tokens; "
            f"valid: of at most {MAX_SCORED_TOKENS}",
            field="prompt_logprobs",
        )
    if not 0 <= s.choice < 1 << 32:
        raise _wrong("choice", s.choice, "0 to 2^32 - 1")
    for token, bias in s.logit_bias:
        if not (-100 <= bias <= 100 and token >= 0):
            raise _wrong("logit_bias", f"{bias} for token {token}", "-100 to 100 for token ids, 0 or more")
    if s.seed is not None and not -(1 << 63) <= s.seed < 1 << 63:
        raise _wrong("seed", s.seed, "a 64-bit integer")


def check_fits(request: GenerateRequest, infos: Iterable[WorkerInfo]) -> None:
    """ContextLengthError when no worker can hold it, UserError when a token id is none of theirs."""
    infos = list(infos)
    limit = max(map(context_limit, infos))
    output = request.sampling.max_tokens
    if request.prompt_tokens + output > limit:
        field = "prompt" if request.prompt_tokens >= limit else "max_tokens"
        raise ContextLengthError(
            f"{request.prompt_tokens} prompt tokens and max_tokens {output} are more than the context holds; "
            f"valid: {limit} tokens in all",
            field=field,
        )
    if not isinstance(request.prompt, TokenIds):
        return
    vocabulary = max(info.vocab_size for info in infos)
    if vocabulary:
        highest = int(np.frombuffer(request.prompt.packed, "<u4").max())
        if highest >= vocabulary:
            raise UserError(
                f"the prompt holds token id {highest}; valid: 0 to {vocabulary - 1}", field="prompt"
            )


def context_limit(info: WorkerInfo) -> int:
    """Tokens of prompt and output that one request may have there (its context, its cache)."""
    return min(info.max_context or 1 << 62, info.capacity_tokens or 1 << 62)


def _wrong(field: str, value: object, valid: str) -> UserError:
    return UserError(f"{field} is {value}; valid: {valid}", field=field)
