"""Every built-in plugin is registered, as everybody's is, and says what it is."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

from bien.core.plugins import PluginManager
from bien.core.providers import KINDS


def declared(root) -> dict[str, str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return project["entry-points"]["bien"]


def test_every_provider_module_is_registered_under_its_path(sources, root):
    modules = {s.name for s in sources if s.room == "plugins" and "bien_providers" in s.path.read_text()}
    assert modules
    assert declared(root) == {m.removeprefix("bien.plugins."): m for m in modules}


def test_the_installed_metadata_is_current(root):
    installed = {e.name: e.value for e in metadata.distribution("bien").entry_points if e.group == "bien"}
    assert installed == declared(root), "entry points changed: run `pip install -e .` again"


def test_every_built_in_plugin_loads():
    manager = PluginManager.load("")
    assert [p.text for p in manager.problems] == []
    assert manager.duplicates() == []


def test_every_built_in_provider_has_a_summary():
    manager = PluginManager.load("")
    bare = [i.provider.name for i in manager.installed if not i.provider.summary]
    assert bare == []


def test_every_kind_is_documented(root):
    readme = (root / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE)
    assert set(rows) == set(KINDS)
