"""What results call forced acceptance was forced."""

from __future__ import annotations

import msgspec
import pytest

from bien.core.deployment import Deployment, Selection, load_deployment
from bien.core.errors import DeploymentError
from bien.core.plugins import PluginManager
from bien.core.speculation.options import SpeculationSpec
from bien.replay.commands.deployment import EXAMPLES
from bien.replay.options import ReplayOptions
from bien.replay.simulation import SimulationPlan, simulate, simulated


def deployed(speculator: Selection | None, spec: SpeculationSpec) -> Deployment:
    found = load_deployment("laptop", [EXAMPLES])
    pools = (msgspec.structs.replace(pool, speculator=speculator, speculation=spec) for pool in found.pool)
    return msgspec.structs.replace(found, pool=tuple(pools))


@pytest.mark.parametrize(
    ("use", "says"), [(None, "has no speculator"), ("mtp", "has speculator 'mtp'"), ("suffix", "'suffix'")]
)
def test_a_drafter_that_is_left_out_forces_nothing(use: str | None, says: str) -> None:
    speculator = None if use is None else Selection(use)
    with pytest.raises(DeploymentError, match=f"{says}.*write speculator = .* use = 'simulated'"):
        simulated(deployed(speculator, SpeculationSpec(acceptance_length=2.5)))
    left, notes = simulated(deployed(speculator, SpeculationSpec()))
    assert left.pool[0].speculator is None
    assert any("is left out" in note for note in notes) is (use is not None)


def test_the_card_says_what_is_measured() -> None:
    drafter = Selection("simulated", {"max_drafts": 2})
    deployment = deployed(drafter, SpeculationSpec(acceptance_length=2.5))
    options = ReplayOptions(concurrency=1, time_scale=100.0, sessions=1)
    found = simulate(SimulationPlan((), options, deployment), PluginManager.load()).result
    assert found.card.forced_acceptance == 2.5
    assert found.speculation.acceptance_length == pytest.approx(2.5, abs=0.1)
    with pytest.raises(DeploymentError, match="needs 5 drafts a round, but speculator 'simulated' makes 2"):
        more = deployed(drafter, SpeculationSpec(acceptance_length=6.0))
        simulate(SimulationPlan((), options, more), PluginManager.load())
