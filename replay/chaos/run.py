"""`run`: the cases, one after the other, and what came of them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bien.core.clock import WallClock
from bien.core.errors import BienError, UserError
from bien.replay.chaos.case import Case, CaseReport, Log, NotApplicable
from bien.replay.chaos.cases import CASES
from bien.replay.chaos.world import World, given_world, own_world

SCHEMA = 1
SECONDS, ENDING = 90.0, 20.0  # for one case, and for its end when it hangs
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
    work = asyncio.ensure_future(case.run(world, log))
    try:
        await asyncio.wait([work], timeout=SECONDS)
        if not work.done():
            log.check("it ends", False, f"not within {SECONDS:g} s; it waits in {_where(work)}")
            work.cancel()
            await asyncio.wait([work], timeout=ENDING)
        elif (error := work.exception()) is not None:
            raise error
    except NotApplicable as error:
        log.skip("the rest" if log.checks else "the case", str(error))
    except (BienError, OSError, TimeoutError, aiohttp.ClientError) as error:
        log.check("it can be carried out", False, f"{type(error).__name__}: {error}")
    finally:
        work.cancel()
    seconds = clock.time() - began
    return CaseReport(case.number, case.name, case.seen, log.verdict, round(seconds, 2), log.checks)


def _where(work: asyncio.Future[Any]) -> str:
    """The function that it waits in, and who called that."""
    names: list[str] = []
    step: Any = work.get_coro() if isinstance(work, asyncio.Task) else None
    while step is not None:
        for kind in ("cr", "ag", "gi"):
            if (frame := getattr(step, f"{kind}_frame", None)) is not None:
                names.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                step = getattr(step, f"{kind}_await", None) or getattr(step, "gi_yieldfrom", None)
                break
        else:
            break
    return " < ".join(reversed(names[-6:])) or "nothing"
