"""The servers whose cliffs were published, as deployments of the simulator: from what they said of
themselves, from memory arithmetic, and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bien.core.architectures.registry import read_architecture
from bien.core.costs.formats import Formats
from bien.core.costs.layout import Layout
from bien.core.costs.machine import load_machine
from bien.core.costs.memory import kv_groups, room
from bien.core.costs.step import StepModel
from bien.core.deployment import Deployment, parse_deployment
from bien.core.kv.groups import GroupKind
from bien.replay.validate import cliff_published as said
from bien.replay.validate.cliff_published import Published, Said

BLOCK = 64
GIB = 2**30
SERVED = 1_048_576  # tokens of a GLM prefill worker's pool at most, and of a request
H200_STATIC = 0.85  # of the memory, which the server takes: mem-fraction-static
K3_KV_BYTES = 42.23 * GIB  # of each GPU, for comparison only
HOST_BYTES = 1_889_000_000_000
RANKS = 8


class Room(msgspec.Struct, frozen=True):
    """Tokens of cache that a stage holds, and how that comes about."""

    stage: str
    tokens: int
    text: str
    simulated: bool


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One published curve. `calibrate`: the concurrency of a published point whose ITL p50 sets the pace of
    all steps; that point is then no prediction. None: nothing is calibrated."""

    name: str
    title: str
    accelerators: int  # that throughput was published per
    source: str
    points: tuple[Published, ...]
    said: tuple[Said, ...]
    assumptions: tuple[str, ...]
    calibrate: int | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(p.concurrency for p in self.points)

    def rooms(self) -> tuple[Room, ...]:
        """What memory arithmetic says of each stage."""
        return _glm_rooms() if self.name == GLM.name else (_k3_room(),)

    def deployment(self, concurrency: int, pace: float = 1.0, share: float = 1.0) -> Deployment:
        """What is simulated at a concurrency. `pace`: seconds of all steps times this; `share`: room for
        tokens in every cache times this."""
        if self.name == GLM.name:
            return _glm(pace, share)
        return _k3(concurrency, pace, share, host=self.name == K3_HOST.name)


_COMMON = (
    "other sessions than were measured: 406 of 28,638 requests, 120,243 tokens each, 1.1 streams a session, "
    "where the measured corpus has 393 of 98,827 requests, 218,922 tokens each, 43 % by sub-agents",
    "as in the measured replay an hour, its lanes starting at 25 to 75 % of a session's turns with the "
    "prompt until there cached; at once, where the measured ones were warmed for 600 s",
    "gaps between turns are at most 10 s each, as in the measured replay",
    "the client, the HTTP frontends and tokenization cost nothing",
    "step costs: roofline of the model's own bytes and operations, efficiencies as for every machine here",
)

GLM = Arm(
    name="glm-5.2-h200",
    title="GLM-5.2 FP8, 16 x H200: 1 prefill and 1 decode worker",
    accelerators=16,
    source=said.H200_POINTS,
    points=said.GLM,
    said=(*said.GLM_SAID, *said.REPLAY_SAID),
    assumptions=(
        *_COMMON,
        "prefill and decode apart are not simulated: the room for KV of both stages is computed, and the one "
        "with less, the prefill worker, is simulated as an engine on its 8 GPUs; decode steps run there too",
        "left out by that: the hand-over of KV, decode steps undisturbed by prefill, queues of the decode "
        "worker, and that generated tokens and running sequences hold room in the decode worker instead",
        "context parallelism over 8 ranks costs what tensor parallelism over them does; KV layers are split "
        "over the ranks, so that the pool fits",
        "shapes of glm-5.3, which are those of glm-5.2; no speculation",
        "the pace of all steps is set by one published figure, ITL p50 at concurrency 1",
    ),
    calibrate=1,
)
_K3_ASSUMED = (
    *_COMMON,
    "room: 268 GB of each GPU of which 8 % are kept free, as for every machine here, instead of the server's "
    "own 90 % and profiled activations",
    "states of linear layers: two for each sequence that may run, and one for each slot; the measured server "
    "shares one pool between states and tokens",
    "MXFP4 experts at 4.5 bits per weight instead of 4.25",
    "uncalibrated: neither ITL nor TTFT was published below the knee",
)
K3 = Arm(
    name="kimi-k3-b300",
    title="Kimi K3 MXFP4, 8 x B300: KV on the GPUs alone",
    accelerators=8,
    source=said.B300_POINTS,
    points=said.K3,
    said=(*said.K3_SAID, *said.REPLAY_SAID),
    assumptions=_K3_ASSUMED,
)
K3_HOST = Arm(
    name="kimi-k3-b300-host",
    title="Kimi K3 MXFP4, 8 x B300: 1,889 GB of host memory behind",
    accelerators=8,
    source=said.B300_POINTS,
    points=said.K3_HOST,
    said=(*said.K3_HOST_SAID, *said.REPLAY_SAID),
    assumptions=(
        *_K3_ASSUMED,
        "latents, of which each of the 8 ranks keeps a copy in host memory, are kept there once; with copies "
        "it would hold 17 million tokens, still more than all live sessions have",
    ),
)
ARMS = (GLM, K3, K3_HOST)


def _glm(pace: float, share: float) -> Deployment:
    executor = {"machine": "h200", "tensor": RANKS, "weights": "fp8", "kv": "fp8", "unlimited": True}
    pool: dict[str, Any] = {
        "slots": 32,
        "kv_tokens": int(share * next(r.tokens for r in _glm_rooms() if r.simulated)),
        "scheduler": {"use": "fcfs", "token_budget": 32_768, "max_running": 32},
    }
    return _deployment("glm-5.3", pool, executor, pace)


def _k3(concurrency: int, pace: float, share: float, host: bool) -> Deployment:
    slots = 2 * concurrency
    executor = {"machine": "b300", "tensor": RANKS, "routed": "fp4", "kv": "fp8"}
    pool: dict[str, Any] = {
        "slots": slots,
        "snapshots": 2 * slots,  # the end of a prompt and the end of its turn
        "scheduler": {"use": "fcfs", "token_budget": 16_384, "max_running": slots},
    }
    if share < 1:
        pool["kv_tokens"] = int(share * _k3_tokens(slots + pool["snapshots"]))
    if host:
        pool["kv_store"] = {"use": "host", "capacity_bytes": int(share * HOST_BYTES)}
    return _deployment("kimi-k3", pool, executor, pace)


def _deployment(model: str, pool: Mapping[str, Any], executor: Mapping[str, Any], pace: float) -> Deployment:
    return parse_deployment(
        {
            "model": {"name": model, "dtype": "bfloat16", "block_tokens": BLOCK},
            "gateway": {"router": "round-robin", "kv_index": "memory", "max_inflight": 4096},
            "pool": [{"name": "main", **pool, "executor": {"use": "simulated", **executor, "pace": pace}}],
        }
    )


def _glm_rooms() -> tuple[Room, ...]:
    fp8 = Formats(weights="fp8", kv="fp8")
    prefill = _step_model("glm-5.3", "h200", Layout(tensor=RANKS), fp8)
    decode = _step_model("glm-5.3", "h200", Layout(data=RANKS, expert_tensor=RANKS), fp8)
    each = _token_bytes(prefill)
    split = int(_left(prefill, H200_STATIC) / (each / RANKS))
    rank = int(_left(decode, H200_STATIC) / each)
    return (
        Room(
            "prefill",
            min(SERVED, split),
            f"{split:,} tokens fit with layers split over {RANKS} ranks; max-total-tokens is {SERVED:,}",
            True,
        ),
        Room(
            "decode",
            RANKS * rank,
            f"{RANKS} attention ranks of {rank:,} tokens, besides 5 times as much in the host's memory; "
            "sequences that decode only, no prefix cache",
            False,
        ),
    )


def _k3_room() -> Room:
    model = _step_model("kimi-k3", "b300", Layout(tensor=RANKS), Formats(routed="fp4", kv="fp8"))
    each, left = _token_bytes(model), model.kv_tokens()
    return Room(
        "both",
        left,
        f"{left:,} tokens beside {model.weight_bytes() / 1e9:.1f} GB of weights, before states; the server's "
        f"log says {K3_KV_BYTES / 1e9:.1f} GB, by the same arithmetic {int(K3_KV_BYTES / each):,} tokens",
        True,
    )


def _k3_tokens(states: int) -> int:
    """That fit beside so many states."""
    model = _step_model("kimi-k3", "b300", Layout(tensor=RANKS), Formats(routed="fp4", kv="fp8"))
    free = room(model, kv_groups(model, model.a.groups))
    held = sum((states + 1) * g.block_bytes for g in free.groups if not g.paged)
    return int((free.bytes - held) / _token_bytes(model))


def _left(model: StepModel, share: float) -> float:
    return model.machine.memory_gb * 1e9 * share - model.weight_bytes()


def _token_bytes(model: StepModel) -> float:
    """Of one token, on one rank that has all layers."""
    groups = kv_groups(model, model.a.groups)
    return sum(g.bytes_per_token / g.stride for g in groups if g.kind is not GroupKind.STATE)


def _step_model(name: str, machine: str, layout: Layout, formats: Formats) -> StepModel:
    return StepModel(read_architecture(name, BLOCK, "bfloat16"), load_machine(machine), layout, formats)
