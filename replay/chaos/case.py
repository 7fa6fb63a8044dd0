"""`Case`, and the `Log` in which it writes down what it has seen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from bien.core.errors import BienError
from bien.replay.chaos.ask import Reply, hits, places

if TYPE_CHECKING:
    from bien.replay.chaos.world import World

Verdict = Literal["pass", "fail", "not applicable"]
ENOUGH = 0.9  # share of what is cached somewhere that requests must find


class NotApplicable(BienError):
    """A case, or a part of one, that the router under test cannot be put through; why."""


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    what: str  # was done and expected
    verdict: Verdict
    evidence: str  # in numbers


class Log:
    def __init__(self) -> None:
        self.checks: list[Check] = []

    def check(self, what: str, good: bool, evidence: str) -> None:
        self.checks.append(Check(what, "pass" if good else "fail", evidence))

    def skip(self, what: str, why: str) -> None:
        self.checks.append(Check(what, "not applicable", why))

    def found(self, what: str, replies: list[Reply], least: float = ENOUGH, chance: float = 0.0) -> None:
        """Requests for what is cached somewhere must find it, and must be answered."""
        failed = [reply for reply in replies if not reply.ok]
        share = hits(replies)
        luck = f", by chance {chance:.0%}" if chance else ""
        evidence = f"{share:.1%} of {len(replies)} prompts found cached (needed {least:.0%}{luck})"
        if failed:
            evidence += f"; {len(failed)} failed: {failed[0].status} {failed[0].error[:120]}"
        self.check(what, share >= least and not failed, f"{evidence}; answered by {_words(places(replies))}")

    def answered(self, what: str, replies: list[Reply]) -> None:
        failed = [reply for reply in replies if not reply.ok]
        why = f": {failed[0].status} {failed[0].error[:160]}" if failed else ""
        self.check(what, not failed, f"{len(replies) - len(failed)} of {len(replies)} answered{why}")

    @property
    def verdict(self) -> Verdict:
        told = {check.verdict for check in self.checks}
        return "fail" if "fail" in told else "pass" if "pass" in told else "not applicable"


class Case(msgspec.Struct, frozen=True):
    number: int  # as in the list of what users have met
    name: str
    seen: str  # where users have met it
    run: Callable[[World, Log], Awaitable[None]]


class CaseReport(msgspec.Struct, frozen=True):
    number: int
    name: str
    seen: str
    verdict: Verdict
    seconds: float
    checks: list[Check]


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "nobody"
