"""Frames between gateway and worker. Hot ones are arrays; every added field has a default.

A frame on the wire is a uint32-LE length and one msgpack value. Token ids and hashes travel as packed
bytes. A prompt larger than `PART_BYTES` follows its Submit in `PromptPart` frames, so that token frames
pass between them.
"""

from __future__ import annotations

from typing import Union

import msgspec

from bien.core.kv.events import EventBatch, KVEvent
from bien.core.logprobs import TokenLogprobs
from bien.core.request import GenerateRequest
from bien.core.speculation.counts import DraftCounts

PROTOCOL = 3
PART_BYTES = 65536


class WorkerInfo(msgspec.Struct, array_like=True, frozen=True):
    """Who a worker is; part of its hello."""

    id: str
    generation: str  # boot id + epoch: changes when its cache is empty again
    fp: str  # fingerprint of the KV representation
    model: str = ""
    role: str = "both"
    dp_ranks: int = 1
    block_tokens: int = 16
    max_context: int = 0
    slots: int = 0
    capacity_tokens: int = 0  # tokens of the smallest paged group's pool
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    pid: int = 0
    group_kinds: tuple[str, ...] = ("full",)  # GroupKind values, in group order
    group_windows: tuple[int, ...] = (0,)
    snapshot_tokens: tuple[int, ...] = (0,)
    group_blocks: tuple[int, ...] = ()  # capacity of each group's pool
    tiers: tuple[str, ...] = ("device",)  # where its blocks may lie, the fastest first
    cached_in: int = 0  # tokens: prefixes are found in multiples of these; 0: of block_tokens
    refuses: tuple[str, ...] = ()  # fields of requests that it cannot serve, as a remote engine may


class WorkerStats(msgspec.Struct, array_like=True, gc=False):
    """Load after a step; sent with every StepFrame and on change while idle."""

    running: int = 0
    waiting: int = 0
    # Prompt tokens to be computed for waiting and running sequences; the cached part of those that wait is
    # what their gateways predicted.
    queued_tokens: int = 0
    used_blocks: int = 0  # of the first group: held by running sequences
    cached_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    computed_tokens: int = 0  # cumulative, as are the following
    output_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    busy_seconds: float = 0.0
    store_bytes: int = 0
    finished: int = 0
    drafts: DraftCounts | None = None  # `drafted`, `accepted` and `rounds` by source and position


class Output(msgspec.Struct, array_like=True, gc=False):
    """What one request gained in one step."""

    rid: int
    count: int = 0  # tokens gained
    tokens: bytes = b""  # their ids, uint32-LE; empty in simulation
    finish: str | None = None  # "stop", "length", "abort", "error"
    cached: int = -1  # tokens found in a cache; set on the first output, else -1
    error: str = ""
    error_code: str = ""
    times: tuple[float, float] | None = None  # simulation: clock of the first and last token of a jump
    drafted: int = 0  # on the last output: totals of the request
    accepted: int = 0
    rounds: int = 0
    error_field: str = ""  # the request's field that is wrong, where one is
    logprobs: TokenLogprobs | None = None  # of `tokens`, where asked for
    prompt_logprobs: TokenLogprobs | None = None  # of the prompt's second to last token, on the first output
    text: str = ""  # in place of `tokens`, of a remote engine that does not say which they are
    prompt_tokens: int = -1  # as a remote engine counts them, where it does
    drafts: DraftCounts | None = None  # as `drafted` and so on; so far, where the client predicted the output


class Join(msgspec.Struct, array_like=True, tag="join"):
    """A gateway's first frame. Answered with Challenge, or, wrong protocol number, with Shutdown."""

    protocol: int
    nonce: str = ""  # see handshake.py; before protocol 3 a token stood here


class Challenge(msgspec.Struct, array_like=True, tag="challenge"):
    """That the worker knows the token. Answered with Proof, or, where it does not, with Shutdown."""

    protocol: int
    nonce: str
    proof: str


class Proof(msgspec.Struct, array_like=True, tag="proof"):
    """That the gateway knows the token. Answered with Hello, behind a StepFrame of each rank where the worker
    publishes, or, where it does not, with Shutdown."""

    proof: str


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    protocol: int
    info: WorkerInfo


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """`request.prompt` is empty and `prompt_bytes` > 0 when PromptPart frames follow."""

    rid: int
    request: GenerateRequest
    prompt_bytes: int = 0


class PromptPart(msgspec.Struct, array_like=True, tag="part"):
    rid: int
    data: bytes


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    rid: int


class SnapshotRequest(msgspec.Struct, array_like=True, tag="snapshot?"):
    dp_rank: int = 0


class Snapshot(msgspec.Struct, array_like=True, tag="snapshot"):
    """All cached blocks as "stored" events, as of event sequence number `seq`."""

    generation: str
    seq: int
    events: list[KVEvent] = []
    dp_rank: int = 0


class StepFrame(msgspec.Struct, array_like=True, tag="step"):
    """One per gateway and step."""

    outputs: list[Output] = []
    batch: EventBatch | None = None
    stats: WorkerStats | None = None
    time: float = 0.0
    dp_rank: int = 0  # of the engine that `stats` are of
    # Prompt tokens to be computed of requests that other gateways have sent and no stats count: a step may be
    # long, and whoever places meanwhile must know. None: nothing is said of it.
    unseen: int | None = None


class Ping(msgspec.Struct, array_like=True, tag="ping"):
    """Answered at once with a Pong of the same number, by the thread that does the worker's I/O: a step may
    be as long as it likes."""

    number: int = 0


class Pong(msgspec.Struct, array_like=True, tag="pong"):
    number: int = 0


class Shutdown(msgspec.Struct, array_like=True, tag="bye"):
    """Gateway to worker: finish nothing, stop now. Worker to gateway: I stop, with the reason."""

    reason: str = ""


ToWorker = Union[Join, Proof, Submit, PromptPart, Abort, SnapshotRequest, Ping, Shutdown]
FromWorker = Union[Challenge, Hello, StepFrame, Snapshot, Pong, Shutdown]
