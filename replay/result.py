"""`result.json`: one shape for live and simulated runs. Readers may rely on `schema` "bien.result/1"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bien.core.errors import UserError
from bien.replay.costs import PoolCosts
from bien.replay.files import check_schema, pretty, write_whole
from bien.replay.metrics import Distribution, Throughput

SCHEMA = "bien.result/1"


class Validity(msgspec.Struct):
    valid: bool
    reasons: list[str]


class CorpusCard(msgspec.Struct):
    hash: str  # of the sessions read, as recorded
    source: str = ""
    format: str = ""
    block_tokens: int = 0


class Card(msgspec.Struct):
    """What must be equal for two results to be compared, and how far the run kept to it."""

    corpus: CorpusCard
    seed: int
    concurrency: int  # 0: open loop
    token_scale: float
    time_scale: float
    gap_cap: float | None
    sessions: int | None
    window: int | None
    model: str = ""
    loop: str = "closed"  # a tree starts when another has ended; "open": when the trace says
    content: str = "filler"  # prompts are made from ids, not from text
    forced_tokens: bool = True  # the recorded continuation replaces what is sampled
    forced_acceptance: float | None = None  # acceptance length of a pool that forces it, else null
    advance: tuple[float, float] | None = None  # parts of sessions at which the first of each lane began
    duration: float | None = None  # seconds after which the run was cut off
    coverage: float = 0.0  # share of the planned turns that gave a first token
    overload: float = 0.0  # share of turns refused by the server for overload
    errors: float = 0.0  # share of turns
    length_mismatch: float = 0.0  # share of turns with another output length than asked for
    send_lag_ms: Distribution = Distribution()
    loop_lag_ms: Distribution = Distribution()
    version: str = ""


class FidelityReport(msgspec.Struct):
    """Shares kept of the original, 1 = all; and in words what was not."""

    turns: float
    tokens: float
    reuse: float
    derived_output: float | None = None  # share of output tokens taken from the next recorded prompt
    notes: list[str] = []


class Sessions(msgspec.Struct):
    count: int  # replayed
    completed: int
    failed: int = 0
    skipped: int = 0  # longer than the window
    unfinished: int = 0  # cut off by an interrupt


class Turns(msgspec.Struct):
    count: int  # ended, errors included
    errors: int
    unfinished: int = 0


class Tokens(msgspec.Struct):
    """Of turns that ended without an error. Cached counts as 0 where the server does not say."""

    logical_input: int
    computed_input: int
    cached_input: int
    output: int


class Loss(msgspec.Struct):
    """Shares of all prompt tokens; their sum is ideal - achieved."""

    rounding: float  # to whole blocks, and the last token, which is always computed
    other_replica: float
    capacity: float  # evicted, or sent before it was computed
    unknown: float  # the server does not say which worker it was


class Cache(msgspec.Struct):
    """Hit rates by tokens, of turns whose cached tokens are known; null if there are none."""

    ideal: float | None  # infinite cache, in the order of this run
    achieved: float | None
    loss: Loss | None


class ThroughputReport(msgspec.Struct):
    """Tokens per second over the whole run; `steady` is over the window in which all lanes had work."""

    logical: float | None
    computed: float | None
    output: float | None
    per_accelerator: Throughput
    steady: Throughput | None
    steady_seconds: float | None
    seconds: float


class Jobs(msgspec.Struct):
    """Session trees. `slowdown` (see slowdown.py) needs the same turns at concurrency 1 with an ideal cache.
    A simulation gets them by a second run where it is asked to; a live run has none to compare with (null):
    it would take as long again, on a worker whose KV need not fit into this machine."""

    count: int  # completed
    per_hour: float | None
    per_hour_per_user: float | None
    per_hour_per_accelerator: float | None
    seconds: Distribution
    slowdown: float | None = None


class Client(msgspec.Struct):
    """Lags are 99th percentiles; the card has the distributions."""

    cpu_ms_per_request: float | None
    send_lag_ms: float | None
    loop_lag_ms: float | None


class RouterReport(msgspec.Struct):
    parity: float | None  # predicted over actual cached tokens
    imbalance: float | None  # busiest worker over the mean, in windows of 60 s
    utilisation: float | None = None  # share of the run in which workers computed


class DraftsReport(msgspec.Struct):
    """Of one source of drafts, or of one position behind the last known token."""

    rounds: int  # with drafts of the source; with one at the position
    accepted: int  # drafts
    drafted: int  # verified
    acceptance_length: float | None = None  # tokens that a round gains; of sources


class SpeculationReport(msgspec.Struct):
    acceptance_length: float | None  # tokens that a round of drafting and verifying gains; None: no round
    by_position: list[DraftsReport] = []  # from the first on
    by_source: dict[str, DraftsReport] = {}  # a drafter's name, or what its drafts say of theirs
    forced: dict[str, list[float]] = {}  # by pool: chances by position by which accepted lengths were drawn


class Result(msgspec.Struct, kw_only=True):
    schema: str = SCHEMA
    kind: str  # "live" or "simulated"
    validity: Validity
    card: Card
    fidelity: FidelityReport
    sessions: Sessions
    turns: Turns
    tokens: Tokens
    cache: Cache
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    interactivity: Distribution
    throughput: ThroughputReport
    jobs: Jobs
    client: Client
    router: RouterReport
    speculation: SpeculationReport
    deployment: dict[str, Any]
    costs: list[PoolCosts] = []  # of a simulation, by pool
    # Of a simulation, by path ("ttft_ms.p50"): the least and the most of this run and of two with costs as
    # low and as high as they are likely to be (see interval.py).
    intervals: dict[str, tuple[float, float]] = {}


def write_result(path: Path, result: Result) -> None:
    """Write it whole or not at all.

    Raises:
        ResourceError: the folder cannot be written to.
    """
    write_whole(path, pretty(result), "result")


def read_result(path: Path) -> Result:
    """UserError naming the file when it is no result of this schema."""
    try:
        data = path.read_bytes()
        check_schema(data, SCHEMA, path)
        return msgspec.json.decode(data, type=Result)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path} is no result: {error}") from None
