"""Classes of urgency with ageing: `request.priority` decides, the smaller number first, as in vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from bien.core.api import Provider, Sequence, hookimpl
from bien.plugins.schedulers._chunked import Chunked, Rank


class PriorityConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`token_budget` and `max_running` as in fcfs. `ageing_seconds`: what one class is worth: a request is
    overtaken only by those that arrive within so many seconds per class between the two. `preempt`: a less
    urgent running sequence gives way when a more urgent one finds no slot or memory."""

    token_budget: Annotated[int, msgspec.Meta(ge=1)] = 512
    max_running: Annotated[int, msgspec.Meta(ge=0)] = 0
    ageing_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 10.0
    preempt: bool = True


class Priority(Chunked):
    """The order is that of arrival + priority x ageing_seconds.

    All requests age alike, so that time takes no part in the order of two of them: it never changes, nobody
    starves, nobody is preempted by one that arrives later than the ageing of the classes between them, and
    two sequences never take turns in preempting each other. Within a class it is first come, first served.
    """

    def __init__(self, config: PriorityConfig) -> None:
        super().__init__(config.token_budget, config.max_running)
        self._ageing = config.ageing_seconds
        self._preempts = config.preempt

    def rank(self, s: Sequence) -> Rank:
        return s.arrival + s.request.priority * self._ageing, s.order

    def yields(self, victim: Sequence, s: Sequence) -> bool:
        return self._preempts and victim.request.priority > s.request.priority


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider(
            "scheduler",
            "priority",
            lambda config, ctx: Priority(config),
            PriorityConfig,
            summary="smaller request.priority first, with ageing; less urgent ones are preempted",
        )
    ]
