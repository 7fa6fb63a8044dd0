"""vLLM servers as workers, with their KV events.

A server started with `--enable-prompt-tokens-details --kv-events-config '{"enable_kv_cache_events": true,
"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'` says all there is to say: what each prompt
found in the cache, and every change of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bien.core.api import Context, Provider, hookimpl
from bien.gateway.api import Dialect, Readings, RemoteEngine
from bien.plugins.engines._events import EventsConfig, engine


class VllmDialect(Dialect):
    health = "/health"
    metrics = "/metrics"
    extensions = salts = token_ids = True

    def headers(self, rank: int | None) -> dict[str, str]:
        return {} if rank is None else {"X-data-parallel-rank": str(rank)}

    def readings(self, samples: Mapping[str, float], labels: Mapping[str, Mapping[str, str]]) -> Readings:
        def number(name: str) -> int | None:
            return int(samples[name]) if name in samples else None

        config = labels.get("vllm:cache_config_info", {})
        blocks, size = config.get("num_gpu_blocks", ""), config.get("block_size", "")
        usage = samples.get("vllm:kv_cache_usage_perc", samples.get("vllm:gpu_cache_usage_perc"))
        return Readings(
            running=number("vllm:num_requests_running"),
            waiting=number("vllm:num_requests_waiting"),
            usage=usage,
            blocks=_count(blocks),
            block_tokens=_count(size),
        )


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 16 else None


@hookimpl
def bien_providers() -> Iterable[Provider]:
    return [
        Provider("engine", "vllm", _build, EventsConfig, summary="vLLM servers, with their KV events"),
    ]


def _build(config: EventsConfig, ctx: Context) -> RemoteEngine:
    return engine(config, VllmDialect(), ctx)
