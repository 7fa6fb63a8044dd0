"""Clocks, threads and sleeps live in core/clock.py, core/worker/ and core/executors/ only.

Everywhere else time passes through a `Clock`, or a simulation would not be the live code.
"""

from __future__ import annotations

import ast

ALLOWED = ("core/clock.py", "core/worker/", "core/executors/", "replay/bench/", "core/testing/parallel.py")
# Benchmarks measure real time; the parallel suite runs ranks as threads.
MODULES = {"time", "threading", "_thread", "queue", "sched", "multiprocessing"}
NAMES = {
    "asyncio.sleep",
    "asyncio.to_thread",
    "concurrent.futures.ThreadPoolExecutor",
    "concurrent.futures.ProcessPoolExecutor",
    "concurrent.futures.thread.ThreadPoolExecutor",
}
WALL = {("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}


def faults(source) -> list[str]:
    found = []
    for name, line in source.imports():
        if name.split(".")[0] in MODULES or name in NAMES:
            found.append(f"{source.where}:{line} imports {name}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if f"{owner}.{node.attr}" in NAMES or node.attr in {"run_in_executor", "to_thread"}:
                found.append(f"{source.where}:{node.lineno} uses {owner}.{node.attr}")
            if (owner, node.attr) in WALL:
                found.append(f"{source.where}:{node.lineno} reads {owner}.{node.attr}")
    return found


def test_only_clock_worker_and_executors_know_time(sources):
    watched = [s for s in sources if not s.where.startswith(ALLOWED)]
    assert len(watched) > 50
    assert [fault for s in watched for fault in faults(s)] == []


def test_the_rule_can_fail(sources):
    clock = next(s for s in sources if s.where == "core/clock.py")
    assert any("imports time" in fault for fault in faults(clock))
    assert any("asyncio.sleep" in fault for fault in faults(clock))
