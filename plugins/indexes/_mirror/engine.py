"""What one (worker, dp_rank) holds, by its events, and what is on its way there: in Python."""

from __future__ import annotations

from collections.abc import Iterable

from bien.core.api import HASH_BYTES, KVEvent
from bien.gateway.api import WorkerInfo
from bien.plugins.indexes._mirror.chain import DEVICE, Chain
from bien.plugins.indexes._mirror.holdings import Holdings

MAX_PREDICTIONS = 1024  # per engine; the oldest go first


class Prediction:
    __slots__ = ("blocks", "expires", "hashes", "last")

    def __init__(self, hashes: bytes, expires: float) -> None:
        self.hashes = hashes
        self.blocks = len(hashes) // HASH_BYTES
        self.last = hashes[-HASH_BYTES:]
        self.expires = expires

    def common(self, chain: Chain) -> int:
        """Blocks shared with a chain. Equal hashes at one block mean equal blocks before it."""
        low, high = 0, min(self.blocks, chain.blocks)
        while low < high:
            middle = (low + high + 1) // 2
            at = HASH_BYTES * (middle - 1)
            if self.hashes[at : at + HASH_BYTES] == chain.hashes[at : at + HASH_BYTES]:
                low = middle
            else:
                high = middle - 1
        return low


class Engine:
    def __init__(self, info: WorkerInfo) -> None:
        self.predictions: list[Prediction] = []
        self._info = info
        self._first = info.tiers[0] if info.tiers else DEVICE
        self.clear()

    def clear(self) -> None:
        self.near = Holdings(self._info)  # what the first tier holds
        self.far: Holdings | None = None  # what some tier holds; None while there is no other than the first

    def feed(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            if event.tier == self._first:
                self.near.feed(event)
            elif self.far is None:
                self.far = Holdings(self._info)
                for known in self.near.events(self._first):
                    self.far.feed(known)
            if self.far is not None:
                self.far.feed(event)
        if self.predictions:
            self.predictions = [p for p in self.predictions if not self.near.holds(p.hashes)]

    def predict(self, hashes: bytes, expires: float) -> None:
        self.predictions.append(Prediction(hashes, expires))
        del self.predictions[:-MAX_PREDICTIONS]

    def take_back(self, hashes: bytes) -> None:
        """The one that would last longest: another request may have predicted the same."""
        equal = [(p.expires, i) for i, p in enumerate(self.predictions) if p.hashes == hashes]
        if equal:
            del self.predictions[max(equal)[1]]

    def usable(self, chain: Chain, now: float) -> int:
        """Blocks that every group can use from the first tier, once the prompts on their way have run."""
        position = self.near.usable(chain)
        if not self.predictions or position == chain.blocks:
            return position
        self.predictions = [p for p in self.predictions if p.expires > now]
        at = HASH_BYTES * position
        beyond = chain.at(position)  # what shares no more than `position` blocks cannot help
        for prediction in self.predictions:
            if prediction.hashes[at : at + HASH_BYTES] == beyond:
                position = max(position, self._after(prediction, chain))
        return position

    def loadable(self, chain: Chain, now: float) -> int:
        if self.far is None:
            return 0
        return max(0, self.far.usable(chain) - self.usable(chain, now))

    def _after(self, prediction: Prediction, chain: Chain) -> int:
        # A state is kept at the prompt's last block boundary and at its regular snapshots, nowhere else.
        if chain.at(prediction.blocks - 1) == prediction.last:
            return prediction.blocks
        every = self.near.every
        if 0 in every:
            return 0
        shared = prediction.common(chain)
        while any(shared % each for each in every):
            shared = min(shared - shared % each for each in every)
        return shared
