"""`Serving`: TTFT and TPOT of a closed loop of equal requests, from a `StepModel`, without replaying it.

Each of `concurrency` clients sends a prompt, waits for its answer and sends the next one. A request lives
through `osl` decode steps; meanwhile each other one is prefilled once, which holds decoding up, except on
workers of its own. Requests beyond what the KV cache holds wait for a place.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from bien.core.costs.layout import Layout
from bien.core.costs.step import ROOFLINE, StepModel

Array = NDArray[np.float64]
CHUNK = 8192  # tokens of one prefill step: the budget that engines ship with
# Clients that start together stay partly in step, so a prompt finds more of them waiting than a random
# arrival would: this share of the others. From published ladders of concurrency, where it depends on neither
# model nor lengths.
BUNCHED = 0.06
# Of a first token, what no step explains: the request's way through the server, its tokens, the step under
# way; and how much longer prompts take than their roofline, being parts of mixed steps. Also from there.
REQUEST = 0.06
PROMPT = 1.5


class Load(msgspec.Struct, frozen=True):
    """What the clients do."""

    isl: int  # tokens of a prompt
    osl: int  # tokens of an answer
    concurrency: int  # requests in flight


class Estimate(msgspec.Struct, frozen=True):
    """Seconds, by the terms of a step (`TERMS`), so that a calibration can weigh them."""

    decode: tuple[float, ...]  # a decode step of the steady state
    held: tuple[float, ...]  # what prefills of others add to a token, in the mean
    prefill: tuple[float, ...]  # a prompt alone
    before: tuple[float, ...]  # prompts that are computed before one's own
    queued: float  # requests without a place in the cache, per one that has a place
    rows: float  # per decode step of a worker
    transfer: float = 0.0  # from the prefill to the decode worker

    @property
    def tpot(self) -> float:
        return sum(self.decode) + sum(self.held)

    def ttft(self, osl: int) -> float:
        """Of one that finds the usual number of prompts before it."""
        steps = sum(self.prefill) + sum(self.before) + sum(self.decode) + self.transfer
        own = REQUEST + PROMPT * steps
        return own + self.queued * (own + osl * self.tpot)


class Workers(msgspec.Struct, frozen=True):
    """`count` engines of one layout."""

    layout: Layout
    count: int = 1

    @property
    def devices(self) -> int:
        return self.count * self.layout.devices


def together(model: StepModel, load: Load) -> Estimate:
    """Prefill and decode on the same engine."""
    rows = min(load.concurrency, _room(model, load))
    ranks = min(model.layout.data, rows)
    decode = decode_step(model, rows, load)
    prefill = prefill_step(model, load)
    others = (rows - 1) / ranks
    held = prefill * others / load.osl
    before = BUNCHED * others * flow(model, load)
    queued = load.concurrency / rows - 1
    return Estimate(
        tuple(decode.tolist()),
        tuple(held.tolist()),
        tuple(prefill.tolist()),
        tuple(before.tolist()),
        queued,
        rows,
    )


def apart(prefilling: StepModel, p: int, decoding: StepModel, d: int, load: Load) -> Estimate:
    """`p` prefill workers hand their caches to `d` decode workers."""
    each = max(1, round(load.concurrency / d))
    decode = decode_step(decoding, each, load)
    prefill = prefill_step(prefilling, load)
    servers = p * prefilling.layout.data
    # Operators choose the workers so that the prefill stage passes on what it gets, and tables of such
    # servings often name one worker where there were many: neither stage is taken to be short of room.
    before = BUNCHED * max(0, load.concurrency - servers) / servers * flow(prefilling, load)
    size = sum(g.bytes_per_token / g.stride for g in decoding.a.groups) * load.isl
    link = decoding.machine.scale_out
    transfer = link.latency_us * 1e-6 + size / (link.gb_per_s * 1e9 * prefilling.layout.tensor)
    zero = tuple(0.0 for _ in decode)
    return Estimate(
        tuple(decode.tolist()), zero, tuple(prefill.tolist()), tuple(before.tolist()), 0.0, each, transfer
    )


def decode_step(model: StepModel, rows: int, load: Load) -> Array:
    """Terms of a step of `rows` sequences, half of their answers written."""
    starts = np.full(rows, load.isl + load.osl // 2)
    vector: Array = ROOFLINE * model.terms(starts, np.ones(rows, dtype=np.int64), rows).vector()
    return vector


def prefill_step(model: StepModel, load: Load) -> Array:
    """Terms of one prompt on each attention rank, in steps of at most `CHUNK` tokens of each."""
    ranks = model.layout.data
    starts = range(0, load.isl, CHUNK)
    steps = [_prompts(model, ranks, start, min(CHUNK, load.isl - start)) for start in starts]
    total: Array = np.sum(steps, axis=0)
    return total


def flow(model: StepModel, load: Load) -> Array:
    """Terms per prompt of a rank among many: steps are full, so weights are read for several at once."""
    if load.isl >= CHUNK:
        return prefill_step(model, load)
    together = CHUNK // load.isl
    return _prompts(model, together * model.layout.data, 0, load.isl) / together


def _prompts(model: StepModel, count: int, start: int, tokens: int) -> Array:
    whole = np.ones(count, dtype=np.int64)
    vector: Array = ROOFLINE * model.terms(start * whole, tokens * whole, count).vector()
    return vector


def _room(model: StepModel, load: Load) -> int:
    # Half of the answers are written, and engines admit by what is written.
    return max(1, model.kv_tokens() // (load.isl + load.osl // 2))
