"""Small tables of points whose truth is known: the cost model times a factor and a trend."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable
from pathlib import Path

from bien.replay.validate.points import read_points
from bien.replay.validate.roofline import Roofline

COLUMNS = (
    "id", "model", "gpu", "n_gpus", "precision", "framework", "framework_version", "parallelism", "disagg",
    "isl", "osl", "concurrency", "tok_s_user", "ttft_ms", "tpot_ms", "measured",
)  # fmt: skip
ROW = {
    "model": "meta-llama/Llama-3.1-70B",
    "gpu": "h200_sxm",
    "precision": "fp8",
    "framework": "vllm",
    "framework_version": "1",
    "parallelism": "tp4pp1dp1etp4ep1",
    "disagg": "0",
    "ttft_ms": "100",
    "tpot_ms": "10",
}
LOADS = [(isl, osl, c) for isl, osl in ((1024, 1024), (8192, 1024), (1024, 8192)) for c in (4, 8, 16, 32, 64)]


def ladder(**changes: str) -> list[dict[str, str]]:
    """The loads that are usually published, without answers."""
    rows = []
    for isl, osl, c in LOADS:
        row = {**ROW, "isl": str(isl), "osl": str(osl), "concurrency": str(c), **changes}
        rows.append(
            {**row, "id": changes.get("id", "") + f"{row['gpu']}-{row['parallelism']}-{isl}-{osl}-{c}"}
        )
    return rows


def write(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    text = "\n".join([",".join(COLUMNS), *(",".join(_quoted(r.get(c, "")) for c in COLUMNS) for r in rows)])
    path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())
    return path


def answered(
    path: Path, rows: list[dict[str, str]], factor: Callable[[dict[str, str]], tuple[float, float]]
) -> list[dict[str, str]]:
    """The rows with what the roofline says, times factors of TPOT and TTFT."""
    roofline = Roofline()
    done = []
    for row, point in zip(rows, read_points(write(path, rows)).points, strict=True):
        said = roofline.predict(point)
        tpot, ttft = factor(row)
        done.append(
            {**row, "tpot_ms": f"{1e3 * tpot * said.tpot:.9f}", "ttft_ms": f"{1e3 * ttft * said.ttft:.9f}"}
        )
    return done


def _quoted(text: str) -> str:
    return f'"{text}"' if "," in text else text
