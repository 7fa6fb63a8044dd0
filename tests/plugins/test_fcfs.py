"""The built-in scheduler against the suite, at budgets that bind and that do not."""

from __future__ import annotations

import pytest

from bien.core.testing.scheduler import SchedulerSuite
from bien.core.testing.suites import failures
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig


class TestFcfs(SchedulerSuite):
    def build(self) -> Fcfs:
        return Fcfs(FcfsConfig())


@pytest.mark.parametrize("config", [FcfsConfig(token_budget=5), FcfsConfig(max_running=2)])
def test_fcfs_conforms_at_other_parameters(config: FcfsConfig):
    assert failures(type("Suite", (SchedulerSuite,), {"build": lambda self: Fcfs(config)})) == []
