"""SGLang servers as workers, with their KV events.

A server started with `--enable-cache-report --enable-metrics --kv-events-config '{"publisher": "zmq",
"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'` says all there is to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bien.core.api import Context, GenerateRequest, Provider, hookimpl
from bien.gateway.api import Dialect, Readings, RemoteEngine
from bien.plugins.engines._events import EventsConfig, engine


class SglangConfig(EventsConfig, forbid_unknown_fields=True):
    # Of a salted block most versions do not say so, and it would count for who must not use it.
    salt: bool = False


class SglangDialect(Dialect):
    health = "/health"
    metrics = "/metrics"
    extensions = salts = token_ids = True
    top_k_off = -1

    def body(self, model: str, request: GenerateRequest, rank: int | None, salt: str) -> dict[str, Any]:
        body = super().body(model, request, rank, salt)
        if rank is not None:
            body["routed_dp_rank"] = rank
        return body

    def readings(self, samples: Mapping[str, float], labels: Mapping[str, Mapping[str, str]]) -> Readings:
        def number(name: str) -> int | None:
            return int(samples[name]) if name in samples else None

        return Readings(
            running=number("sglang:num_running_reqs"),
            waiting=number("sglang:num_queue_reqs"),
            usage=samples.get("sglang:token_usage"),
            blocks=number("sglang:max_total_num_tokens"),
            block_tokens=1 if "sglang:max_total_num_tokens" in samples else None,
        )


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider("engine", "sglang", _build, SglangConfig, summary="SGLang servers, with their KV events"),
    ]


def _build(config: SglangConfig, ctx: Context) -> RemoteEngine:
    return engine(config, SglangDialect(), ctx)
