"""Settings of every test process: one thread per math library, no hub, built-in plugins only."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["BIEN_PLUGINS"] = ""

# Shared machines stall at random: no deadlines; the same examples in every run.
settings.register_profile(
    "bien", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("bien")
