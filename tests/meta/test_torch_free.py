"""Gateway, traces, replay, plugins and most of core are imported without torch."""

from __future__ import annotations

import subprocess
import sys

# Parts of core where torch lives. What is needed without it (contracts, provider files) is not in here.
TORCH = (
    "bien.core.models",
    "bien.core.kernels",
    "bien.core.executors",
    "bien.core.quantization",
    "bien.core.sampling",
    "bien.core.speculation",
    "bien.core.testing",
)
LIGHT_THERE = (
    "bien.core.executors.base",
    "bien.core.executors.simulated",
    "bien.core.quantization.quantizer",
    "bien.core.speculation.speculator",
    "bien.core.testing.fake_engine",
    "bien.core.testing.scheduler",
    "bien.core.testing.suites",
)
HEAVY = ("torch", "transformers")
PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = [m for m in {heavy!r} if m in sys.modules]
    if heavy:
        sys.exit(f"importing {{name}} imports {{heavy}}")
"""


def probe(names: list[str]) -> str:
    """What is wrong after importing `names` in a fresh process; "" when all is well."""
    code = PROBE.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def light(sources) -> list[str]:
    def heavy(source) -> bool:
        name = source.name
        if source.room == "plugins":  # a plugin's folder may hold what its factory imports
            return "def bien_providers" not in source.path.read_text()
        if name.startswith("bien.replay.bench") or name.endswith("__main__"):
            return True
        return any(name.startswith(f"{p}.") for p in TORCH) and name not in LIGHT_THERE

    return [s.name for s in sources if not heavy(s)]


def test_the_plugin_door_is_light():
    assert probe(["bien.core.api"]) == ""


def test_everything_but_the_models_side_imports_without_torch(sources):
    names = light(sources)
    assert {n.split(".")[1] for n in names} == {"core", "traces", "gateway", "replay", "plugins"}
    assert probe(names) == ""


def test_the_probe_can_fail():
    assert "imports ['torch']" in probe(["torch"])
