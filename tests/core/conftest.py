"""Installed distributions, faked: a dist-info folder and a module on the path, as pip leaves them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., None]

PROVIDER = """
from bien.core.api import NoParameters, Provider, hookimpl

@hookimpl
def bien_providers():
    return [Provider({kind!r}, {name!r}, lambda config, ctx: ("made", {name!r}, config, ctx))]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(distribution, source, version=, entry_point=): make a third-party plugin installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def put(
        distribution: str, source: str, *, version: str = "1.0", entry_point: str = "", module: str = ""
    ) -> None:
        module = module or distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[bien]\n{entry_point or distribution} = {module}\n")
        importlib.invalidate_caches()

    yield put
    for name in set(sys.modules) - before:
        if not name.startswith("bien."):
            del sys.modules[name]
    importlib.invalidate_caches()


def provider(kind: str, name: str) -> str:
    """Source of a plugin with one provider."""
    return PROVIDER.format(kind=kind, name=name)


@pytest.fixture
def source() -> Callable[[str, str], str]:
    return provider
