"""Guards around the plugins that an engine calls: none of them ends the process.

Nothing but speed depends on a drafter or a lower tier. When one breaks its contract it is reported once
and left out from then on; requests go on without it. A scheduler's fault ends the requests it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from bien.core.errors import PluginFault
from bien.core.kv.store import KVStore, Transfer
from bien.core.plan import StepPlan
from bien.core.scheduler import Scheduler, SchedulerView
from bien.core.sequence import Sequence
from bien.core.speculation.draft import ROOT, Draft, Scope
from bien.core.speculation.speculator import HostSpeculator

T = TypeVar("T")
LONGEST = 64  # characters of a draft's source: it goes into metrics
log = logging.getLogger("bien.engine")


class Guard:
    """Calls a plugin until it fails once."""

    def __init__(self, kind: str, plugin: object | None) -> None:
        self.broken = False
        self._name = f"{kind} {type(plugin).__name__}"

    def call(self, act: Callable[[], T], otherwise: T) -> T:
        """`act()`, or `otherwise` when the plugin is broken or breaks now."""
        if self.broken:
            return otherwise
        try:
            return act()
        except Exception as error:
            self.fault(repr(error), error)
            return otherwise

    def fault(self, what: str, error: BaseException | None = None) -> None:
        if self.broken:
            return
        self.broken = True
        log.error("%s failed and is left out from now on: %s", self._name, what, exc_info=error)


class StrictGuard(Guard):
    """Lets a plugin's failures through."""

    def call(self, act: Callable[[], T], otherwise: T) -> T:
        return act()


class GuardedScheduler:
    """A `Scheduler` whose faults are PluginFaults where a request can be told, and log lines elsewhere."""

    def __init__(self, inner: Scheduler) -> None:
        self.name = type(inner).__name__
        self._inner = inner

    def add(self, sequence: Sequence) -> None:
        self._told(lambda: self._inner.add(sequence))

    def remove(self, sequence: Sequence) -> None:
        self._logged(lambda: self._inner.remove(sequence))

    def plan(self, view: SchedulerView) -> StepPlan:
        try:
            plan = self._inner.plan(view)
        except PluginFault:
            raise
        except Exception as error:
            raise self._fault(error) from error
        if not isinstance(plan, StepPlan):
            raise PluginFault(f"scheduler {self.name} planned {plan!r}; valid: a StepPlan")
        return plan

    def note(self, elapsed: float, tokens: int) -> None:
        self._logged(lambda: self._inner.note(elapsed, tokens))

    @property
    def stationary(self) -> bool:
        return self._inner.stationary

    def close(self) -> None:
        self._logged(self._inner.close)

    def _told(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except PluginFault:
            raise
        except Exception as error:
            raise self._fault(error) from error

    def _fault(self, error: Exception) -> PluginFault:
        log.error("scheduler %s failed", self.name, exc_info=error)
        return PluginFault(f"scheduler {self.name} failed: {error!r}")

    def _logged(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            log.error("scheduler %s failed", self.name, exc_info=error)


class GuardedSpeculator:
    """A `HostSpeculator` that never raises and never proposes what cannot be verified."""

    def __init__(self, inner: HostSpeculator, vocab_size: int) -> None:
        self.caps = inner.caps
        self._inner = inner
        self._vocab = vocab_size
        self._guard = Guard("speculator", inner)

    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        self._guard.call(lambda: self._inner.start(id, tokens, scope), None)

    def extend(self, id: str, tokens: list[int]) -> None:
        self._guard.call(lambda: self._inner.extend(id, tokens), None)

    def propose(self, id: str, limit: int) -> Draft:
        draft = self._guard.call(lambda: self._inner.propose(id, limit), Draft())
        wrong = self._guard.call(lambda: draft_fault(draft, limit, self._vocab, self.caps.topology), "")
        if wrong:
            self._guard.fault(f"drafts for {id!r}: {wrong}")
        return Draft() if self._guard.broken else draft

    def observe(self, id: str, drafted: int, accepted: int) -> None:
        self._guard.call(lambda: self._inner.observe(id, drafted, accepted), None)

    def end(self, id: str) -> None:
        self._guard.call(lambda: self._inner.end(id), None)

    def close(self) -> None:
        self._inner.close()


def draft_fault(draft: Draft, limit: int, vocab_size: int, topology: str) -> str:
    """What is wrong with a draft; empty when nothing is."""
    if not isinstance(draft, Draft):
        return f"{draft!r}; valid: a Draft"
    if not isinstance(draft.source, str) or len(draft.source) > LONGEST:
        return f"source {repr(draft.source)[:LONGEST]}; valid: a str of at most {LONGEST} characters"
    count = len(draft.tokens)
    if count > limit:
        return f"{count} drafts; valid: at most {limit}"
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in draft.tokens):
        return f"tokens {draft.tokens}; valid: ids from 0 to {vocab_size - 1}"
    if draft.parents is not None:
        if topology == "chain":
            return "parents, although its caps say 'chain'; valid: None"
        if len(draft.parents) != count:
            return f"{len(draft.parents)} parents of {count} drafts; valid: one each"
        if not all(isinstance(p, int) and ROOT <= p < i for i, p in enumerate(draft.parents)):
            return f"parents {draft.parents}; valid: {ROOT}, or the index of an earlier draft"
    if draft.confidence is not None:
        if len(draft.confidence) != count:
            return f"{len(draft.confidence)} confidences of {count} drafts; valid: one each"
        if not all(0 <= c <= 1 for c in draft.confidence):  # so that NaN is refused
            return f"confidences {draft.confidence}; valid: 0 to 1"
    return ""


class GuardedStore:
    """A `KVStore` that never raises: what it cannot do counts as absent."""

    def __init__(self, inner: KVStore) -> None:
        self._inner = inner
        self._guard = Guard("kv_store", inner)

    @property
    def broken(self) -> bool:
        return self._guard.broken

    def give_up(self, reason: str) -> None:
        """Leave it out from now on."""
        self._guard.fault(reason)

    def lookup(self, group: int, hashes: bytes) -> list[bool]:
        absent = [False] * (len(hashes) // 16)
        found = self._guard.call(lambda: list(self._inner.lookup(group, hashes)), absent)
        if len(found) != len(absent):
            self._guard.fault(f"lookup of {len(absent)} hashes answered for {len(found)}")
            return absent
        return found

    def save(self, group: int, hashes: bytes, blocks: list[int]) -> Transfer | None:
        transfer = self._guard.call(lambda: self._inner.save(group, hashes, blocks), None)
        return None if transfer is None else GuardedTransfer(transfer, self._guard)

    def load(self, group: int, hashes: bytes, blocks: list[int]) -> Transfer:
        transfer = self._guard.call(lambda: self._inner.load(group, hashes, blocks), None)
        return Lost() if transfer is None else GuardedTransfer(transfer, self._guard)

    def pin(self, group: int, hashes: bytes, ttl: float) -> None:
        self._guard.call(lambda: self._inner.pin(group, hashes, ttl), None)

    def evict(self, group: int, hashes: bytes) -> None:
        self._guard.call(lambda: self._inner.evict(group, hashes), None)

    def take_events(self) -> list[tuple[str, int, bytes]]:
        return self._guard.call(self._inner.take_events, [])

    @property
    def usage(self) -> tuple[int, int]:
        return self._guard.call(lambda: self._inner.usage, (0, 0))

    def close(self) -> None:
        self._inner.close()


class GuardedTransfer:
    """A transfer that cannot be asked never ends: it may still write to its blocks.

    It is asked on after its store was left out, so that what it holds comes back.
    """

    def __init__(self, inner: Transfer, guard: Guard) -> None:
        self._inner = inner
        self._guard = guard
        self._mute = False

    def done(self) -> bool:
        try:
            return not self._mute and bool(self._inner.done())
        except Exception as error:
            self._mute = True
            self._guard.fault(repr(error), error)
            return False

    def failed(self) -> bool:
        try:
            return self._guard.broken or bool(self._inner.failed())
        except Exception as error:
            self._guard.fault(repr(error), error)
            return True


class Lost:
    """A load that did not even begin."""

    def done(self) -> bool:
        return True

    def failed(self) -> bool:
        return True
