"""Two results side by side, once their cards say that they measured the same load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bien.core.errors import UserError
from bien.replay.measure import LAG_MS
from bien.replay.metrics import Distribution
from bien.replay.result import Card, Result

SCHEMA = "bien.comparison/1"
CLOSE = 0.01  # what shares that are measured may differ by
SHARES = ("coverage", "overload", "errors", "length_mismatch")
LAGS = ("send_lag_ms", "loop_lag_ms")
FREE = ("version",)  # may differ: another version is a thing to compare
PERCENTILES = ("mean", "p50", "p90", "p95", "p99")


class Difference(msgspec.Struct, frozen=True):
    """A field that has two values."""

    field: str
    a: Any
    b: Any


class Figure(msgspec.Struct, frozen=True):
    """One figure of both results; `ratio` is b / a, null where one is missing or a is 0."""

    name: str
    a: float | None
    b: float | None
    ratio: float | None


class Comparison(msgspec.Struct, kw_only=True):
    schema: str = SCHEMA
    a: str  # the files
    b: str
    alike: bool
    unlike: list[Difference]  # of the cards
    invalid: dict[str, list[str]]  # by file, why it is no valid result
    kinds: tuple[str, str]
    versions: tuple[str, str]
    deployment: list[Difference]  # what was compared, if the cards are alike
    figures: list[Figure]


def compare(a: Result, b: Result, names: tuple[Path, Path], *, force: bool = False) -> Comparison:
    """Put them side by side.

    Raises:
        UserError: the cards are unlike, each field with both values; not with `force`.
    """
    first, second = map(str, names)
    unlike = differences(a.card, b.card)
    if unlike and not force:
        fields = "; ".join(f"{d.field} is {_shown(d.a)} and {_shown(d.b)}" for d in unlike)
        raise UserError(
            f"{first} and {second} did not measure the same load: {fields}; "
            "valid: results with equal cards, or --force"
        )
    return Comparison(
        a=first,
        b=second,
        alike=not unlike,
        unlike=unlike,
        invalid={n: r.validity.reasons for n, r in ((first, a), (second, b)) if not r.validity.valid},
        kinds=(a.kind, b.kind),
        versions=(a.card.version, b.card.version),
        deployment=_unequal(a.deployment, b.deployment),
        figures=[Figure(n, x, y, y / x if x and y is not None else None) for n, x, y in _pairs(a, b)],
    )


def differences(a: Card, b: Card) -> list[Difference]:
    """Fields of the cards that keep two results from being compared.

    What was asked for must be equal. What was measured must be close: shares within 0.01; lags of the client
    at most what makes a result invalid, or the same. The corpus is its hash, wherever it was read from.
    """
    found = [] if a.corpus.hash == b.corpus.hash else [("corpus.hash", a.corpus.hash, b.corpus.hash)]
    for name in Card.__struct_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if name == "corpus" or name in FREE:
            continue
        if name in SHARES:
            equal = abs(x - y) <= CLOSE
        elif name in LAGS:
            name, x, y = f"{name}.p99", x.p99, y.p99
            equal = ((x or 0.0) <= LAG_MS and (y or 0.0) <= LAG_MS) or x == y
        else:
            equal = x == y
        if not equal:
            found.append((name, x, y))
    return [Difference(f"card.{name}", x, y) for name, x, y in found]


def _unequal(a: Any, b: Any, at: str = "") -> list[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(k for k in b if k not in a)]
        parts = [(f"{at}.{k}" if at else str(k), a.get(k), b.get(k)) for k in keys]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        parts = [(f"{at}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return [] if a == b else [Difference(at, a, b)]
    return [d for where, x, y in parts for d in _unequal(x, y, where)]


def _pairs(a: Result, b: Result) -> Iterator[tuple[str, float | None, float | None]]:
    for name, x in _figures(a).items():
        yield name, x, _figures(b)[name]


def _figures(result: Result) -> dict[str, float | None]:
    cache, through, jobs, tokens = result.cache, result.throughput, result.jobs, result.tokens
    figures: dict[str, float | None] = {}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "interactivity"):
        figures |= _percentiles(name, getattr(result, name))
    for kind in ("logical", "computed", "output"):
        figures[f"throughput.{kind}"] = getattr(through, kind)
        figures[f"throughput.per_accelerator.{kind}"] = getattr(through.per_accelerator, kind)
        figures[f"throughput.steady.{kind}"] = getattr(through.steady, kind) if through.steady else None
    figures["throughput.seconds"] = through.seconds
    figures |= {"cache.ideal": cache.ideal, "cache.achieved": cache.achieved}
    for cause in ("rounding", "other_replica", "capacity", "unknown"):
        figures[f"cache.loss.{cause}"] = getattr(cache.loss, cause) if cache.loss else None
    for name in ("count", "per_hour", "per_hour_per_user", "per_hour_per_accelerator", "slowdown"):
        figures[f"jobs.{name}"] = getattr(jobs, name)
    figures |= _percentiles("jobs.seconds", jobs.seconds)
    # What a job costs: whatever price there is, it is one of these, or accelerator time.
    for name in ("logical_input", "computed_input", "cached_input", "output"):
        figures[f"tokens.{name}"] = getattr(tokens, name)
        figures[f"tokens_per_job.{name}"] = getattr(tokens, name) / jobs.count if jobs.count else None
    hourly = jobs.per_hour_per_accelerator
    figures["accelerator_seconds_per_job"] = 3600 / hourly if hourly else None
    figures |= {"turns.count": result.turns.count, "turns.errors": result.turns.errors}
    figures |= {"router.parity": result.router.parity, "router.imbalance": result.router.imbalance}
    figures["speculation.acceptance_length"] = result.speculation.acceptance_length
    return figures


def _percentiles(name: str, values: Distribution) -> dict[str, float | None]:
    return {f"{name}.{p}": getattr(values, p) for p in PERCENTILES}


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else repr(value)
