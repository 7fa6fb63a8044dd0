"""Workers of several ranks: each has a cache, and events, of its own."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import pytest

from bien.core.clock import VirtualClock
from bien.core.kv.events import EventBatch, KVEvent
from bien.core.request import GenerateRequest
from bien.gateway.verify.options import VerifyOptions
from tests.gateway.verify.engines import OtherHash
from tests.gateway.verify.traffic import make


class Ranks(OtherHash):
    """One request at a time; the rank `liar` names its blocks in its own way."""

    def __init__(self, ranks: int, liar: int) -> None:
        super().__init__("w0", slots=1)
        self.info = msgspec.structs.replace(self.info, dp_ranks=ranks)
        self.asked: list[int] = []
        self._liar = liar
        self._rank = 0
        self._caches = [OrderedDict[bytes, bytes]() for _ in range(ranks)]
        self._seqs = [0] * ranks

    def rename(self, name: bytes) -> bytes:
        return super().rename(name) if self._rank == self._liar else name

    def post(self, events: list[KVEvent]) -> None:
        self._seqs[self._rank] += 1
        batch = EventBatch(self.info.id, self._rank, self.generation, self._seqs[self._rank], events)
        self.send(batch=batch)

    async def _serve(self, rid: int, request: GenerateRequest) -> None:
        self._rank = request.dp_rank
        self.held = self._caches[self._rank]
        self.asked.append(self._rank)
        await super()._serve(rid, request)


@pytest.mark.parametrize("liar", [0, 1, 2, 3])
def test_a_canary_is_sent_to_each_rank(liar: int) -> None:
    """Rank 3 there is not: all are honest."""
    worker = Ranks(3, liar)

    async def main() -> None:
        gateway = make([worker], VerifyOptions())
        verifier = gateway.verifier
        assert verifier is not None
        await verifier.greeted(100.0)
        if liar == 3:
            assert verifier.health == {"mode": "precise"} and worker.asked == [0, 0, 1, 1, 2, 2]
        else:
            assert verifier.health["workers"]["w0"]["cause"] == "hash"
            assert set(worker.asked) == set(range(liar + 1)), "the first that is wrong says why"
        await gateway.close()

    VirtualClock.run(main())
