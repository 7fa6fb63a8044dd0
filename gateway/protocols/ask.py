"""`Ask`: what a client asked for, whatever dialect it spoke; `Answer`: how its dialect is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from bien.core.request import TokenIds
from bien.core.speculation.counts import DraftCounts
from bien.gateway.notes import Notes
from bien.gateway.parsing.calling import AUTO, Calling
from bien.gateway.parsing.events import Event
from bien.gateway.protocols.acceptance import Speculation
from bien.gateway.protocols.refusal import Refusal
from bien.gateway.protocols.scores import Score
from bien.gateway.protocols.thinking import NOTHING_SAID, Thinking


@dataclass(slots=True)
class Chat:
    """Messages for the chat template, checked, contents joined to one text each."""

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None  # as OpenAI's chat has them; None: none
    thinking: Thinking = NOTHING_SAID  # `template_kwargs` go before it
    calling: Calling = AUTO
    leads: bool = False  # its first message is the client's system prompt, from its first line on
    bends: bool = False  # a system message that the template refuses where it stands may be put another way


@dataclass(slots=True)
class Ask:
    """Written by a protocol; sampling limits that need the context window are settled with the prompt."""

    model: str
    prompt: str | TokenIds | Chat  # text, ids, or a conversation
    max_tokens: int | None  # None: up to the end of the context window
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    stream: bool = False
    include_usage: bool = False  # a usage chunk at the end of a stream
    continuous_usage: bool = False  # and usage in each chunk
    return_token_ids: bool = False
    forced: TokenIds | None = None
    session: str = ""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    priority: int = 0  # -100 to 100; smaller is more urgent; the scheduler `priority` heeds it
    salt: str = ""  # a namespace of the cache, inside the tenant's
    n: int = 1  # choices, each drawn for itself
    echo: bool = False  # the answer begins with the prompt
    prompt_logprobs: int | None = None  # alternatives per token of the prompt
    speculate: bool = True  # whether drafts may be verified
    max_drafts: int | None = None  # at a time
    prediction: str = ""  # the output that the client expects
    speculation_metrics: bool = False  # the answer says what drafting did
    shorten: bool = False  # more tokens may be asked for than fit: the answer ends with the context window
    notes: Notes = field(default_factory=Notes)  # what became of the prompt, written by `Prompts`
    style: Any = None  # what the answer's writer knows beside this; each protocol has its own

    @property
    def scored(self) -> int | None:
        """Alternatives per token of the prompt that a worker is asked for; None: no log-probabilities."""
        tops = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((top for top in tops if top is not None), default=None)


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Of a prediction: tokens that were verified, and that came true or not. Neither adds to the completion's
    tokens."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """Cached tokens are part of the prompt tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None  # None: a remote engine does not say, or not yet
    completion_tokens_details: CompletionDetails = CompletionDetails()

    @classmethod
    def of(
        cls,
        prompt: int,
        completion: int,
        cached: int,
        accepted: int = 0,
        rejected: int = 0,
        reasoning: int = 0,
    ) -> Usage:
        """`cached`: -1 where it is not known. `accepted`, `rejected`: of a prediction."""
        found = CachedTokens(cached) if cached >= 0 else None
        details = CompletionDetails(reasoning, accepted, rejected)
        return cls(prompt, completion, prompt + completion, found, details)


@dataclass(slots=True)
class Choice:
    """One choice of an answer that is not streamed. `token_ids` is uint32-LE bytes, None where the client
    did not ask for ids. `scores`: the tokens' log-probabilities, None where not asked for. `stop`: the stop
    string that ended it, None where none did. `events`: what it says, where it was parsed; `text` is empty
    then."""

    text: str
    finish: str
    token_ids: bytes | None = None
    scores: list[Score] | None = None
    stop: str | None = None
    events: list[Event] | None = None


class Answer(Protocol):
    """Writes one answer. `index` is that of a choice; `token_ids` and `scores` are as in `Choice`.
    `speculation` is None where the client did not ask for ids or a generation was cut at a stop string."""

    id: str

    def opening(self, index: int, usage: Usage) -> bytes:
        """Events that come before any text of a choice."""
        ...

    def piece(
        self,
        index: int,
        text: str,
        token_ids: bytes | None,
        usage: Usage | None,
        scores: list[Score] | None = None,
    ) -> bytes: ...

    def said(
        self,
        index: int,
        events: Sequence[Event],
        token_ids: bytes | None,
        usage: Usage | None,
        scores: list[Score] | None = None,
    ) -> bytes:
        """As `piece`, of an answer that is parsed; there may be no event at all."""
        ...

    def closing(
        self,
        index: int,
        finish: str,
        usage: Usage,
        speculation: Speculation | None = None,
        stop: str | None = None,
    ) -> bytes:
        """The finish event of a choice. `stop`: the stop string that ended it."""
        ...

    def end(self, usage: Usage, drafts: DraftCounts | None = None) -> bytes:
        """Behind all choices: an event with usage, and with what drafting did, where asked for; the end
        mark."""
        ...

    def failed(self, refusal: Refusal) -> bytes:
        """The last event of a stream that cannot go on."""
        ...

    def whole(
        self,
        choices: list[Choice],
        usage: Usage,
        speculation: Speculation | None = None,
        prompt_logprobs: bytes | None = None,
        drafts: DraftCounts | None = None,
    ) -> bytes:
        """The body of an answer that is not streamed. `prompt_logprobs`: as JSON, where asked for. `drafts`:
        what drafting did, where it is asked for and known."""
        ...
