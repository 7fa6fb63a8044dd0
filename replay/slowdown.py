"""How much longer agents wait for the model than they would alone on it, with an ideal cache."""

from __future__ import annotations

import msgspec

from bien.core.deployment import Deployment, Selection
from bien.replay.driver import Driver


def alone(deployment: Deployment, loaded: Driver) -> Deployment:
    """`deployment` with one worker, of its first pool, that never evicts what the turns of the run
    `loaded` leave behind: with one worker nothing is on another replica either, so its cache is ideal."""
    pool, account = deployment.pool[0], loaded.account
    block = deployment.model.block_tokens
    # What an infinite cache did not have, and the outputs; nothing is known to be shared of turns that
    # failed. Each turn may begin two blocks that end unfilled, the prompt's and the output's.
    fresh = account.prompt_tokens - account.ideal
    fresh += sum(r.asked + 2 * block + (0 if r.ok else r.prompt_tokens) for r in loaded.records)
    # Besides, turns in flight may compute side by side what they could have shared.
    longest = max((r.prompt_tokens + r.asked for r in loaded.records), default=0)
    tokens = max(pool.kv_tokens or 0, fresh + pool.slots * (longest + block))
    executor = pool.executor
    if executor.use == "simulated" and "machine" in executor.parameters:
        executor = Selection(executor.use, {**executor.parameters, "unlimited": True})
    one = msgspec.structs.replace(
        pool,
        executor=executor,
        role="both",
        count=1,
        kv_tokens=tokens,
        kv_memory=None,
        snapshots=max(pool.snapshots, tokens // block),
    )
    return msgspec.structs.replace(deployment, pool=(one,))


def slowdown(loaded: Driver, ideal: Driver) -> float | None:
    """Mean over jobs of the job's waiting in the run `loaded` over its waiting in the run `ideal`.

    A job's waiting is the sum over its turns of the time from sending to the last token: gaps do not
    count, and sub-agents that wait at the same time count each. Jobs that did not complete in both runs
    are left out; None if no job is left.
    """
    before, after = _waiting(ideal), _waiting(loaded)
    ratios = [after[job] / before[job] for job in after if before.get(job)]
    return sum(ratios) / len(ratios) if ratios else None


def _waiting(driver: Driver) -> dict[str, float]:
    """Seconds by session, of completed jobs."""
    waiting = {job.session: 0.0 for job in driver.jobs if job.end >= 0 and not job.failed}
    for record in driver.records:
        if record.session in waiting:
            waiting[record.session] += record.e2e or 0.0
    return waiting
