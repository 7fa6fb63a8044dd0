"""The speculator contract. Speculators propose; the core owns admission, verification, RNG, rollback.

A host drafter (prompt lookup) sees token ids and proposes after commit, in the engine. A device drafter
(early exit) lives in the executor, where hidden states are, and proposes the *next* round after each
sample. Verification draws the target's token with the counter-based RNG of its position and accepts a
draft iff it is equal: exact for one-hot drafts, and the text is the same with any drafter or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from bien.core.kv.groups import KVGroup

if TYPE_CHECKING:
    from torch import Tensor

    from bien.core.architectures.base import Architecture


class SpeculatorCaps(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter needs and promises."""

    place: Literal["host", "device"]
    max_drafts: int
    taps: tuple[tuple[int, Literal["in", "out"]], ...] = ()  # (layer, side) hidden states it reads
    lookahead: int = 0  # 1: its KV at i depends on token i+1
    deterministic: bool = True  # one-hot q
    q_kind: Literal["onehot", "sparse", "dense"] = "onehot"
    topology: Literal["chain", "tree"] = "chain"
    async_ok: bool = False  # may propose without the previous step's tokens


class HostSpeculator(Protocol):
    """One instance per engine. Keyed by sequence id; all calls from the engine's thread."""

    caps: SpeculatorCaps

    def start(self, id: str, tokens: list[int]) -> None:
        """A sequence is admitted: its prompt (and confirmed output, after a preemption)."""
        ...

    def extend(self, id: str, tokens: list[int]) -> None:
        """Tokens were confirmed."""
        ...

    def propose(self, id: str, limit: int) -> list[int]:
        """At most `limit` draft tokens to follow the last confirmed one; [] for none."""
        ...

    def observe(self, id: str, drafted: int, accepted: int) -> None: ...

    def end(self, id: str) -> None: ...

    def close(self) -> None: ...


class TargetHandle(Protocol):
    """What a device drafter may use of the loaded target model (torch)."""

    # Decoder layers: layer(hidden [N, hidden], rows) -> hidden, its input unchanged. Attention layers also
    # have fill(hidden, rows) -> None, which writes the tokens' keys and values and computes nothing else.
    layers: list[Any]

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] int -> [N, hidden]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Final norm and output head: [N, hidden] -> [N, vocab]."""
        ...


class DeviceSpeculator(Protocol):
    """One instance per executor.

    `rows` is the executor's description of a ragged batch (`bien.core.executors.rows.Rows`): slots,
    positions and the KV pools of every group, the drafter's own included.
    """

    caps: SpeculatorCaps

    def groups(self, architecture: Any, block_tokens: int) -> tuple[KVGroup, ...]:
        """The drafter's own KV groups (kind DRAFT), known before any weight is loaded."""
        ...

    def load(self, target: TargetHandle, groups: tuple[int, ...]) -> None:
        """The target is ready; `groups` are the plan indices of the drafter's own groups."""
        ...

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor]) -> None:
        """After each target forward: fill the drafter's KV for all its rows from the tapped states
        ([N, hidden] each). Called for prompts, verify rounds and prefix-hit tails alike."""
        ...

    def propose(self, rows: Any, last: Tensor, limit: int) -> Tensor:
        """[S] last confirmed token per sequence -> [S, limit] drafts. `rows` holds one row per sequence
        at the last token's position; `rows.next(tokens)` gives the following position's rows."""
        ...

    def close(self) -> None: ...


class DrafterGroups(Protocol):
    """What a speculator's *parameters* (its `config_type`) should say, so that memory is counted before
    anything is made."""

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        """The drafter's own KV groups on this model; none for host drafters."""
        ...
