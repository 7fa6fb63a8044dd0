"""Published acceptance lengths, for forced acceptance: mean tokens per verify step, the target's own too.

Measured by InferenceX with SPEED-Bench's coding prompts at temperature 1, thinking on, on vLLM and B300
(github.com/SemiAnalysisAI/InferenceX, golden_al_distribution, 843c6254; Apache-2.0). Entry k - 1 of a curve
is for k drafts.
"""

from __future__ import annotations

GOLDEN: dict[str, tuple[float, ...]] = {
    "deepseek-v4-pro/mtp": (1.79, 2.27, 2.49, 2.54, 2.55, 2.55, 2.54, 2.58),
    "deepseek-v4-pro/dspark": (1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73, 3.47),
    "glm-5.2/mtp": (1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06),
    "kimi-k2.5/eagle3": (1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71, 3.77),
    "kimi-k3/dspark": (1.84, 2.45, 2.87, 3.22, 3.44, 3.54, 3.78, 3.88),
    "kimi-k3/dspark-block": (1.85, 2.51, 3.00, 3.36, 3.62, 3.75, 3.84, 4.00),
    "minimax-m3/eagle3": (1.78, 2.38, 2.83, 3.11, 3.35, 3.45, 3.53, 3.74),
    "minimax-m3/eagle3-gqa": (1.79, 2.39, 2.78, 3.02, 3.21, 3.30, 3.52, 3.51),
    "qwen3.5-397b/mtp": (1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21),
}


def chances_of(length: float) -> tuple[float, ...]:
    """The chance of each position, once those before it are taken, that makes rounds of `length` tokens on
    average with the least variance: so many certain ones, and a last one for the rest (vLLM's
    `synthetic_acceptance_length`)."""
    whole, rest = divmod(round(length - 1.0, 9), 1.0)
    return (1.0,) * int(whole) + (round(rest, 9),)
