"""`Sequence`: the mutable state of one request inside an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from bien.core.content import Content
from bien.core.logprobs import TokenLogprobs
from bien.core.request import GenerateRequest
from bien.core.speculation.counts import DraftCounts
from bien.core.speculation.draft import Draft
from bien.core.speculation.prediction import Prediction

if TYPE_CHECKING:
    from bien.core.kv.cache import SequenceKV


class Status(IntEnum):
    WAITING = 0  # no KV, no slot
    LOADING = 1  # KV blocks are on their way from a lower tier; must not be planned
    RUNNING = 2  # has slot and KV
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """Counts are in tokens. `length` = prompt + confirmed outputs; `computed` <= `length` have KV.

    Everything is written by the engine only; schedulers read.
    """

    id: str
    request: GenerateRequest
    arrival: float  # clock seconds at which a gateway first had it, whatever workers it was lost with
    order: int  # submit order, the tie-breaker
    seed: int
    content: Content  # prompt plus confirmed outputs
    length: int
    status: Status = Status.WAITING
    computed: int = 0  # confirmed positions with KV
    planned: int = 0  # positions with KV once every step in flight has ended (>= computed)
    promised: int = 0  # tokens that steps in flight will add (placeholders)
    drafts: int = 0  # of those ready, as many as the next plan may verify
    ready: int = 0  # drafts that were proposed for it
    draft: Draft = field(default_factory=Draft)  # these; of a device drafter without their tokens
    hosted: bool = False  # they are a host's
    max_drafts: int = 0  # of a round, 0: it never drafts
    prediction: Prediction | None = None  # of its output, by the client
    syncs: bool = False  # in flight with drafts: unplannable until its step has ended
    slot: int = -1
    epoch: int = 0  # grows at each preemption: results of older plans carry tokens, but no KV
    kv: SequenceKV | None = None
    hashes: bytes = b""  # chain of full blocks of `content`
    cached: int = 0  # tokens found in a cache at first admission (device and lower tiers)
    preemptions: int = 0
    first_token: float = -1.0  # clock seconds, -1 until then
    finish: str | None = None  # "stop", "length", "abort", "error"
    counts: DraftCounts = field(default_factory=DraftCounts)  # what became of its drafts
    committed: int = 0  # full blocks given to the cache
    reserved: int = 0  # positions that have blocks in every paged group
    rolling: dict[int, tuple[int, int]] = field(default_factory=dict)  # STATE group: (position, block)
    skip_store: bool = False  # a load failed: recompute instead
    scored: int = 0  # leading positions whose log-probabilities, those of the tokens after them, are known
    scores: list[TokenLogprobs] = field(default_factory=list)  # these, until the first output takes them
    prompt_tokens: int = field(init=False)  # of the request, as `max_tokens`: asked for many times a step
    max_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.request.prompt_tokens
        self.max_tokens = self.request.sampling.max_tokens

    @property
    def output_tokens(self) -> int:
        return self.length - self.prompt_tokens

    @property
    def known(self) -> int:
        """Length once every step in flight has ended."""
        return self.length + self.promised

    @property
    def loading(self) -> bool:
        return self.status is Status.LOADING

    @property
    def unscored(self) -> bool:
        """Whether it waits for log-probabilities of its prompt, for which positions must be computed."""
        return self.request.sampling.prompt_logprobs >= 0 and self.scored < self.prompt_tokens - 1

    def score(self, start: int, logprobs: TokenLogprobs) -> None:
        """A step has computed positions from `start` on; after a preemption some were known already."""
        new = logprobs.behind(self.scored - start)
        if len(new):
            self.scores.append(new)
            self.scored += len(new)

    @property
    def pending(self) -> int:
        """Tokens that can be computed now: the rest of the prompt, or 1 in decode, 0 while unplannable.

        For a WAITING sequence it counts the whole content: admission may find some of it cached.
        """
        if self.syncs or self.status is Status.LOADING or self.status is Status.FINISHED:
            return 0
        known = self.length + self.promised
        return known - self.planned if known < self.prompt_tokens + self.max_tokens else 0

    @property
    def remaining(self) -> int:
        """Output tokens still allowed, counting those in flight."""
        return self.prompt_tokens + self.max_tokens - self.length - self.promised
