"""A trained drafter in the real engine, loaded by its plugin from the folders of `study.save`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bien.core.deployment import ModelSpec, PoolSpec, Selection
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.speculation.counts import SourceCounts
from bien.core.speculation.options import SpeculationSpec
from bien.replay.bench.drafters.study import Study, slug
from bien.replay.bench.stack import build


@dataclass
class Served:
    texts: list[list[int]]  # of the requests, in order
    counts: SourceCounts  # of all rounds

    @property
    def length(self) -> float:
        """Tokens that a round of a whole block gains: the end of a text cuts the drafts of the last one."""
        pairs = zip(self.counts.accepted_at, self.counts.drafted_at, strict=True)
        return 1 + sum(accepted / drafted for accepted, drafted in pairs)


def serve(
    folder: Path,
    drafter: Selection | None,
    spec: SpeculationSpec,
    contexts: list[list[int]],
    tokens: int,
    *,
    temperature: float = 1.0,
    dtype: str = "float32",
) -> Served:
    """`tokens` tokens behind each context, eight at a time. `folder`: the target's."""
    longest = max(map(len, contexts)) + tokens
    model = ModelSpec(str(folder), dtype=dtype, max_context=longest + 16)
    pool = PoolSpec(kv_tokens=16 * (longest + 16), slots=8, threads=1, speculator=drafter, speculation=spec)
    worker = build(model, pool)
    engine, executor = worker.engine, worker.executor
    try:
        for i, context in enumerate(contexts):
            sampling = SamplingParams(tokens, temperature=temperature, seed=i, ignore_eos=True)
            engine.submit(GenerateRequest(str(i), TokenIds.of(context), sampling))
        texts: list[list[int]] = [[] for _ in contexts]
        while engine.busy:
            plan = engine.begin()
            if plan is None:
                raise RuntimeError("the engine has requests and plans nothing")
            for out in engine.finish(executor.sample(executor.forward(plan)).result()).outputs:
                texts[int(out.id)] += np.frombuffer(out.tokens, np.uint32).tolist()
        drafts = engine.stats().drafts
        return Served(texts, SourceCounts() if drafts is None else drafts.total)
    finally:
        worker.close()


def selection(found: Study, name: str, folder: Path, *, sampled: bool = True) -> Selection:
    """The plugin of a drafter of `study.save`'s folder."""
    kind = "dspark" if found.drafters[name].rank else "dflash"
    return Selection(kind, {"path": str(folder / slug(name)), "sampled": sampled})
