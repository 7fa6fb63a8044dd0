"""`run`: the cases, one after the other, and what came of them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from bien.core.clock import WallClock
from bien.core.errors import BienError, UserError
from bien.replay.chaos.case import Case, CaseReport, Check, Log, NotApplicable
from bien.replay.chaos.cases import CASES
from bien.replay.chaos.world import World, given_world, own_world

SCHEMA = 1
SECONDS = 90.0  # for one case
Note = Callable[[Case, CaseReport | None], None]  # a case begins; it is over


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    router: str  # its URL, or "bien"
    cases: list[CaseReport]
    seconds: float

    @property
    def failed(self) -> list[int]:
        return [case.number for case in self.cases if case.verdict == "fail"]


def chosen(numbers: Sequence[int]) -> list[Case]:
    """Those of these numbers, or all. UserError: there is no such case."""
    known = {case.number: case for case in CASES}
    for number in numbers:
        if number not in known:
            raise UserError(f"--case is {number}; valid: {', '.join(map(str, sorted(known)))}", field="case")
    return [known[number] for number in sorted(set(numbers) or known)]


async def run(
    cases: Sequence[Case], note: Note, url: str = "", workers: Sequence[str] = (), seed: int = 0
) -> ChaosReport:
    """Against our own stack, or against the router at `url`. Raises what starting a world raises."""
    clock = WallClock()
    began = clock.time()
    with tempfile.TemporaryDirectory(prefix="bien-chaos-") as name:
        folder = Path(name)
        made: AbstractAsyncContextManager[World]
        made = given_world(folder, url, workers, seed=seed) if url else own_world(folder, seed=seed)
        async with made as world:
            reports = []
            for case in cases:
                note(case, None)
                report = await put_through(world, case)
                reports.append(report)
                note(case, report)
    return ChaosReport(router=url or "bien", cases=reports, seconds=clock.time() - began)


async def put_through(world: World, case: Case) -> CaseReport:
    """One case. What it could not do is a failure, too, or says that it does not apply."""
    log, clock = Log(), WallClock()
    began = clock.time()
    try:
        async with asyncio.timeout(SECONDS):
            await case.run(world, log)
    except NotApplicable as error:
        log.skip("the rest" if log.checks else "the case", str(error))
    except BienError as error:
        log.check("it can be carried out", False, f"{type(error).__name__}: {error}")
    except TimeoutError:
        log.check("it ends", False, f"not within {SECONDS:g} s")
    seconds = clock.time() - began
    return CaseReport(case.number, case.name, case.seen, log.verdict, round(seconds, 2), log.checks)


__all__ = ["Case", "ChaosReport", "Check", "chosen", "put_through", "run"]
