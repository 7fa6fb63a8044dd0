"""Settings of every test process: one thread per math library, no hub, built-in plugins only."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# A shell that runs the tests in the background hands down ignored signals; those that are tested here, and
# what the tests start, must act on them as they do at a terminal.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

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
