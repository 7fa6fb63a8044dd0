"""The built-in scheduler against the suite, at budgets that bind and that do not."""

from __future__ import annotations

import pytest

from bien.core.compose import compose
from bien.core.deployment import parse_deployment
from bien.core.errors import DeploymentError
from bien.core.plugins import PluginManager
from bien.core.testing.fake_engine import FakeEngine, Room
from bien.core.testing.harness import Harness
from bien.core.testing.scheduler import SchedulerSuite
from bien.core.testing.suites import failures
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig


class TestFcfs(SchedulerSuite):
    def build(self) -> Fcfs:
        return Fcfs(FcfsConfig())


def test_drafts_get_what_tokens_leave():
    """In order, and all of it."""
    engine = FakeEngine(Fcfs(FcfsConfig(token_budget=16)), Room(slots=8, drafts=3, blocks=400), seed=1)
    for _ in range(8):
        engine.submit(2, 40)
    while len(engine.log) < 20:
        ready = [s.drafts for s in engine._live.values()]
        engine.step()
        rows, left = engine.log[-1], 8
        if len(engine.log) == 1:  # the prompts
            continue
        for (_, tokens, drafts), most in zip(rows, ready, strict=True):
            assert (tokens, drafts) == (1 + min(most, left), min(most, left))
            left -= drafts
    assert any(drafts == 0 for _, _, drafts in engine.log[-1])


@pytest.mark.parametrize("config", [FcfsConfig(token_budget=5), FcfsConfig(max_running=2)])
def test_fcfs_conforms_at_other_parameters(config: FcfsConfig):
    assert failures(type("Suite", (SchedulerSuite,), {"build": lambda self: Fcfs(config)})) == []


@pytest.mark.parametrize("parameters", [{"token_budget": 0}, {"token_budget": -5}, {"max_running": -1}])
def test_parameters_that_would_plan_nothing_are_refused(parameters: dict[str, int]):
    """With them every request would wait for ever."""
    pool = {"scheduler": {"use": "fcfs", **parameters}}
    with pytest.raises(DeploymentError, match=rf"pool\[0\]\.scheduler\.{next(iter(parameters))}"):
        compose(parse_deployment({"pool": [pool]}), PluginManager.load())


def test_drafts_leave_half_of_a_step_to_prompts() -> None:
    """Decoders draft as much as they like, and a prompt comes: it need not wait until one of them ends."""
    scheduler = Fcfs(FcfsConfig(token_budget=16))
    harness = Harness(scheduler, slots=8, blocks=400, device_drafts=7, draft=lambda tokens: [1] * 7)
    for i in range(4):
        harness.submit(f"d{i}", [7 + i] * 8, 200)
    for _ in range(12):
        harness.step()
    harness.submit("late", list(range(60)), 4)
    for _ in range(30):
        harness.step()
    assert harness.tokens["late"], "drafts kept a prompt waiting"
    assert harness.finish.keys() <= {"late"}, "none of those that decode had ended"
