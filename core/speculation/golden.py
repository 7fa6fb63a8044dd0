"""Published acceptance lengths, for forced acceptance: mean tokens per verify step, the target's own too.

Measured by InferenceX with SPEED-Bench's coding prompts on vLLM and B300, thinking on, or off where the name
ends in "-no-thinking" (github.com/SemiAnalysisAI/InferenceX, golden_al_distribution, 843c6254; Apache-2.0).
Temperatures are 1, but for Qwen's (0.6 with thinking, 0.7 without) and Kimi K2.5's without thinking (0.6).
Entry k - 1 of a curve is for k drafts.
"""

from __future__ import annotations

GOLDEN: dict[str, tuple[float, ...]] = {
    "deepseek-v4-pro/mtp": (1.79, 2.27, 2.49, 2.54, 2.55, 2.55, 2.54, 2.58),
    "deepseek-v4-pro/mtp-no-thinking": (1.92, 2.61, 2.97, 3.00, 3.10, 3.16, 3.00, 3.11),
    "deepseek-v4-pro/dspark": (1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73, 3.47),
    "glm-5.2/mtp": (1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06),
    "kimi-k2.5/eagle3": (1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71, 3.77),
    "kimi-k2.5/eagle3-no-thinking": (1.80, 2.33, 2.75, 3.06, 3.25, 3.43, 3.46, 3.51),
    "kimi-k3/dspark": (1.84, 2.45, 2.87, 3.22, 3.44, 3.54, 3.78, 3.88),
    "kimi-k3/dspark-block": (1.85, 2.51, 3.00, 3.36, 3.62, 3.75, 3.84, 4.00),
    "minimax-m3/eagle3": (1.78, 2.38, 2.83, 3.11, 3.35, 3.45, 3.53, 3.74),
    "minimax-m3/eagle3-no-thinking": (1.84, 2.52, 2.93, 3.41, 3.59, 3.57, 3.85, 4.06),
    "minimax-m3/eagle3-gqa": (1.79, 2.39, 2.78, 3.02, 3.21, 3.30, 3.52, 3.51),
    "minimax-m3/eagle3-gqa-no-thinking": (1.83, 2.46, 2.97, 3.29, 3.72, 3.76, 3.75, 3.93),
    "qwen3.5-397b/mtp": (1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21),
    "qwen3.5-397b/mtp-no-thinking": (1.92, 2.70, 3.33, 3.83, 4.20, 4.48, 4.73, 4.71),
}


def chances_of(length: float) -> tuple[float, ...]:
    """The chance of each position, once those before it are taken, that makes rounds of `length` tokens on
    average with the least variance: so many certain ones, and a last one for the rest (vLLM's
    `synthetic_acceptance_length`)."""
    whole, rest = divmod(round(length - 1.0, 9), 1.0)
    return (1.0,) * int(whole) + (round(rest, 9),)
