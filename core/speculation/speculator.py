"""The speculator contract. Speculators propose; the core owns admission, verification, RNG, rollback.

A round: propose -> admit (how many drafts are verified) -> one ragged target pass -> verify -> commit and
roll back -> observe. A host drafter (prompt lookup, suffix) sees token ids and proposes after commit, in the
engine. A device drafter (early exit, EAGLE, DFlash) lives in the executor, where hidden states are: after
each verification it absorbs what was computed, then proposes the next round.

No drafter may decide by what it has drawn itself whether a draft is verified: it reports confidences, and the
core admits. Drafts are drawn through the core's `Drawer` only, so that their law is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from bien.core.kv.groups import KVGroup
from bien.core.speculation.draft import Draft, Scope

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from bien.core.architectures.base import Architecture
    from bien.core.kernels.base import Kernels


class SpeculatorCaps(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter needs and promises."""

    place: Literal["host", "device"]
    max_drafts: int  # nodes per round
    taps: tuple[tuple[int, Literal["in", "out"]], ...] = ()  # (layer, side) hidden states it reads
    lookahead: int = 0  # 1: its entry for hidden state i depends on token i + 1 (EAGLE, MTP)
    deterministic: bool = True  # one-hot q
    q_kind: Literal["onehot", "sparse", "dense"] = "onehot"
    topology: Literal["chain", "tree"] = "chain"  # nodes of a tree are one-hot
    # `prior`: what is reported for a node depends on the tokens before it only; `own`: on its own token too.
    confidence: Literal["none", "prior", "own"] = "none"
    async_ok: bool = False  # may propose without the previous step's tokens


class HostSpeculator(Protocol):
    """One instance per engine. Keyed by sequence id; all calls from the engine's thread."""

    caps: SpeculatorCaps

    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        """A sequence is admitted: its prompt (and confirmed output, after a preemption)."""
        ...

    def extend(self, id: str, tokens: list[int]) -> None:
        """Tokens were confirmed."""
        ...

    def propose(self, id: str, limit: int) -> Draft:
        """At most `limit` draft nodes to follow the last confirmed token; an empty one for none."""
        ...

    def observe(self, id: str, drafted: int, accepted: int) -> None:
        """So many drafts were verified and accepted; fewer may be verified than were proposed."""
        ...

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

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm alone: [N, hidden] -> [N, hidden]."""
        ...

    def project(self, normed: Tensor) -> Tensor:
        """The output head alone: [N, hidden], normed -> [N, vocab]."""
        ...


@dataclass(slots=True, frozen=True)
class DrafterParts:
    """What a device drafter is loaded with."""

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    # A whole model in a folder or of a name, for drafters that are one: its layers ask `Rows` for their own
    # numbers, which `Rows.redirect` leads to the drafter's group. ModelError as for any model.
    load_model: Callable[[str | Path], Any]
    # The layers for further tokens in the target's own folder, by depth (`MultiTokenPrediction`). ModelError
    # where there are none.
    load_predicting: Callable[[], list[Any]]


class Drawer(Protocol):
    """Draws drafts for the sequences of one `propose` call, and remembers from what law. Given by the core:
    it knows temperatures, seeds and positions, and how drafts are verified."""

    def draw(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """The next token of each sequence: logits [S, C] of candidates, whose token ids are `ids` ([C] or
        [S, C] int64; None: C is the vocabulary) -> [S] int64 token ids. The first call draws the first node
        of each chain, and so on. Greedy sequences take the largest, as do all where the drafter's caps say
        `deterministic`."""
        ...


@dataclass(slots=True)
class DeviceDraft:
    """What a device drafter proposes for S sequences; the same shape for all, cut to each one's limit."""

    tokens: Tensor  # [S, n] int64; of a chain as `Drawer.draw` gave them
    confidence: Tensor | None = None  # [S, n] in 0..1, as `SpeculatorCaps.confidence` says
    parents: Tensor | None = None  # [S, n] int64, parents first, -1 = behind the last token; None = chains


class DeviceSpeculator(Protocol):
    """One instance per executor.

    `rows` is the executor's description of a ragged batch (`bien.core.executors.rows.Rows`): slots,
    positions, token ids and the KV pools of every group, the drafter's own included.
    """

    caps: SpeculatorCaps

    def groups(self, architecture: Any, block_tokens: int) -> tuple[KVGroup, ...]:
        """The drafter's own KV groups (kind DRAFT), known before any weight is loaded."""
        ...

    def load(self, target: TargetHandle, groups: tuple[int, ...], parts: DrafterParts) -> None:
        """The target is ready; `groups` are the plan indices of the drafter's own groups."""
        ...

    def absorb(self, rows: Any, taps: dict[tuple[int, str], Tensor], confirmed: Tensor) -> None:
        """After each verification: fill the drafter's KV for all rows of the step from the tapped states
        ([N, hidden] each). Called for prompts, verify rounds and prefix-hit tails alike. Of sequence i the
        first `confirmed[i]` ([S] int64 on the host) of its rows hold confirmed tokens; the others are
        rejected drafts: what is written at their positions is never read, but may be overwritten only by a
        later absorb. Rows of a tree hold the accepted path first (the executor has moved it there)."""
        ...

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        """[S] last confirmed token per sequence -> drafts, at most `limit` nodes each. `rows` holds one row
        per sequence at the last token's position, which has not been computed; `rows.next(tokens)` gives the
        following position's rows."""
        ...

    def close(self) -> None: ...


class DrafterGroups(Protocol):
    """What a speculator's *parameters* (its `config_type`) should say, so that memory is counted before
    anything is made. Where `max_drafts` may be None, they also have `drafts() -> int`."""

    def groups(self, architecture: Architecture, block_tokens: int) -> tuple[KVGroup, ...]:
        """The drafter's own KV groups on this model; none for host drafters."""
        ...
