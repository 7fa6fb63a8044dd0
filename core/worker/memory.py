"""Whether the workers of a deployment fit into this machine's memory, said before any of them is started."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from bien.core.architectures.registry import read_architecture
from bien.core.compose import Composition
from bien.core.deployment import HostSpec, ModelSpec
from bien.core.errors import ResourceError
from bien.core.memory import available_host_bytes
from bien.core.sizes import megabytes
from bien.core.worker.footprint import MB, Footprint, footprint

GATEWAY = 150 * MB  # the process that routes, tokenises and answers, measured
_COLUMNS = ("pool", "workers", "KV tokens", "weights", "KV", "KV store", "workspace", "process", "sum")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What each worker takes, and what there is. Bytes."""

    workers: tuple[Footprint, ...]  # of one worker of each pool
    max_context: int
    available: int  # that the machine, or its container, can still give
    host: HostSpec
    gateway: int = GATEWAY

    @property
    def limit(self) -> int:
        """What the deployment may take."""
        return self.available if self.host.memory is None else min(self.host.memory, self.available)

    @property
    def need(self) -> int:
        return self.gateway + sum(w.pool.engines * w.total for w in self.workers)

    @property
    def fits(self) -> bool:
        return self.need <= self.limit

    def lines(self) -> list[str]:
        """A table of the numbers in MB, then what they leave open."""
        rows: list[tuple[str, ...]] = [_COLUMNS]
        for w in self.workers:
            parts = (w.weights, w.kv, w.store, w.workspace, w.process, w.total)
            numbers = (f"{-(-n // MB):,}" for n in parts)
            rows.append((w.pool.name, f"{w.pool.engines} x", f"{w.pool.kv_tokens or 0:,}", *numbers))
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        table = ["  ".join(map(_cell, row, widths)) for row in rows]
        budget = "" if self.host.memory is None else f" (host.memory is {megabytes(self.host.memory)})"
        return [
            "host memory in MB, of one worker each:",
            *("  " + row for row in table),
            f"  with {megabytes(self.gateway)} for the gateway {megabytes(self.need)} in all; "
            f"{megabytes(self.available)} are available{budget}",
            *(f"  pool {w.pool.name!r}: not counted: {text}" for w in self.workers for text in w.unknown),
        ]

    def small_pools(self) -> list[str]:
        """What to say of pools whose KV is smaller than the context window."""
        return [
            f"pool {w.pool.name!r}: KV holds {w.pool.kv_tokens:,} tokens, less than the context window of "
            f"{self.max_context:,}: longer requests are refused"
            for w in self.workers
            if w.pool.kv_tokens is not None and w.pool.kv_tokens < self.max_context
        ]

    def advice(self) -> str:
        """What would make it fit: the largest KV that does, where that helps."""
        kv = sum(w.pool.engines * w.kv for w in self.workers)
        room = self.limit - (self.need - kv)
        if kv and room > 0:
            share = [
                f"{int((w.pool.kv_tokens or 0) * room / kv) // 64 * 64:,} for pool {w.pool.name!r}"
                for w in self.workers
                if w.kv
            ]
            if not any(text.startswith("0 ") for text in share):
                return f"lower kv_tokens (about {', '.join(share)} would fit) or count of the pools"
        stores = ", the capacity of the KV store" if any(w.store for w in self.workers) else ""
        return (
            f"lower count, kv_tokens or slots of the pools{stores}, take a smaller model.dtype or a quantizer"
            + (", or raise host.memory" if self.limit < self.available else "")
        )


def _cell(text: str, width: int) -> str:
    return text.rjust(width)


def plan_memory(composition: Composition, model: ModelSpec, available: int | None = None) -> MemoryPlan:
    """What all workers take, estimated from the model's config. `model` may have the folder that the
    composition's name was resolved to. ModelError when there is no such model."""
    architecture = read_architecture(model.name, model.block_tokens, model.dtype)
    own = architecture.max_context
    architecture = msgspec.structs.replace(architecture, max_context=model.max_context or own)
    workers = tuple(footprint(pool, architecture, model) for pool in composition.pools)
    free = available_host_bytes() if available is None else available
    return MemoryPlan(workers, architecture.max_context, free, composition.deployment.host)


def check_memory(composition: Composition, model: ModelSpec, available: int | None = None) -> MemoryPlan:
    """The plan; ResourceError with its table when it does not fit, unless the deployment oversubscribes."""
    plan = plan_memory(composition, model, available)
    if not plan.fits and not plan.host.oversubscribe:
        budget = " (host.memory)" if plan.limit < plan.available else ""
        raise ResourceError(
            f"the deployment needs {megabytes(plan.need)} of memory, {megabytes(plan.limit)} are "
            f"available{budget}; {plan.advice()}\n" + "\n".join(plan.lines()),
            field="host.memory",
        )
    return plan
