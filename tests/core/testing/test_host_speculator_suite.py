"""Each planted fault must be caught, and by the test that is meant for it."""

from __future__ import annotations

import itertools

import pytest

from bien.core.speculation.speculator import SpeculatorCaps
from bien.core.testing.speculator import HostSpeculatorSuite
from bien.core.testing.suites import failures


class Repeat:
    """Conforms: proposes the last token again."""

    caps = SpeculatorCaps(place="host", max_drafts=3)

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}

    def start(self, id: str, tokens: list[int]) -> None:
        self.texts[id] = list(tokens)

    def extend(self, id: str, tokens: list[int]) -> None:
        self.texts[id] += tokens

    def propose(self, id: str, limit: int) -> list[int]:
        return self.texts[id][-1:] * min(limit, self.caps.max_drafts)

    def observe(self, id: str, drafted: int, accepted: int) -> None:
        pass

    def end(self, id: str) -> None:
        self.texts.pop(id, None)

    def close(self) -> None:
        pass


class IgnoresLimit(Repeat):
    def propose(self, id: str, limit: int) -> list[int]:
        return self.texts[id][-1:] * self.caps.max_drafts


class ExceedsItsOwnMaximum(Repeat):
    def propose(self, id: str, limit: int) -> list[int]:
        return self.texts[id][-1:] * limit


class LeavesTheVocabulary(Repeat):
    def propose(self, id: str, limit: int) -> list[int]:
        return [t + 1 for t in super().propose(id, limit)]


class ForgetsToForget(Repeat):
    """The texts of ended sequences stay and are searched."""

    def start(self, id: str, tokens: list[int]) -> None:
        self.texts[id] = self.texts.get(id, []) + list(tokens)

    def propose(self, id: str, limit: int) -> list[int]:
        return self.texts[id][:1] * min(limit, self.caps.max_drafts)

    def end(self, id: str) -> None:
        pass


class KeepsWhatEnded(Repeat):
    """Nobody sees it, until memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[list[int]] = []

    def end(self, id: str) -> None:
        self.ended.append(self.texts.pop(id))


class MixesSequences(Repeat):
    def propose(self, id: str, limit: int) -> list[int]:
        longest = max(self.texts.values(), key=lambda t: (len(t), t))
        return longest[-1:] * min(limit, self.caps.max_drafts)


class Random(Repeat):
    """Says that it is deterministic."""

    counter = itertools.count()

    def propose(self, id: str, limit: int) -> list[int]:
        return [next(self.counter) % 50 for _ in range(min(limit, self.caps.max_drafts))]


class KeepsTheCallersList(Repeat):
    def start(self, id: str, tokens: list[int]) -> None:
        self.texts[id] = tokens

    def extend(self, id: str, tokens: list[int]) -> None:
        self.texts[id] = self.texts[id] + tokens


class SharesBetweenInstances(Repeat):
    """Continues with what any instance has seen after the same tokens."""

    seen: dict[tuple[int, ...], list[int]] = {}

    def start(self, id: str, tokens: list[int]) -> None:
        super().start(id, tokens)
        for i in range(len(tokens)):
            self.seen[tuple(tokens[:i])] = tokens[i:]

    def propose(self, id: str, limit: int) -> list[int]:
        return self.seen.get(tuple(self.texts[id]), [])[: min(limit, 3)]


class IgnoresExtend(Repeat):
    def extend(self, id: str, tokens: list[int]) -> None:
        pass


class SaysDevice(Repeat):
    caps = SpeculatorCaps(place="device", max_drafts=3)


CAUGHT = {
    IgnoresLimit: "at_most_limit_drafts",
    ExceedsItsOwnMaximum: "at_most_limit_drafts",
    LeavesTheVocabulary: "drafts_lie_in_the_vocabulary",
    ForgetsToForget: "end_forgets",
    KeepsWhatEnded: "memory_is_given_back",
    MixesSequences: "sequences_do_not_mix",
    Random: "deterministic_as_declared",
    KeepsTheCallersList: "does_not_see_the_future",
    SharesBetweenInstances: "does_not_see_the_future",
    IgnoresExtend: "extend_equals_start",
    SaysDevice: "caps",
}


def suite(drafter: type[Repeat]) -> type[HostSpeculatorSuite]:
    return type("Suite", (HostSpeculatorSuite,), {"build": lambda self: drafter()})


def test_a_plain_drafter_conforms() -> None:
    assert failures(suite(Repeat)) == []


@pytest.mark.parametrize("fault", CAUGHT, ids=lambda c: c.__name__)
def test_fault_is_caught(fault: type[Repeat]) -> None:
    names = [line.split(":")[0] for line in failures(suite(fault))]
    assert f"test_{CAUGHT[fault]}" in names
