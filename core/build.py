"""From a composed pool to one worker's engine and executor, ready to be driven. Imports no torch itself."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from bien.core.architectures.base import Architecture
from bien.core.architectures.registry import read_architecture
from bien.core.clock import Clock, WallClock
from bien.core.compose import PoolComposition, compose_pool
from bien.core.deployment import PoolSpec
from bien.core.engine import Engine, EngineLimits
from bien.core.errors import DeploymentError
from bien.core.executors.base import Executor
from bien.core.executors.ranks import Ranks
from bien.core.kv.cache import KVCache
from bien.core.kv.groups import GroupKind, KVGroup, SnapshotPolicy
from bien.core.providers import Context
from bien.core.sizing import pool_blocks, sized
from bien.core.speculation.forced import check_forced
from bien.core.speculation.speculator import SpeculatorCaps
from bien.core.worker.messages import WorkerInfo
from bien.core.worker.rank_launch import LaunchedRanks
from bien.core.worker.start import WorkerStart

TREE_KINDS = (GroupKind.FULL, GroupKind.WINDOW, GroupKind.DRAFT)  # whose entries can be moved


class Parts(dict[str, Any]):
    """Parts of an executor, made when it asks: a simulated one asks for none of those that need torch."""

    def __init__(self, pool: PoolComposition, ctx: Context) -> None:
        super().__init__()
        self._pool = pool
        self._ctx = ctx

    def __missing__(self, kind: str) -> Any:
        self[kind] = self._pool.make(kind, self._ctx)
        return self[kind]

    def get(self, kind: str, default: Any = None) -> Any:
        return self[kind]

    def close(self) -> None:
        """Close what was made, but for the speculator: that is the engine's or the executor's."""
        for kind, part in self.items():
            if part is not None and kind != "speculator":
                part.close()
        self.clear()


@dataclass(slots=True)
class BuiltWorker:
    """Who drives it may close engine and executor earlier, on the thread that they live on."""

    engine: Engine
    executor: Executor
    info: WorkerInfo
    architecture: Architecture
    parts: Parts  # the executor's: closed last
    depth: int = 2  # steps in flight that pay off when the executor computes by itself
    others: tuple[BuiltWorker, ...] = ()  # of a worker with several dp_ranks, from the second on

    def close(self) -> None:
        with ExitStack() as closing:
            for other in self.others:
                closing.callback(other.close)
            closing.callback(self.parts.close)
            closing.callback(self.executor.close)
            closing.callback(self.engine.close)


def build_worker(
    start: WorkerStart, progress: Callable[[str], None] = lambda text: None, ranks: Ranks | None = None
) -> BuiltWorker:
    """In a worker process: load exactly the plugins of the start message and build. `ranks`: see `build`."""
    progress("loading plugins")
    pool = compose_pool(start.model, start.pool, start.plugins)
    # The boot id makes it unique: after a restart the cache is empty, whatever the epoch says.
    generation = f"{os.urandom(6).hex()}-{start.epoch}"
    with ExitStack() as made:
        found: list[BuiltWorker] = []
        for rank in range(start.pool.dp_ranks):
            one = build(
                pool,
                id=start.id,
                generation=generation,
                rng=random.Random(None if start.seed is None else start.seed + rank),
                threads=start.threads,
                progress=progress,
                ranks=ranks,
            )
            found.append(one)
            made.callback(one.close)
        made.pop_all()
    first, *others = found
    info = msgspec.structs.replace(first.info, dp_ranks=len(found))
    return replace(first, info=info, others=tuple(others))


def build(
    pool: PoolComposition,
    *,
    id: str,
    generation: str,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    threads: int = 1,
    progress: Callable[[str], None] = lambda text: None,
    any_context: bool = False,
    ranks: Ranks | None = None,
) -> BuiltWorker:
    """Make the parts of a pool and put an engine around them.

    `any_context`: take the deployment's `max_context` even beyond the model's own (simulation, where no
    position is ever encoded).
    `ranks`: how the ranks beyond 0 are reached, where the pool's strategy has any; None: they are started
    here, as children, once an executor asks for them.
    `clock` None: the wall clock. Raises what the parts raise (ModelError, ResourceError, UserError);
    DeploymentError for a pool that holds not even one block. What was made until then is closed.
    """
    model, spec = pool.model, pool.spec
    progress("reading the model's config")
    own = None if any_context else model.max_context
    architecture = read_architecture(model.name, model.block_tokens, model.dtype, own)
    if any_context and model.max_context is not None:
        architecture = msgspec.structs.replace(architecture, max_context=model.max_context)
    ctx, parts = prepare(pool, architecture, clock=clock, rng=rng, threads=threads)
    with ExitStack() as made:
        made.callback(parts.close)
        if ctx.mesh is not None and ctx.mesh.world > 1:
            ctx.ranks = ranks or LaunchedRanks(model, pool.spec, pool.plugins)
        speculator = parts["speculator"]
        if speculator is not None and spec.speculator is not None:
            most = speculator.caps.max_drafts
            check_forced(spec.speculation, spec.speculator.use, most, f"pool {spec.name!r}")
        device_drafter = speculator is not None and speculator.caps.place == "device"
        progress(f"loading {model.name}")
        executor: Executor = pool.make("executor", ctx)
        made.callback(executor.close)
        groups = executor.groups
        spec = sized(spec, groups, getattr(executor, "room", None))
        blocks = tuple(pool_blocks(group, spec) for group in groups)
        progress(f"allocating KV for {spec.kv_tokens} tokens")
        executor.allocate(blocks, spec.slots, architecture.max_context)
        if speculator is not None:
            check_topology(speculator.caps, groups, spec.speculator.use if spec.speculator else "")
        ctx.groups, ctx.io = groups, executor.io
        scheduler = pool.make("scheduler", ctx)
        made.callback(scheduler.close)
        engine = Engine(
            scheduler=scheduler,
            cache=KVCache(groups, blocks, model.block_tokens, spec.slots),
            groups=groups,
            limits=EngineLimits(
                slots=spec.slots,
                max_context=architecture.max_context,
                block_tokens=model.block_tokens,
                eos_token_ids=architecture.eos_token_ids,
                vocab_size=architecture.vocab_size,
                speculation=spec.speculation,
                **drafting_limits(spec, speculator.caps if speculator else None),
            ),
            clock=ctx.clock,
            speculator=None if device_drafter else speculator,
            store=pool.make("kv_store", ctx),
            rng=ctx.rng,
        )
        made.pop_all()
    info = describe(replace(pool, spec=spec), architecture, groups, id=id, generation=generation)
    return BuiltWorker(engine, executor, info, architecture, parts)


def prepare(
    pool: PoolComposition,
    architecture: Architecture,
    *,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    threads: int = 1,
) -> tuple[Context, Parts]:
    """The context of an executor's factory, the same on each rank. The caller closes the parts."""
    model, spec = pool.model, pool.spec
    if spec.snapshot_tokens:
        architecture = snapshotting(architecture, spec.snapshot_tokens)
    ctx = Context(
        clock=clock or WallClock(),
        rng=rng or random.Random(),
        architecture=architecture,
        groups=architecture.groups,
        dtype=model.dtype,
        device=spec.device,
        threads=threads,
        speculation=spec.speculation,
    )
    ctx.parts = parts = Parts(pool, ctx)
    with ExitStack() as made:
        made.callback(parts.close)
        ctx.mesh = parts["parallel"].mesh(spec.devices)
        speculator = parts["speculator"]
        if speculator is not None and speculator.caps.place == "device":
            ctx.groups += speculator.groups(architecture, model.block_tokens)
        made.pop_all()
    return ctx, parts


def drafting_limits(spec: PoolSpec, caps: SpeculatorCaps | None) -> dict[str, Any]:
    """What `EngineLimits` say of a pool's drafter."""
    if caps is None or spec.speculator is None:
        return {}
    options, device = spec.speculation, caps.place == "device"
    drawn = device and not caps.deterministic and options.verification != "invariant"
    most = caps.max_drafts if options.max_drafts is None else min(caps.max_drafts, options.max_drafts)
    return {
        "device_drafts": most if device else 0,
        "drafter": spec.speculator.use,
        "drawn": drawn,
        "trusted": not (drawn and caps.confidence == "own"),
    }


def check_topology(caps: SpeculatorCaps, groups: tuple[KVGroup, ...], name: str) -> None:
    """DeploymentError for a drafter of trees on a model whose states or entries cannot be moved to another
    position."""
    if caps.topology == "chain":
        return
    for group in groups:
        if group.kind not in TREE_KINDS:
            valid = ", ".join(kind.value for kind in TREE_KINDS)
            raise DeploymentError(
                f"speculator {name!r} drafts trees, and the model's KV group {group.name!r} is of kind "
                f"{group.kind.value!r}; valid for trees: {valid}; choose chains, or another speculator",
                field="speculator",
            )


def snapshotting(architecture: Architecture, tokens: int) -> Architecture:
    """The same, its recurrent states kept every so many tokens of a prompt."""
    policy = SnapshotPolicy(tokens)
    groups = (g if g.paged else msgspec.structs.replace(g, snapshot=policy) for g in architecture.groups)
    return msgspec.structs.replace(architecture, groups=tuple(groups))


def describe(
    pool: PoolComposition,
    architecture: Architecture,
    groups: tuple[KVGroup, ...],
    *,
    id: str,
    generation: str,
) -> WorkerInfo:
    """What a worker tells gateways about itself."""
    spec, block_tokens = sized(pool.spec, groups), pool.model.block_tokens
    paged = [pool_blocks(group, spec) * block_tokens for group in groups if group.paged]
    return WorkerInfo(
        id=id,
        generation=generation,
        fp=fingerprint(pool, architecture, groups),
        model=pool.model.name,
        role=spec.role,
        block_tokens=block_tokens,
        max_context=architecture.max_context,
        slots=spec.slots,
        capacity_tokens=min(paged, default=architecture.max_context * spec.slots),
        vocab_size=architecture.vocab_size,
        eos_token_ids=architecture.eos_token_ids,
        pid=os.getpid(),
        group_kinds=tuple(group.kind.value for group in groups),
        group_windows=tuple(group.window for group in groups),
        snapshot_tokens=tuple(group.snapshot.every_tokens for group in groups),
        group_blocks=tuple(pool_blocks(group, spec) for group in groups),
        tiers=("device",) if spec.kv_store is None else ("device", spec.kv_store.use),
    )


def fingerprint(pool: PoolComposition, architecture: Architecture, groups: tuple[KVGroup, ...]) -> str:
    """Names the *representation* of cached blocks: model, data type, quantizer, block size, group layout.
    Workers with equal fingerprints could use each other's blocks."""
    named = (
        os.path.basename(pool.model.name.rstrip("/")),
        architecture.name,
        architecture.config,
        pool.model.dtype,
        pool.model.block_tokens,
        pool.spec.quantizer,
        # What a drafter keeps is its own, however like another's it lies.
        *([pool.spec.speculator] if any(g.kind is GroupKind.DRAFT for g in groups) else ()),
        # Where states are kept does not change what is kept.
        tuple(msgspec.structs.replace(group, snapshot=SnapshotPolicy()) for group in groups),
    )
    packed = msgspec.msgpack.encode(named, order="deterministic")
    return hashlib.blake2b(packed, digest_size=8, person=b"bien-fp").hexdigest()
