"""`Endpoint`: where one remote engine is, and what the deployment says of it."""

from __future__ import annotations

from dataclasses import dataclass

FULL = "full"
WINDOW = "window:"  # and its tokens


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One worker: a server, or one data-parallel rank of it."""

    id: str  # of the worker
    url: str  # without a path
    model: str  # as the deployment names it
    block_tokens: int  # of the gateway's index; the engine's own may differ
    hash_key: bytes  # keys the chains of requests without a tenant
    served: str | None = None  # the model's name there; None: the only one there is
    rank: int | None = None  # None: the server has one only
    events: str | None = None  # address of its publisher; None: none, the index goes by what was sent
    replay: str | None = None  # where earlier events can be asked for
    topic: str = ""
    groups: tuple[str, ...] = (FULL,)  # its KV groups, in its order: "full" or "window:TOKENS"
    salt: bool = False  # give each tenant's requests a salt of their own
    max_context: int | None = None  # None: as the server says
    capacity_tokens: int = 0  # 0: as the server says, or any number
    history_seconds: float = 300.0  # without events: how long a prompt counts as cached
    grace_seconds: float = 10.0  # until what is wrong with events is an alarm
    poll_seconds: float = 1.0  # between looks at its health and load
    look_seconds: float = 5.0  # for a small answer: models, health, metrics
    silence_seconds: float = 600.0  # without a word of an answer, until it counts as lost
    api_key: str = ""

    @property
    def group_kinds(self) -> tuple[str, ...]:
        return tuple("window" if g.startswith(WINDOW) else g for g in self.groups)

    @property
    def group_windows(self) -> tuple[int, ...]:
        return tuple(int(g.removeprefix(WINDOW)) if g.startswith(WINDOW) else 0 for g in self.groups)
