"""Executor `simulated`: constant cost per step, per token computed and per sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from bien.core.api import Context, ExecutorPlan, Provider, hookimpl, simulated_executor

Milliseconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class SimulatedConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Milliseconds of a step = step_ms + token_ms x computed tokens + row_ms x sequences in the step."""

    step_ms: Milliseconds = 8.0
    token_ms: Milliseconds = 0.05
    row_ms: Milliseconds = 0.0


def make(config: SimulatedConfig, ctx: Context) -> Any:
    def cost(plan: ExecutorPlan) -> float:
        return (config.step_ms + config.token_ms * plan.tokens + config.row_ms * plan.rows) / 1000.0

    return simulated_executor(ctx, cost)


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider("executor", "simulated", make, SimulatedConfig, summary="virtual steps of a constant cost")
    ]
