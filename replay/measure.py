"""From a driver that has run to a `Result`."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from operator import mul
from typing import Any

import msgspec

from bien.core import __version__
from bien.core.speculation.counts import DraftCounts
from bien.replay import metrics
from bien.replay.client_cost import ClientCost
from bien.replay.driver import Driver
from bien.replay.metrics import Distribution, Throughput
from bien.replay.record import TurnRecord
from bien.replay.result import (
    Cache,
    Card,
    Client,
    CorpusCard,
    DraftsReport,
    FidelityReport,
    Jobs,
    Loss,
    Result,
    RouterReport,
    Sessions,
    SpeculationReport,
    ThroughputReport,
    Tokens,
    Turns,
    Validity,
)
from bien.replay.worker_load import WorkerLoad
from bien.traces.model import TraceMeta

KEPT = 0.95  # shares of the original below this make a result invalid
ERRORS = 0.01
MISMATCH = 0.05
LAG_MS = 500.0
CAUSE = 200  # characters of an error


def measure(
    driver: Driver,
    meta: TraceMeta,
    *,
    kind: str,
    deployment: dict[str, Any],
    interrupted: bool = False,
    cost: ClientCost | None = None,
    load: WorkerLoad | None = None,
) -> Result:
    """Compute everything that a result holds. `cost` and `load` are left out where there is no client
    process, or no way to ask the workers."""
    ended = [r for r in driver.records if r.ended >= 0]
    good = [r for r in ended if r.ok]
    card = _card(driver, meta, ended, cost)
    forced = _forced(deployment)
    card.forced_acceptance = max(map(_length, forced.values()), default=None)
    result = Result(
        kind=kind,
        validity=Validity(True, []),
        card=card,
        fidelity=_fidelity(driver, meta, good),
        sessions=_sessions(driver),
        turns=Turns(len(ended), len(ended) - len(good), len(driver.records) - len(ended)),
        tokens=_tokens(good),
        cache=_cache(driver),
        ttft_ms=metrics.ttft_ms(good),
        tpot_ms=metrics.tpot_ms(good),
        itl_ms=metrics.itl_ms(good),
        e2e_ms=metrics.e2e_ms(good),
        interactivity=metrics.interactivity(good),
        throughput=_throughput(driver, good),
        jobs=_jobs(driver),
        client=Client(
            cost.cpu_seconds * 1e3 / len(driver.records) if cost and driver.records else None,
            card.send_lag_ms.p99,
            card.loop_lag_ms.p99,
        ),
        router=RouterReport(
            metrics.parity(good),
            load.imbalance if load else None,
            load.utilisation if load else None,
        ),
        speculation=_speculation(good, forced),
        deployment=deployment,
    )
    reasons = _reasons(result, interrupted)
    result.validity = Validity(not reasons, reasons)
    return result


def _card(driver: Driver, meta: TraceMeta, ended: list[TurnRecord], cost: ClientCost | None) -> Card:
    options, info = driver.options, driver.target.info
    count = max(1, len(ended))
    seen = sum(r.first >= 0 for r in ended)
    return Card(
        CorpusCard(driver.corpus.digest, meta.source, meta.format, meta.block_tokens),
        seed=options.seed,
        concurrency=0 if options.open_loop else options.concurrency,
        token_scale=options.token_scale,
        time_scale=options.time_scale,
        gap_cap=options.gap_cap,
        sessions=options.sessions,
        window=info.max_context,
        model=info.model,
        loop="open" if options.open_loop else "closed",
        forced_tokens=info.forces_tokens,
        advance=options.advance,
        duration=options.duration,
        coverage=seen / driver.corpus.turns_taken if driver.corpus.turns_taken else 0.0,
        overload=sum(r.overloaded for r in ended) / count,
        errors=sum(not r.ok for r in ended) / count,
        length_mismatch=sum(r.ok and r.got != r.asked for r in ended) / count,
        send_lag_ms=Distribution.of((r.sent - r.planned for r in driver.records), 1e3),
        loop_lag_ms=cost.loop_lag_ms if cost else Distribution(),
        version=__version__,
    )


def _fidelity(driver: Driver, meta: TraceMeta, good: list[TurnRecord]) -> FidelityReport:
    turns, tokens, reuse = driver.corpus.shares(len(good), sum(r.prompt_tokens + r.asked for r in good))
    notes = list(meta.fidelity.notes)
    if skipped := driver.tally.sessions_skipped:
        notes.append(
            f"{skipped} sessions skipped: longer than the window of {driver.target.info.max_context}"
        )
    if failed := driver.tally.sessions_failed:
        causes = Counter(r.error for r in driver.records if r.error)
        often = "".join(f", most often: {text[:CAUSE]}" for text, _ in causes.most_common(1))
        notes.append(f"{failed} sessions ended early by a failed turn{often}")
    of = meta.fidelity
    derived = of.derived_output_tokens / of.output_tokens if of.output_tokens else None
    return FidelityReport(turns, tokens, reuse, derived, notes)


def _sessions(driver: Driver) -> Sessions:
    tally = driver.tally
    open_ = tally.sessions_started - tally.sessions_completed - tally.sessions_failed
    return Sessions(
        tally.sessions_started, tally.sessions_completed, tally.sessions_failed, tally.sessions_skipped, open_
    )


def _tokens(good: list[TurnRecord]) -> Tokens:
    logical = sum(r.prompt_tokens for r in good)
    cached = sum(max(0, r.cached) for r in good)
    return Tokens(logical, logical - cached, cached, sum(r.got for r in good))


def _cache(driver: Driver) -> Cache:
    account = driver.account
    total = account.prompt_tokens
    if not total:
        return Cache(None, None, None)
    loss = account.loss
    return Cache(
        (account.ideal + loss.rounding) / total,
        account.achieved / total,
        Loss(*(value / total for value in msgspec.structs.astuple(loss))),
    )


def _throughput(driver: Driver, good: list[TurnRecord]) -> ThroughputReport:
    per = max(1, driver.target.info.accelerators)
    seconds = _seconds(driver)
    whole = Throughput.of(good, seconds)
    begin, end = driver.steady
    steady = None
    if begin >= 0 and end > begin:
        steady = Throughput.of((r for r in good if begin < r.ended <= end), end - begin)
    return ThroughputReport(
        whole.logical,
        whole.computed,
        whole.output,
        Throughput.of(good, seconds, per),
        steady,
        end - begin if steady else None,
        seconds,
    )


def _jobs(driver: Driver) -> Jobs:
    done = [j for j in driver.jobs if j.end >= 0 and not j.failed]
    seconds = Distribution.of(j.end - j.start for j in done)
    hours = _seconds(driver) / 3600
    per_hour = len(done) / hours if hours else None
    return Jobs(
        len(done),
        per_hour,
        3600 / seconds.mean if seconds.mean else None,
        per_hour / max(1, driver.target.info.accelerators) if per_hour is not None else None,
        seconds,
    )


def _seconds(driver: Driver) -> float:
    return max([driver.started, driver.ended, *(r.ended for r in driver.records)]) - driver.started


def _reasons(result: Result, interrupted: bool) -> list[str]:
    card, fidelity = result.card, result.fidelity
    reasons: list[str] = []
    if interrupted:
        reasons.append(
            f"interrupted: {result.turns.unfinished} turns and {result.sessions.unfinished} sessions "
            "were cut off"
        )
    if not result.turns.count:
        reasons.append("no turn ended")
        return reasons
    for name in ("turns", "tokens", "reuse"):
        if (kept := getattr(fidelity, name)) < KEPT:
            reasons.append(f"fidelity.{name} is {kept:.3f}; valid: {KEPT} or more")
    if card.errors > ERRORS:
        reasons.append(f"{card.errors:.1%} of turns failed; valid: at most {ERRORS:.0%}")
    if card.length_mismatch > MISMATCH:
        reasons.append(
            f"{card.length_mismatch:.1%} of turns have another length than asked for; "
            f"valid: at most {MISMATCH:.0%}"
        )
    for name, lag in (("send", card.send_lag_ms.p99), ("loop", card.loop_lag_ms.p99)):
        if lag is not None and lag > LAG_MS:
            reasons.append(f"client {name} lag p99 is {lag:.0f} ms; valid: at most {LAG_MS:.0f} ms")
    return reasons


def _speculation(good: list[TurnRecord], forced: dict[str, list[float]]) -> SpeculationReport:
    counts = DraftCounts()
    for record in good:
        if record.drafts is not None:
            counts.merge(record.drafts)
    total = counts.total
    return SpeculationReport(
        metrics.acceptance_length(good),
        [DraftsReport(n, taken, n) for n, taken in zip(total.drafted_at, total.accepted_at, strict=True)],
        {
            source: DraftsReport(one.rounds, one.accepted, one.drafted, one.acceptance_length)
            for source, one in counts.sources.items()
        },
        forced,
    )


def _forced(deployment: dict[str, Any]) -> dict[str, list[float]]:
    """By pool that drafts and does not verify drafts, the chances by which accepted lengths are drawn."""
    found = {}
    for pool in deployment.get("pool", ()):
        chances = list(pool.get("speculation", {}).get("acceptance", ()))
        if chances and _drafts(pool):
            found[str(pool["name"])] = chances
    return found


def _drafts(pool: dict[str, Any]) -> bool:
    # A simulated executor has drafts of the simulated drafter only.
    uses = [(pool.get(kind) or {}).get("use") for kind in ("executor", "speculator")]
    return uses[1] is not None and (uses[0] != "simulated" or uses[1] == "simulated")


def _length(chances: list[float]) -> float:
    """Tokens that a round gains in the mean."""
    return 1.0 + sum(float(chance) for chance in accumulate(chances, mul))
