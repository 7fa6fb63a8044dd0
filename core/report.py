"""What a step changed: the engine's answer to its driver."""

from __future__ import annotations

from dataclasses import dataclass, field

from bien.core.kv.events import KVEvent
from bien.core.logprobs import TokenLogprobs
from bien.core.speculation.counts import DraftCounts


@dataclass(slots=True)
class SequenceOutput:
    """What one request gained in a step."""

    id: str
    count: int
    tokens: bytes  # uint32-LE ids, empty in simulation
    finish: str | None = None
    cached: int = -1  # set on the first output
    drafted: int = 0  # totals, set on the last output
    accepted: int = 0
    rounds: int = 0
    drafts: DraftCounts | None = None  # the same by source and position
    error: str = ""
    error_code: str = ""  # of the BienError's class, with finish "error"
    logprobs: TokenLogprobs | None = None  # of `tokens`, where asked for
    prompt_logprobs: TokenLogprobs | None = None  # of the prompt's second to last token, on the first output


@dataclass(slots=True)
class StepReport:
    """For gateways and index."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    events: list[KVEvent] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.outputs or self.events)
