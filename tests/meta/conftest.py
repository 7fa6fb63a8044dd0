"""The source of every room, parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "traces", "gateway", "replay", "plugins")


@dataclass(frozen=True)
class Source:
    """One module of a room. `name` is dotted, e.g. "bien.core.kv.groups"."""

    path: Path
    name: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.split(".")[1]

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    def imports(self) -> Iterator[tuple[str, int]]:
        """(dotted name, line) of every import, those inside functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node.lineno


def _load(path: Path) -> Source:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(("bien", *parts)).removesuffix(".__init__")
    return Source(path, name, ast.parse(path.read_text(encoding="utf-8"), str(path)))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Every module that ships (the build hook does not)."""
    paths = [p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))]
    return [_load(p) for p in paths if p != ROOT / "core" / "_build.py"]
