"""Whether this machine can carry a deployment: memory and cores, before any worker is started."""

from __future__ import annotations

from bien.core.compose import Composition
from bien.core.cores import available_cores, share_threads
from bien.core.deployment import ModelSpec
from bien.core.open_files import allow_open_files
from bien.core.sizes import megabytes
from bien.core.worker.memory import MemoryPlan, check_memory


def check_resources(composition: Composition, model: ModelSpec) -> list[str]:
    """Warnings. ResourceError with the numbers when memory or cores do not suffice; other deployments on
    this machine are seen only in what they have taken by now. Raises the limit on open files.

    `model` may have the folder that the composition's name was resolved to.
    """
    plan = check_memory(composition, model)
    _, warnings = share_threads(composition.deployment.pool, plan.host, available_cores())
    files = allow_open_files(2 * composition.spec.max_inflight)  # a few clients keep idle connections
    return [*memory_warnings(plan), *warnings, *([files] if files else [])]


def memory_warnings(plan: MemoryPlan) -> list[str]:
    """What to say of a plan that was not refused."""
    if plan.fits:
        return plan.small_pools()
    said = f"the deployment needs {megabytes(plan.need)} of memory, {megabytes(plan.limit)} are available"
    return [f"{said}: it may be killed (host.oversubscribe)", *plan.small_pools()]
