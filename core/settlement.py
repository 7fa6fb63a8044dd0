"""Settling one row of a step: confirm tokens, commit KV, report, ask a drafter for the next round."""

from __future__ import annotations

from typing import Protocol

from bien.core.chains import extended_chain
from bien.core.clock import Clock
from bien.core.drafting import Drafting
from bien.core.flight import FlightItem
from bien.core.kv.cache import KVCache
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.logprobs import TokenLogprobs
from bien.core.report import SequenceOutput, StepReport
from bien.core.sequence import Sequence, Status
from bien.core.snapshots import Snapshots
from bien.core.speculation.draft import Draft
from bien.core.worker.messages import WorkerStats


class Owner(Protocol):
    """What settling needs of the engine."""

    clock: Clock

    def end(self, s: Sequence, finish: str) -> None: ...
    def room(self, s: Sequence) -> int: ...


class Settlement:
    def __init__(
        self,
        owner: Owner,
        cache: KVCache,
        groups: tuple[KVGroup, ...],
        snapshots: Snapshots,
        drafting: Drafting,
        stats: WorkerStats,
        eos: tuple[int, ...],
    ) -> None:
        self._owner = owner
        self._cache = cache
        self._block = groups[0].block_tokens
        self._windows = any(g.kind is GroupKind.WINDOW for g in groups)
        self._snapshots = snapshots
        self._drafting = drafting
        self._stats = stats
        self._eos = eos

    def settle(
        self,
        item: FlightItem,
        gained: int,
        steps: int,
        tokens: bytes,
        report: StepReport,
        logprobs: TokenLogprobs | None = None,
        proposed: int = 0,
        draft: Draft | None = None,
    ) -> None:
        """`item` gained `gained` tokens in each of `steps` equal steps. `proposed`: drafts of a device
        drafter for its next one, `draft`: what is known of them."""
        s = item.sequence
        if s.status is Status.FINISHED:  # stopped or aborted while this step was in flight
            return
        if item.samples:
            s.promised -= 1
            s.syncs = False
        current = item.epoch == s.epoch  # else preempted meanwhile: the tokens count, the KV is gone
        computed = item.start + item.count - item.drafts + max(0, gained - 1) + (steps - 1)
        count = gained * steps
        finish = None
        if count:
            count, tokens, finish = self._append(s, count, tokens)
        if current:
            # Drafts may have computed a stop token, and what is behind it, which nobody would otherwise.
            s.computed = min(computed, s.length - (count > 0))
            if item.drafts or steps > 1:
                s.planned = s.computed
            self._commit(s)
            self._snapshots.settle(item, s)
        if item.drafts:
            self._observe(item, gained - 1)
        if count:
            out = SequenceOutput(s.id, count, tokens, finish)
            out.logprobs = None if logprobs is None else logprobs.first(count)
            self._output(s, out, report)
        if s.max_drafts and finish is None and item.samples and current:
            room = min(s.remaining, self._owner.room(s)) - 1
            self._drafting.propose(s, room, proposed, draft)

    def confirm(self, item: FlightItem, computed: int) -> None:
        """A step of a jump before its last has computed all positions < `computed`."""
        s = item.sequence
        s.computed = computed
        self._commit(s)
        self._snapshots.settle(item, s)

    def _append(self, s: Sequence, count: int, tokens: bytes) -> tuple[int, bytes, str | None]:
        """Confirm tokens; cut behind a stop token. Returns what was gained, and why it ended, if it did."""
        finish = None
        sampling = s.request.sampling
        if tokens and (sampling.stop_token_ids or not sampling.ignore_eos):
            eos = () if sampling.ignore_eos else self._eos
            for i, token in enumerate(memoryview(tokens).cast("I")):
                made = s.output_tokens + i + 1
                if made >= sampling.min_tokens and (token in eos or token in sampling.stop_token_ids):
                    count, tokens, finish = i + 1, tokens[: 4 * (i + 1)], "stop"
                    break
        s.content.append(tokens, count)
        s.length += count
        if finish is None and s.output_tokens >= s.max_tokens:
            finish = "length"
        self._stats.output_tokens += count
        if s.max_drafts and tokens:
            self._drafting.extend(s, list(memoryview(tokens).cast("I")))
        return count, tokens, finish

    def _commit(self, s: Sequence) -> None:
        blocks = s.computed // self._block
        if s.kv is None or blocks <= s.committed:
            return
        self._cache.commit(s.kv, extended_chain(s, blocks, self._block), s.computed)
        if self._windows:
            self._cache.slide(s.kv, s.computed)
        s.committed = blocks

    def _observe(self, item: FlightItem, accepted: int) -> None:
        self._stats.rounds += 1
        self._stats.drafted += item.drafts
        self._stats.accepted += accepted
        self._drafting.observe(item, accepted)

    def _output(self, s: Sequence, out: SequenceOutput, report: StepReport) -> None:
        if s.first_token < 0:
            s.first_token = self._owner.clock.time()
            out.cached = s.cached
            if s.scores:
                out.prompt_logprobs, s.scores = TokenLogprobs.joined(s.scores), []
            self._stats.cached_tokens += s.cached
            self._stats.prompt_tokens += s.prompt_tokens
        if s.counts.sources and (out.finish is not None or s.prediction is not None):
            out.drafts = s.counts if out.finish is not None else s.counts.copy()
        if out.finish is not None:
            total = s.counts.total
            out.drafted, out.accepted, out.rounds = total.drafted, total.accepted, total.rounds
            self._owner.end(s, out.finish)
        report.outputs.append(out)
