"""What drafting did for an answer: bien's own totals, and vLLM's `metrics.speculative_decoding`."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from bien.core.speculation.counts import DraftCounts, SourceCounts


class Speculation(msgspec.Struct, omit_defaults=True):
    """`bien` in answers with `return_token_ids`."""

    drafted: int  # tokens verified
    accepted: int  # of these
    rounds: int  # of drafting and verifying; each gains what was accepted, and one token
    drafted_at: list[int] = []  # by position: rounds with a draft there
    accepted_at: list[int] = []  # by position: rounds in which it was accepted
    sources: dict[str, Speculation] = {}  # by who proposed

    @classmethod
    def of(cls, counts: DraftCounts | SourceCounts) -> Speculation:
        total = counts if isinstance(counts, SourceCounts) else counts.total
        out = cls(total.drafted, total.accepted, total.rounds, total.drafted_at, total.accepted_at)
        if isinstance(counts, DraftCounts):
            out.sources = {source: cls.of(one) for source, one in counts.sources.items()}
        return out


class Acceptance(msgspec.Struct):
    """vLLM's fields, of one generation."""

    mean_acceptance_length: float  # of a round, its own token included
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # by number of drafts accepted: rounds
    num_spec_steps: int  # rounds
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # positions of the longest round

    @classmethod
    def of(cls, counts: DraftCounts) -> Acceptance:
        total = counts.total
        reached = [total.rounds, *total.accepted_at, 0]
        return cls(
            total.acceptance_length,
            total.accepted / total.drafted if total.drafted else 0.0,
            [at - more for at, more in pairwise(reached)],
            total.rounds,
            total.accepted,
            total.drafted,
            len(total.drafted_at),
        )


def metrics_field(counts: DraftCounts | None) -> bytes:
    """A further field of an answer. `counts` None: not known, as of a generation that was cut."""
    found = None if counts is None else Acceptance.of(counts)
    return b',"metrics":' + msgspec.json.encode({"speculative_decoding": found})
