"""The target contract: something that turns a prompt into output tokens."""

from __future__ import annotations

from typing import Protocol

import msgspec

from bien.core.request import BlockRuns
from bien.replay.record import TurnRecord


class TurnRequest(msgspec.Struct, gc=False):
    """One turn to send. `output` is the recorded continuation: its length is asked for and, where the
    target can, its content is forced."""

    id: str
    session: str
    scope: str
    tenant: str
    prompt: BlockRuns
    output: BlockRuns


class TargetInfo(msgspec.Struct, frozen=True):
    """What is known of a target before the first turn."""

    model: str = ""
    max_context: int | None = None  # largest prompt + output; None: unknown
    accelerators: int = 1
    forces_tokens: bool = True  # the recorded continuation replaces what is sampled


class Target(Protocol):
    """Must allow many calls of `generate` at a time."""

    info: TargetInfo

    async def generate(self, request: TurnRequest, record: TurnRecord) -> None:
        """Send `request` and write what comes into the second block of `record` as it comes.

        A turn that fails gets `record.error` and no exception; cancelling the call ends the request on
        the server.
        """
        ...

    async def close(self) -> None: ...
