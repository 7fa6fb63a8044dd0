"""`SpeculationSpec`: how a pool verifies drafts and how many of them. The core's, whatever the drafter."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from bien.core.errors import nearest
from bien.core.speculation.golden import GOLDEN, chances_of

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
    # then not the model's; every result names it. In its place a mean number of tokens per round, the
    # target's own included, or the name of a published curve, taken at `max_drafts` (golden.py).
    acceptance: tuple[Share, ...] = ()
    acceptance_length: Annotated[float, msgspec.Meta(ge=1, le=257)] | None = None
    golden: str = ""

    def __post_init__(self) -> None:
        length = self.acceptance_length
        if self.golden:
            if length is not None:
                raise ValueError("acceptance_length and golden are both given; valid: one of them")
            length = self._golden()
        if length is None:
            return
        chances = chances_of(length)
        if self.acceptance not in ((), chances):  # it has them already where it came over a wire
            name = "golden" if self.golden else "acceptance_length"
            raise ValueError(f"acceptance and {name} are both given; valid: one of them")
        msgspec.structs.force_setattr(self, "acceptance", chances)

    def _golden(self) -> float:
        curve = GOLDEN.get(self.golden)
        if curve is None:
            raise ValueError(f"no acceptance curve {self.golden!r}; {nearest(self.golden, GOLDEN)}")
        if self.max_drafts is None or not 1 <= self.max_drafts <= len(curve):
            raise ValueError(
                f"the acceptance curve {self.golden!r} is for 1 to {len(curve)} drafts; max_drafts is "
                f"{'not given' if self.max_drafts is None else self.max_drafts}"
            )
        return curve[self.max_drafts - 1]
