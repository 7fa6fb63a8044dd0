"""`SpeculationSpec`: how a pool verifies drafts and how many of them. The core's, whatever the drafter."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class SpeculationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[pool.speculation]` of a deployment.

    verification: `invariant` draws the target's token at each position with the noise of that position and
    accepts the draft iff it is that token: the text is the same with any drafter, any length or none.
    `standard` is rejection sampling by target and draft probabilities (Leviathan et al. 2023), `block` judges
    a whole chain at once (Sun et al. 2024): the same law with longer acceptance where drafts are sampled.
    noise: how a position's draw is made: `quantile` inverts the cumulative distribution at one uniform;
    `gumbel` takes the largest of log-probability plus noise of (seed, position, token), which drafters share:
    sampled drafts then agree with the target almost as often as under `standard` (arXiv 2408.07978).
    """

    verification: Literal["invariant", "standard", "block"] = "invariant"
    noise: Literal["quantile", "gumbel"] = "quantile"
    # How many drafts of a sequence are verified. `confidence`: as long as the chance that all of them are
    # taken is at least `min_chance`. `budget`: what promises the most tokens per measured second over all
    # sequences (DSpark's, from the confidences of two steps before).
    length: Literal["fixed", "confidence", "budget"] = "fixed"
    min_chance: Share = 0.3
    max_drafts: Annotated[int, msgspec.Meta(ge=0)] | None = None  # of a round; None: as many as the drafter's
    # Forced acceptance, for studies: the chance of each position once those before it are taken. Texts are
    # then not the model's; every result names it.
    acceptance: tuple[Share, ...] = ()
