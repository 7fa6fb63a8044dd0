"""`ServerState`: the few numbers of a server's metrics page that a calibration checks itself by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bien.core.errors import UserError


class Sum(msgspec.Struct, frozen=True):
    """Of a histogram: what was measured, and how often."""

    seconds: float
    count: int

    @property
    def mean(self) -> float | None:
        return self.seconds / self.count if self.count > 0 else None

    def since(self, before: Sum) -> Sum:
        return Sum(self.seconds - before.seconds, self.count - before.count)


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """Over all engines behind the page; None: it does not say. Counters count since the server's start."""

    engine: str  # "vllm" or "sglang"
    engines: int  # with schedulers of their own
    running: int | None = None  # requests; sglang writes it now and then only
    waiting: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    requests: int | None = None  # that ended
    cached_tokens: int | None = None  # of prompts
    preemptions: int | None = None
    drafts: int | None = None  # of speculation
    first: Sum | None = None  # time to first token, from the request's arrival at the server
    gaps: Sum | None = None  # between tokens
    prefill: Sum | None = None  # from a request's first step to its first token
    cache: int | None = None  # tokens that fit

    @property
    def live(self) -> bool:
        """Whether `running` and `waiting` are those of the last step."""
        return self.engine == "vllm"


# Older names last.
_VLLM = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
    "prompt_tokens": ("prompt_tokens_total",),
    "output_tokens": ("generation_tokens_total",),
    "requests": ("request_success_total",),
    "cached_tokens": ("prompt_tokens_cached_total", "prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
    "preemptions": ("num_preemptions_total",),
    "drafts": ("spec_decode_num_drafts_total",),
    "first": ("time_to_first_token_seconds",),
    "gaps": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "prefill": ("request_prefill_time_seconds",),
}
_SGLANG = {
    "running": ("num_running_reqs",),
    "waiting": ("num_queue_reqs",),
    "prompt_tokens": ("prompt_tokens_total",),
    "output_tokens": ("generation_tokens_total",),
    "requests": ("num_requests_total",),
    "cached_tokens": ("cached_tokens_total",),
    "preemptions": ("num_retracted_requests_total",),
    "drafts": ("spec_verify_calls_total",),
    "first": ("time_to_first_token_seconds",),
    "gaps": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "cache": ("max_total_num_tokens",),
}
_ENGINES = {"vllm": (_VLLM, "engine"), "sglang": (_SGLANG, "dp_rank")}
_SUMS = ("first", "gaps", "prefill")


def read_state(page: str) -> ServerState | None:
    """None where the page is neither vLLM's nor SGLang's. UserError: it cannot be read."""
    for engine, (names, label) in _ENGINES.items():
        found = _Page(engine + ":", page)
        if not found.values:
            continue
        fields: dict[str, int | Sum | None] = {}
        for field, tried in names.items():
            name = next((n for n in tried if found.has(n)), None)
            if name is not None:
                fields[field] = found.sum(name) if field in _SUMS else round(found.total(name))
        if engine == "vllm":
            fields["cache"] = _vllm_cache(found.labels("cache_config_info"))
        engines = {ranks.get(label, "") for ranks in found.labels(names["running"][0])}
        return msgspec.convert({"engine": engine, "engines": max(1, len(engines)), **fields}, ServerState)
    return None


class _Page:
    """Samples of one engine, without its prefix."""

    def __init__(self, prefix: str, page: str) -> None:
        lines, self._declared = [], set()
        for line in page.splitlines():
            if line.startswith(prefix):
                if "_bucket{" not in line and "_created" not in line:
                    lines.append(line)
            elif line.startswith("# TYPE " + prefix):
                self._declared.add(line.split()[2].removeprefix(prefix))
        self.values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families("\n".join(lines) + "\n"):
                for sample in family.samples:
                    short = sample.name.removeprefix(prefix)
                    if math.isfinite(sample.value):  # of a quantile that was never observed
                        self.values.setdefault(short, []).append((sample.labels, sample.value))
        except (ValueError, KeyError) as error:
            raise UserError(f"the server's metrics page cannot be read: {error}", field="url") from None

    def has(self, name: str) -> bool:
        # Of what has labels nothing is written before it first happens.
        return name in self.values or name + "_sum" in self.values or name in self._declared

    def total(self, name: str) -> float:
        return sum(value for _, value in self.values.get(name, ()))

    def sum(self, name: str) -> Sum:
        return Sum(self.total(name + "_sum"), round(self.total(name + "_count")))

    def labels(self, name: str) -> list[Mapping[str, str]]:
        return [labels for labels, _ in self.values.get(name, ())]


def _vllm_cache(infos: Iterable[Mapping[str, str]]) -> int | None:
    infos = list(infos)
    if infos and all(i.get("kv_cache_size_tokens", "").isdecimal() for i in infos):
        return sum(int(i["kv_cache_size_tokens"]) for i in infos)
    sizes = [(i.get("num_gpu_blocks", ""), i.get("block_size", "")) for i in infos]
    if not sizes or not all(n.isdecimal() for pair in sizes for n in pair):
        return None
    return sum(int(blocks) * int(tokens) for blocks, tokens in sizes)
