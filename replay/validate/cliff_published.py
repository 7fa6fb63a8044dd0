"""Published cliffs: TTFT and throughput over concurrency on AgentX trace replays, and what the servers that
were measured said of themselves. Nothing here is fitted.

AgentX is InferenceX's replay of recorded coding sessions: concurrency counts session trees, prefixes are
reused, output lengths are forced.
"""

from __future__ import annotations

import msgspec

H200_POINTS = (
    "InferenceX run 29820102138 (2026-07), GLM-5.2-FP8, 1 prefill worker (8 x H200, context parallel 8) and "
    "1 decode worker (8 x H200, attention data parallel 8), recipe disagg-h200-1p1d-pcp8-tp8-dp8-hisparse; "
    "aggregates as extracted by sskim-ai/InferenceX_analysis (f6bd5970)"
)
B300_POINTS = (
    "InferenceX run 30326393603 (2026-07-28), Kimi-K3 MXFP4 on 8 x B300, vLLM, recipe kimik3_fp4_b300_vllm; "
    "figures of perf-changelog.yaml, pull requests 2371 and 2397"
)
REPLAY_RULES = "InferenceX benchmarks/benchmark_lib.sh as of 2026-07-21 and 2026-07-28"


class Published(msgspec.Struct, frozen=True):
    """One point. Seconds, milliseconds, tokens per second of all accelerators together; None: not said."""

    concurrency: int
    ttft: float | None = None  # median
    output: float | None = None
    itl_ms: float | None = None  # median
    hit: float | None = None  # of the device's prefix cache
    ttft_p90: float | None = None
    at_most: bool = False  # `ttft` is no figure of this point but a bound that follows from others


class Said(msgspec.Struct, frozen=True):
    """A setting or a figure of the measured server, and where it is said."""

    name: str
    value: str
    source: str


GLM = (
    Published(1, 1.3005, 35.43176, 30.20, ttft_p90=3.33405),
    Published(2, 2.23424, 34.87835, 32.02, ttft_p90=13.05326),
    Published(3, 2.6117, 43.90219, 31.14, ttft_p90=63.31608),
    Published(4, 3.31923, 67.03799, 33.95, ttft_p90=77.80444),
    Published(5, 63.45644, 30.21692, 31.72, ttft_p90=206.82585),
    Published(6, 126.9264, 30.89697, 31.79, ttft_p90=230.76077),
    Published(7, 189.6386, 34.4319, 31.17, ttft_p90=292.91262),
    Published(8, 228.70799, 23.56658, 30.72, ttft_p90=310.99671),
)
GLM_SAID = (
    Said("prefill: max-total-tokens", "1,048,576", "the recipe; a run of the same worker logs such a pool"),
    Said("prefill: chunked-prefill-size", "32,768", "the recipe"),
    Said("prefill: max-running-requests", "32", "the recipe"),
    Said("prefill: mem-fraction-static", "0.85", "the recipe"),
    Said("prefill: KV in fp8, layers split over the 8 ranks", "enable-dsa-cache-layer-split", "the recipe"),
    Said("decode: no prefix cache, KV of a sequence on one rank", "disable-radix-cache", "the recipe"),
    Said("decode: KV of a rank without offload", "218,560 tokens", "log of run 31235207041, same layout"),
    Said("decode: host memory behind it (HiSparse)", "5 times the device's", "the recipe"),
    Said("speculation", "none", "the recipe"),
)

# TTFT below 16 was not published. Both arms are equal within noise below 8, and the one with host memory is
# at 0.85 s at 16: so the other one is not above that at 4. At 8 it may be anywhere.
K3 = (
    Published(1),
    Published(2),
    Published(4, 0.85, at_most=True),
    Published(8),
    Published(16, 86.0, 49.6, hit=0.027),
    Published(24, 191.0, 54.9, hit=0.027),
)
K3_HOST = (
    Published(1),
    Published(2),
    Published(4),
    Published(8),
    Published(16, 0.85, 245.0),
    Published(24, 6.2, 260.6),
)
K3_SAID = (
    Said("max-num-seqs", "2 x concurrency", "the recipe"),
    Said("max-num-batched-tokens", "16,384", "the recipe"),
    Said("gpu-memory-utilization", "0.90", "the recipe"),
    Said("prefix caching", "on, in blocks of 64", "the recipe"),
    Said("KV", "fp8; 42.23 GiB of each GPU: 3,249,215 tokens", "the server's log, perf-changelog.yaml"),
    Said("layout", "tensor parallel 8, no expert parallelism", "the recipe"),
    Said("speculation", "none", "the recipe"),
)
K3_HOST_SAID = (*K3_SAID, Said("host memory for KV", "1,889 GB", "perf-changelog.yaml"))

MEASURED_PROMPT = 21_635_381_376 / 98_827  # tokens of a request of the measured corpus, on average
OWN_PROMPT = 120_243  # of the 406 sessions that stand in for it
SESSIONS_SHARE = OWN_PROMPT / MEASURED_PROMPT
"""Of a cache's room, in which sessions of ours are as many as measured ones were in all of it."""

REPLAY_SAID = (
    Said("sessions", "393 of cc-traces-weka-062126: 98,827 requests, 218,922 tokens each", H200_POINTS),
    Said("longest idle gap of a session", "10 s", REPLAY_RULES),
    Said("start of a session", "at 25 to 75 % of its turns, caches warmed for 600 s", REPLAY_RULES),
    Said("duration", "3,600 s; a session that ends is followed by another from its start", REPLAY_RULES),
    Said("assistant turns", "as recorded", REPLAY_RULES),
)
