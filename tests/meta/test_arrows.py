"""Which room may import which: core <- traces <- gateway <- replay; plugins come in by entry points."""

from __future__ import annotations

import ast
import re

MAY_IMPORT = {
    "core": {"core"},
    "traces": {"core", "traces"},
    "gateway": {"core", "traces", "gateway"},
    "replay": {"core", "traces", "gateway", "replay"},
}
DOORS = ("bien.core.api", "bien.traces.api", "bien.gateway.api")
NAMED = re.compile(r"bien\.(core|traces|gateway|replay|plugins)(\.\w+)*(:\w+)?")


def bien_imports(source):
    return [(name, line) for name, line in source.imports() if name == "bien" or name.startswith("bien.")]


def test_rooms_form_a_chain(sources):
    wrong = [
        f"{s.where}:{line} imports {name}"
        for s in sources
        if s.room != "plugins"
        for name, line in bien_imports(s)
        if name.split(".")[1] not in MAY_IMPORT[s.room]
    ]
    assert wrong == []


def test_rooms_do_not_name_each_other_in_strings_either(sources):
    wrong = [
        f"{s.where}:{node.lineno} names {node.value!r}"
        for s in sources
        if s.room != "plugins"
        for node in ast.walk(s.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (named := NAMED.fullmatch(node.value)) and named[1] not in MAY_IMPORT[s.room]
    ]
    assert wrong == []


def test_plugins_use_the_doors_only(sources):
    def allowed(source, name):
        own = ".".join(source.name.split(".")[:4])  # a plugin may be a small folder
        shared = ".".join(source.name.split(".")[:3]) + "._"  # what plugins of a kind have in common
        doors = any(name == d or name.startswith(f"{d}.") for d in (*DOORS, own))
        return doors or name.startswith(shared)

    wrong = [
        f"{s.where}:{line} imports {name}"
        for s in sources
        if s.room == "plugins"
        for name, line in bien_imports(s)
        if not allowed(s, name)
    ]
    assert wrong == []


def test_plugins_take_public_names_only(sources):
    import importlib

    public = {door: set(importlib.import_module(door).__all__) for door in DOORS}
    wrong = [
        f"{s.where}:{line} imports {name}"
        for s in sources
        if s.room == "plugins"
        for name, line in bien_imports(s)
        for door in DOORS
        if name.startswith(f"{door}.") and name.removeprefix(f"{door}.") not in public[door]
    ]
    assert wrong == []


def test_imports_are_absolute(sources):
    wrong = [
        f"{s.where}:{node.lineno}"
        for s in sources
        for node in ast.walk(s.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert wrong == []


def test_annotations_are_postponed(sources):
    def has_future(tree):
        return any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)

    code = [s for s in sources if any(isinstance(n, (ast.FunctionDef, ast.ClassDef)) for n in s.tree.body)]
    assert [s.where for s in code if not has_future(s.tree)] == []
