"""First come, first served: decodes first, then prompts in order of arrival, in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from bien.core.api import Provider, Sequence, hookimpl
from bien.plugins.schedulers._chunked import Chunked, Rank


class FcfsConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`token_budget`: most tokens computed in a step (it bounds the step's length, and so the gaps between
    tokens of those that decode). `max_running`: most sequences with KV (0: as many as there are slots)."""

    token_budget: Annotated[int, msgspec.Meta(ge=1)] = 512
    max_running: Annotated[int, msgspec.Meta(ge=0)] = 0


class Fcfs(Chunked):
    """Chunked prefill under a token budget; the youngest running sequence is the victim."""

    def __init__(self, config: FcfsConfig) -> None:
        super().__init__(config.token_budget, config.max_running)

    def rank(self, s: Sequence) -> Rank:
        return s.arrival, s.order


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "scheduler",
            "fcfs",
            lambda config, ctx: Fcfs(config),
            FcfsConfig,
            summary="first come, first served; chunked prefill; youngest is preempted",
        )
    ]
