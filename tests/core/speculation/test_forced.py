"""Forced acceptance is refused where no drafter could have such rounds."""

from __future__ import annotations

import re

import pytest

from bien.core.compose import compose
from bien.core.deployment import Deployment, ModelSpec, PoolSpec, Selection
from bien.core.errors import DeploymentError
from bien.core.plugins import PluginManager
from bien.core.speculation.forced import check_forced
from bien.core.speculation.options import SpeculationSpec


@pytest.mark.parametrize(
    ("spec", "drafts"),
    [
        ({}, 2),
        ({"acceptance_length": 3.0}, 2),
        ({"acceptance_length": 1.0}, 1),
        ({"acceptance": (0.5, 0.5, 0.0, 0.7)}, 2),  # what lies behind a zero is never reached
        ({"acceptance": (0.5,)}, None),
        ({"golden": "glm-5.2/mtp", "max_drafts": 4}, 4),
        ({"golden": "glm-5.2/mtp", "max_drafts": 4}, 8),
    ],
)
def test_what_a_drafter_can_have(spec: dict[str, object], drafts: int | None) -> None:
    check_forced(SpeculationSpec(**spec), "x", drafts, "pool[0]")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "drafts", "says"),
    [
        ({"acceptance_length": 3.1}, 2, "speculation.acceptance_length needs 3 drafts a round.*'x' makes 2;"),
        ({"acceptance_length": 3.1, "max_drafts": 2}, 8, r"makes 2 \(speculation.max_drafts; 8 by itself\)"),
        ({"acceptance": (0.5, 0.5)}, 1, "speculation.acceptance needs 2 .*at most 1 positions"),
        # Its mean would fit into 4, but it was measured with 8.
        ({"golden": "glm-5.2/mtp", "max_drafts": 8}, 4, "speculation.golden = .*max_drafts = 8, .* makes 4"),
        ({"acceptance_length": 1.0, "max_drafts": 0}, 4, "max_drafts = 0"),
    ],
)
def test_what_it_cannot(spec: dict[str, object], drafts: int, says: str) -> None:
    with pytest.raises(DeploymentError, match=says) as caught:
        check_forced(SpeculationSpec(**spec), "x", drafts, "pool[0]")  # type: ignore[arg-type]
    assert caught.value.field is not None and caught.value.field.startswith("pool[0].speculation.")


@pytest.mark.parametrize(
    ("speculator", "says"),
    [
        (None, "acceptance_length forces .* the pool has no speculator"),
        (Selection("prompt-lookup", {"max_drafts": 2}), "needs 5 drafts a round.*'prompt-lookup' makes 2"),
        (Selection("simulated", {"max_drafts": 2}), "needs 5 drafts a round.*'simulated' makes 2"),
    ],
)
def test_composed_it_is_refused(speculator: Selection | None, says: str) -> None:
    manager = PluginManager.load()
    pool = PoolSpec(speculator=speculator, speculation=SpeculationSpec(acceptance_length=6.0))
    with pytest.raises(DeploymentError, match=f"^{re.escape('pool[0].')}.*{says}"):
        compose(Deployment(ModelSpec(), pool=(pool,)), manager)
