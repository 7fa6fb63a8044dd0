"""Models that are known by name: their configs lie in `known/`, so that `inspect` and simulations need no
download. Weights of one of them can be fetched (`bien.core.models.fetch`), of the others a folder is needed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

SMOLLM2 = "smollm2-135m"  # Apache-2.0; config read from the GGUF that `bien.core.models.fetch` unpacks
_FOLDER = Path(__file__).parent / "known"


@cache
def known() -> tuple[str, ...]:
    """The names, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def config(name: str) -> dict[str, Any]:
    """config.json of a known name, as its publisher's checkpoint has it, but for what nothing here reads."""
    found: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text())
    return found
