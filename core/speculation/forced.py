"""Whether a pool's forced acceptance can be had from its drafter."""

from __future__ import annotations

from bien.core.errors import DeploymentError
from bien.core.speculation.options import SpeculationSpec


def check_forced(spec: SpeculationSpec, drafter: str | None, drafts: int | None, path: str) -> None:
    """DeploymentError for lengths that no round could have, and which results would name all the same.

    drafter: its name; None: the pool has none. drafts: of a round, by the drafter itself; None: not known
    yet. path: of the pool, for messages.
    """
    if not spec.acceptance:
        return
    field = f"{path}.speculation.{_given(spec)}"
    if drafter is None:
        raise DeploymentError(
            f"{field} forces how many drafts are accepted, but the pool has no speculator; valid: one that "
            "drafts (in a simulation 'simulated'), or no forced acceptance",
            field=field,
        )
    if spec.max_drafts == 0:
        raise DeploymentError(
            f"{field} forces how many drafts are accepted, but speculation.max_drafts = 0 lets none be made; "
            "valid: 1 or more",
            field=field,
        )
    if drafts is None:
        return
    most = drafts if spec.max_drafts is None else min(drafts, spec.max_drafts)
    if spec.golden and spec.max_drafts is not None and spec.max_drafts > drafts:
        raise DeploymentError(
            f"{field} = {spec.golden!r} is taken at speculation.max_drafts = {spec.max_drafts}, but "
            f"speculator {drafter!r} makes {drafts} drafts a round; valid: speculation.max_drafts of 1 to "
            f"{drafts}, or a larger max_drafts of the speculator",
            field=field,
        )
    forced = next((at for at, chance in enumerate(spec.acceptance) if not chance), len(spec.acceptance))
    if forced > most:
        raise DeploymentError(
            f"{field} needs {forced} drafts a round, but speculator {drafter!r} makes {most}"
            f"{'' if most == drafts else f' (speculation.max_drafts; {drafts} by itself)'}; valid: "
            f"an acceptance of at most {most} positions, or an acceptance_length up to {most + 1}",
            field=field,
        )


def _given(spec: SpeculationSpec) -> str:
    # Which field asked for it: chances are derived from the others.
    if spec.golden:
        return "golden"
    return "acceptance" if spec.acceptance_length is None else "acceptance_length"
