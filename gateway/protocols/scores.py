"""Log-probabilities of an answer's tokens, in the two shapes of OpenAI's API, and of a prompt's in vLLM's.

One entry per token that counts, the stop token included, but none for those that a stop string cut off with
the text. With `top` alternatives asked for, chat lists
exactly these; completions add the token itself where it is none of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say; vLLM's


class Entry(msgspec.Struct):
    """A token as chat shows it."""

    token: str
    logprob: float
    bytes: list[int]


class Content(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Entry]


@dataclass(slots=True)
class Score:
    token: str
    data: bytes
    logprob: float | None  # None: nothing comes before it
    offset: int = 0  # characters of the answer before it
    top: list[Score] = field(default_factory=list)  # likeliest first
    id: int = -1
    rank: int = 0  # 1: none is likelier; 0: not counted


def chat_logprobs(scores: Iterable[Score]) -> bytes:
    """The `logprobs` of a chat choice."""
    content = [
        Content(
            s.token,
            _finite(s.logprob),
            list(s.data),
            [Entry(t.token, _finite(t.logprob), list(t.data)) for t in s.top],
        )
        for s in scores
    ]
    return msgspec.json.encode({"content": content, "refusal": None})


def completion_logprobs(scores: Iterable[Score]) -> bytes:
    """The `logprobs` of a completion choice."""
    scores = list(scores)
    return msgspec.json.encode(
        {
            "tokens": [s.token for s in scores],
            "token_logprobs": [None if s.logprob is None else _finite(s.logprob) for s in scores],
            "top_logprobs": [None if s.logprob is None else _by_text([*s.top, s]) for s in scores],
            "text_offset": [s.offset for s in scores],
        }
    )


def prompt_logprobs(scores: Iterable[Score]) -> bytes:
    """vLLM's `prompt_logprobs`: per token of the prompt, by ids, itself and then its alternatives."""
    return msgspec.json.encode([None if s.logprob is None else _by_id([s, *s.top]) for s in scores])


def _by_id(scores: list[Score]) -> dict[str, dict[str, float | int | str]]:
    return {
        str(s.id): {"logprob": _finite(s.logprob), "rank": s.rank, "decoded_token": s.token} for s in scores
    }


def _by_text(scores: list[Score]) -> dict[str, float]:
    # Of tokens that read alike, the likeliest is shown.
    out: dict[str, float] = {}
    for score in scores:
        out.setdefault(score.token, _finite(score.logprob))
    return out


def _finite(value: float | None) -> float:
    return LOWEST if value is None else max(value, LOWEST)
