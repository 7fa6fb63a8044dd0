"""Settling one row of a step: confirm tokens, commit KV, report, ask a drafter for the next round."""

from __future__ import annotations

from typing import Protocol

from bien.core.chains import extended_chain
from bien.core.clock import Clock
from bien.core.flight import FlightItem
from bien.core.guarded import GuardedSpeculator
from bien.core.kv.cache import KVCache
from bien.core.kv.groups import GroupKind, KVGroup
from bien.core.logprobs import TokenLogprobs
from bien.core.report import SequenceOutput, StepReport
from bien.core.sequence import Sequence, Status
from bien.core.snapshots import Snapshots
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
        speculator: GuardedSpeculator | None,
        stats: WorkerStats,
        eos: tuple[int, ...],
    ) -> None:
        self._owner = owner
        self._cache = cache
        self._block = groups[0].block_tokens
        self._windows = any(g.kind is GroupKind.WINDOW for g in groups)
        self._snapshots = snapshots
        self._speculator = speculator
        self._stats = stats
        self._eos = eos

    def settle(
        self,
        item: FlightItem,
        gained: int,
        steps: int,
        tokens: bytes,
        proposed: int,
        report: StepReport,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """`item` gained `gained` tokens in each of `steps` equal steps."""
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
            s.computed = min(computed, s.length)
            if item.drafts or steps > 1:
                s.planned = s.computed
            self._commit(s)
            self._snapshots.settle(item, s)
        if item.drafts:
            self._observe(s, item.drafts, gained - 1)
        if count:
            out = SequenceOutput(s.id, count, tokens, finish)
            out.logprobs = None if logprobs is None else logprobs.first(count)
            self._output(s, out, report)
        if finish is None and item.samples and current:
            self._draft(s, proposed)

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
        if self._speculator is not None and sampling.speculate and tokens and s.kv is not None:
            self._speculator.extend(s.id, list(memoryview(tokens).cast("I")))
        return count, tokens, finish

    def _commit(self, s: Sequence) -> None:
        blocks = s.computed // self._block
        if s.kv is None or blocks <= s.committed:
            return
        self._cache.commit(s.kv, extended_chain(s, blocks, self._block), s.computed)
        if self._windows:
            self._cache.slide(s.kv, s.computed)
        s.committed = blocks

    def _observe(self, s: Sequence, drafted: int, accepted: int) -> None:
        s.rounds += 1
        s.drafted += drafted
        s.accepted += accepted
        self._stats.rounds += 1
        self._stats.drafted += drafted
        self._stats.accepted += accepted
        if self._speculator is not None:
            self._speculator.observe(s.id, drafted, accepted)

    def _output(self, s: Sequence, out: SequenceOutput, report: StepReport) -> None:
        if s.first_token < 0:
            s.first_token = self._owner.clock.time()
            out.cached = s.cached
            if s.scores:
                out.prompt_logprobs, s.scores = TokenLogprobs.joined(s.scores), []
            self._stats.cached_tokens += s.cached
            self._stats.prompt_tokens += s.prompt_tokens
        if out.finish is not None:
            out.drafted, out.accepted, out.rounds = s.drafted, s.accepted, s.rounds
            self._owner.end(s, out.finish)
        report.outputs.append(out)

    def _draft(self, s: Sequence, proposed: int) -> None:
        if self._speculator is None and not proposed:
            return
        limit = min(s.remaining, self._owner.room(s)) - 1
        if limit <= 0 or not s.request.sampling.speculate or s.status is not Status.RUNNING:
            return
        if self._speculator is not None and s.content.ids_known:
            s.draft = self._speculator.propose(s.id, min(limit, self._speculator.caps.max_drafts))
            s.drafts = len(s.draft)
        elif proposed:
            s.drafts = min(proposed, limit)
