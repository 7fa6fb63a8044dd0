"""Verification: which drafts the target's own draws confirm.

The target's token is drawn at every position of a row with the number of that position, whatever was
drafted there; a draft is accepted iff it *is* that token. For one-hot drafts this is the acceptance rule
of speculative sampling (Leviathan et al. 2023: accept with p(draft), else draw from p without the draft,
renormalised) coupled to one number: the law is the target's, and the text is the same with any drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bien.core.plan import I32


@dataclass(slots=True)
class Verdict:
    """`accepted` [R]: tokens gained per row, 0 for a chunk, else 1 + accepted drafts. `tokens`: these
    tokens of all rows, concatenated."""

    accepted: I32
    tokens: I32


def verify_rows(
    drawn: I32, samples: I32, drafts: I32, draft_tokens: I32, forced: I32 | None = None
) -> Verdict:
    """Compare drafts with the target's tokens.

    samples [R]: 1 if the row yields tokens. drafts [R]: drafts per row, 0 in rows that yield none.
    drawn: the target's tokens of the yielding rows, 1 + drafts[i] each, in row order. draft_tokens:
    drafts of all rows, concatenated. forced, of drawn's shape: replaces the drawn token where >= 0
    (recorded traces).
    """
    if forced is not None:
        drawn = np.where(forced >= 0, forced, drawn)
    yields = samples > 0
    if not len(draft_tokens):
        return Verdict(yields.astype(np.int32), drawn.astype(np.int32))
    length = np.where(yields, 1 + drafts, 0)
    # [R, most drafts]: rows side by side, so that the run of leading matches is a product along them.
    planned = np.arange(int(drafts.max())) < drafts[:, None]
    begins = np.cumsum(length) - length
    row, column = np.nonzero(planned)
    match = np.zeros(planned.shape, np.int32)
    match[row, column] = drawn[begins[row] + column] == draft_tokens
    accepted = np.where(yields, 1 + np.cumprod(match, axis=1).sum(axis=1), 0)
    taken = np.arange(int(accepted.max())) < accepted[:, None]
    row, column = np.nonzero(taken)
    return Verdict(accepted.astype(np.int32), drawn[begins[row] + column].astype(np.int32))
