"""The decisions of a policy that cost most, against the placement with the best mean TTFT."""

from __future__ import annotations

import numpy as np

from bien.replay.route.report import Costliest
from bien.replay.route.variant import Seen


def costliest(seen: Seen, oracle: Seen, count: int) -> list[Costliest]:
    """The `count` turns for which that placement would have saved most, the most first."""
    index = {id: i for i, id in enumerate(oracle.ids)}
    ours = [i for i, id in enumerate(seen.ids) if id in index]
    theirs = [index[seen.ids[i]] for i in ours]
    saved = seen["ttft"][ours] - oracle["ttft"][theirs]
    order = [int(k) for k in np.argsort(-saved, kind="stable") if saved[k] > 0][:count]
    column = {name: seen[name] for name in seen.packed}
    out = []
    for k in order:
        i, j = ours[k], theirs[k]
        ints = {name: int(column[name][i]) for name in column if name not in ("sent", "ttft")}
        out.append(
            Costliest(
                id=seen.ids[i],
                ttft_ms=float(column["ttft"][i]) * 1e3,
                saved_ms=float(saved[k]) * 1e3,
                prompt_tokens=ints["prompt"],
                worker=seen.workers[ints["worker"]],
                queued_tokens=ints["queued"],
                predicted=ints["predicted"],
                cached=ints["cached"],
                holder=seen.workers[ints["holder"]],
                held=ints["best"],
                holder_queued=ints["ahead"],
                infinite=ints["whole"],
                oracle_worker=oracle.workers[int(oracle["worker"][j])],
                oracle_cached=int(oracle["cached"][j]),
                oracle_ttft_ms=float(oracle["ttft"][j]) * 1e3,
                reasons=seen.reasons[i] if seen.reasons else {},
            )
        )
    return out
