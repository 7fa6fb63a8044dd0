"""The two ways to run a rung: live, with a stack of its own, and simulated."""

from __future__ import annotations

from pathlib import Path

from bien.core.deployment import Deployment
from bien.core.plugins import PluginManager
from bien.replay.ladder import RunRung
from bien.replay.live import Plan
from bien.replay.options import ReplayOptions
from bien.replay.result import Result, write_result
from bien.replay.run import run_once
from bien.replay.simulation import SimulationPlan, simulate
from bien.replay.simulation_display import SimulationDisplay
from bien.replay.traces import Survey, open_paths
from bien.replay.turns_file import turn_lines, write_turns


def live_rung(traces: tuple[Path, ...]) -> RunRung:
    """Each rung starts the stack anew, so that its caches are empty."""

    def run(deployment: Deployment, options: ReplayOptions, json: Path) -> tuple[Result | None, bool]:
        return run_once(Plan(traces, options, json, deployment))

    return run


def simulated_rung(traces: tuple[Path, ...], manager: PluginManager, slowdown: bool) -> RunRung:
    """Each rung has engines of its own."""

    def run(deployment: Deployment, options: ReplayOptions, json: Path) -> tuple[Result | None, bool]:
        plan = SimulationPlan(traces, options, deployment, slowdown=slowdown)
        survey = Survey(open_paths(traces, manager), options)
        survey.check()
        with SimulationDisplay(survey) as display:
            done = simulate(plan, manager, display.tick)
        write_result(json, done.result)
        write_turns(json, turn_lines(done.driver.records, done.driver.started))
        return done.result, done.interrupted

    return run
