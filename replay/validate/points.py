"""`Point`: one published measurement, read from a table and put into the terms of the cost model."""

from __future__ import annotations

import csv
import io
import lzma
import re
from pathlib import Path

import msgspec

from bien.core.costs.layout import Layout
from bien.core.costs.serving import Load, Workers
from bien.core.errors import UserError

NEEDED = (
    "model", "gpu", "precision", "framework", "parallelism", "disagg", "isl", "osl", "concurrency",
    "ttft_ms", "tpot_ms",
)  # fmt: skip


COUNTS = ("isl", "osl", "concurrency")
MOST = 1e7  # of milliseconds, tokens, requests: more is no measurement
FLAGS = dict.fromkeys(("1", "true", "t", "yes", "y"), True)
FLAGS |= dict.fromkeys(("0", "false", "f", "no", "n"), False)
DEVICES = 10_000  # of one serving


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A row that can be predicted. `group` and everything but `ttft` and `tpot` are what a prediction may
    look at."""

    id: str
    group: tuple[str, str, str, str, str]  # model, gpu, framework, precision, "agg" or "disagg"
    version: str  # of the engine
    measured: str  # when
    load: Load
    prefill: Workers | None  # None: prefill and decode on the same workers
    decode: Workers
    ttft: float  # seconds
    tpot: float  # seconds

    @property
    def configuration(self) -> tuple[object, ...]:
        """What two repeats have in common."""
        return (*self.group, self.prefill, self.decode, self.load)

    @property
    def print(self) -> tuple[object, ...]:
        """What two copies of one measurement have in common, whatever their names."""
        return (self.load, self.ttft, self.tpot)


class Table(msgspec.Struct, frozen=True):
    points: list[Point]
    rows: int
    dropped: dict[str, int]  # why rows are not among the points, and how many


def read_points(path: Path) -> Table:
    """A CSV, also as .xz. UserError: unreadable, or a column is missing."""
    try:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UserError(f"points {path}: {error}", field="points") from None
    reader = csv.DictReader(io.StringIO(text))
    missing = [c for c in NEEDED if c not in (reader.fieldnames or ())]
    if missing:
        raise UserError(
            f"points {path}: column {missing[0]!r} is missing; needed: {', '.join(NEEDED)}", field="points"
        )
    points: list[Point] = []
    dropped: dict[str, int] = {}
    rows = 0
    try:
        for raw in reader:
            rows += 1
            try:
                points.append(_point({c: raw.get(c) or "" for c in reader.fieldnames or ()}, rows))
            except _Unusable as why:
                dropped[str(why)] = dropped.get(str(why), 0) + 1
    except csv.Error as error:
        raise UserError(f"points {path}, line {reader.line_num}: {error}", field="points") from None
    return Table(points, rows, dropped)


class _Unusable(Exception):
    """Why a row is no point."""


def _point(row: dict[str, str], number: int) -> Point:
    numbers = {k: _number(row, k) for k in ("isl", "osl", "concurrency", "ttft_ms", "tpot_ms")}
    disagg = _flag(row, "disagg")
    name = row["parallelism"]
    if disagg:
        prefill, decode = _apart(name)
    else:
        prefill, decode = None, Workers(_engine(name))
    kind = "disagg" if disagg else "agg"
    return Point(
        id=row.get("id") or f"row {number}",
        group=(row["model"], row["gpu"], row["framework"], row["precision"], kind),
        version=row.get("framework_version") or "",
        measured=(row.get("measured") or "").replace("-", ""),
        load=Load(int(numbers["isl"]), int(numbers["osl"]), int(numbers["concurrency"])),
        prefill=prefill,
        decode=decode,
        ttft=numbers["ttft_ms"] / 1e3,
        tpot=numbers["tpot_ms"] / 1e3,
    )


def _flag(row: dict[str, str], column: str) -> bool:
    found = FLAGS.get(row[column].strip().lower())
    if found is None:
        raise _Unusable(f"{column} is {row[column]!r}, not true or false")
    return found


def _number(row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        raise _Unusable(f"no {column}") from None
    least = 1 if column in COUNTS else 0
    if not (value > 0 and least <= value <= MOST):
        raise _Unusable(f"no {column}")
    return value


_ENGINE = re.compile(r"(t(?:e)?p)(\d+)(?:pp(\d+))?(?:dp(\d+))?(?:etp(\d+))?(?:ep(\d+))?")
_PART = re.compile(r"([PD])(\d+)x\(([^)]*)\)")


def _engine(text: str) -> Layout:
    found = _ENGINE.fullmatch(text.strip())
    if not found:
        raise _Unusable(f"parallelism {text!r} is not understood")
    ways = [int(n or 1) for n in found.groups()[1:]]
    tensor, pipeline, data, cut, expert = ways
    if min(ways) < 1 or max(ways) > DEVICES or tensor * pipeline * data > DEVICES:
        raise _Unusable(f"parallelism {text!r} is not understood")
    if found[1] == "tep":
        return Layout(tensor=tensor, expert=tensor)
    if found[5] is None:
        return Layout(tensor=tensor, pipeline=pipeline, data=data)
    stage, root = tensor * data, round((tensor * data) ** 0.5)
    if root > 1 and root * root == stage and (cut == expert == root or (tensor == data and expert == stage)):
        # A dump multiplied the tensor by the expert ways, which are the same accelerators: rows of another
        # dump with the same measurements say so.
        side = Layout(tensor=root, expert=root) if data == 1 else Layout(data=root, expert=root)
        return msgspec.structs.replace(side, pipeline=pipeline)
    return Layout(tensor=tensor, pipeline=pipeline, data=data, expert=expert, expert_tensor=cut)


def _apart(text: str) -> tuple[Workers, Workers]:
    parts = {kind: Workers(_engine(inner), int(count)) for kind, count, inner in _PART.findall(text)}
    if set(parts) != {"P", "D"} or not all(1 <= w.count <= DEVICES for w in parts.values()):
        raise _Unusable(f"parallelism {text!r} is not understood")
    return parts["P"], parts["D"]
