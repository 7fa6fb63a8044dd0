"""Whether a server's metrics agree with what the client believes of a probe."""

from __future__ import annotations

import msgspec

from bien.core.errors import UserError
from bien.replay.calibrate.metrics import ServerState, Sum
from bien.replay.calibrate.remote_flow import Flow

OFF = 0.3  # of the server's mean gap, that the client's may differ by


class Checked(msgspec.Struct, frozen=True):
    """`dropped`: why nothing is learnt of the probe, or "". `cached`: of the prompts of all its requests;
    None: nobody says."""

    dropped: str
    cached: int | None
    prefill: Sum | None
    first: Sum | None


def check(flow: Flow) -> Checked:
    """UserError, with the numbers: others use the server, or it counts otherwise than we do."""
    before, after = flow.before.state, flow.after.state
    said = [r.cached for r in flow.all]
    cached = sum(said) if min(said) >= 0 else None
    if before is None or after is None:
        return Checked("", cached, None, None)
    _check_before(before)
    sent = {
        "requests": (len(said), "requests"),
        "prompt_tokens": (sum(r.prompt_tokens for r in flow.all), "prompt tokens"),
        "output_tokens": (sum(r.got for r in flow.all), "output tokens"),
    }
    for field, (ours, what) in sent.items():
        if (counted := _since(after, before, field)) is None or counted == ours:
            continue
        why = "others use the server" if counted > ours else "its metrics are not those of all that we ask"
        raise UserError(
            f"the server counted {counted:,} {what} while {ours:,} were ours: {why}; valid: a server, and "
            "its own metrics, that nobody else uses",
            field="url",
        )
    if drafts := _since(after, before, "drafts"):
        raise UserError(
            f"the server speculates ({drafts:,} drafts during a probe): tokens of its streams are not steps; "
            "valid: a server started without speculation",
            field="url",
        )
    counted = _since(after, before, "cached_tokens")
    if cached is not None and counted is not None and cached != counted:
        raise UserError(
            f"the server's metrics count {counted:,} cached prompt tokens where its answers say {cached:,}: "
            "what its prompts cost cannot be told",
            field="url",
        )
    dropped = ""
    if preempted := _since(after, before, "preemptions"):
        dropped = f"{preempted} sequences were preempted"
    prefill, first = (
        now.since(then) if now is not None and then is not None else None
        for now, then in ((after.prefill, before.prefill), (after.first, before.first))
    )
    return Checked(dropped, cached if cached is not None else counted, prefill, first)


def check_window(flow: Flow, most: int) -> tuple[str, Sum | None]:
    """Why the batch's window is no measure of it, or ""; and what the server counted of gaps in it. `most`:
    sequences of the largest batch. UserError: others use the server."""
    ours = len(flow.records)
    if flow.window is None:
        return "sequences of a batch did not decode together for long enough", None
    first, last = (look.state for look in flow.window)
    if first is None or last is None:
        return "", None
    # A count that is not of the last step may be that of an earlier batch.
    running = min(state.running or 0 for state in (first, last))
    if running > (ours if first.live else most):
        raise UserError(
            f"{running} requests run on the server, {ours} of them are ours: others use it; valid: a server "
            "that nobody else uses",
            field="url",
        )
    # The last look may have come after the end of some.
    open_ = min(r.last for r in flow.records) > flow.window[1].came
    for state in (first, last) if open_ else (first,):
        if state.live and (state.running not in (None, ours) or state.waiting):
            return f"{state.running} of {ours} sequences ran, {state.waiting or 0} waited", None
    gaps = last.gaps.since(first.gaps) if open_ and first.gaps is not None and last.gaps is not None else None
    return "", gaps if gaps is not None and gaps.count >= 4 * ours else None


def _check_before(state: ServerState) -> None:
    if state.engines > 1:
        raise UserError(
            f"{state.engines} engines are behind the server's metrics: which of them takes a sequence cannot "
            "be told; valid: the address of one engine",
            field="url",
        )
    if state.live and (state.running or state.waiting):
        raise UserError(
            f"{state.running or 0} requests run and {state.waiting or 0} wait on the server before a probe, "
            "none of them ours; valid: a server that nobody else uses",
            field="url",
        )


def _since(after: ServerState, before: ServerState, field: str) -> int | None:
    now, then = getattr(after, field), getattr(before, field)
    return None if now is None else int(now) - int(then or 0)
