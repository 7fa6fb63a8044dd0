"""Each planted fault must be caught, and by the test that is meant for it."""

from __future__ import annotations

import itertools

import pytest

from bien.core.speculation.draft import ROOT, Draft, Scope
from bien.core.speculation.speculator import SpeculatorCaps
from bien.core.testing.speculator import HostSpeculatorSuite
from bien.core.testing.suites import failures


class Repeat:
    """Conforms: proposes the last token again."""

    caps = SpeculatorCaps(place="host", max_drafts=3)

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}

    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        self.texts[id] = list(tokens)

    def extend(self, id: str, tokens: list[int]) -> None:
        self.texts[id] += tokens

    def propose(self, id: str, limit: int) -> Draft:
        return Draft(self.texts[id][-1:] * min(limit, self.caps.max_drafts))

    def observe(self, id: str, drafted: int, accepted: int) -> None:
        pass

    def end(self, id: str) -> None:
        self.texts.pop(id, None)

    def close(self) -> None:
        pass


class IgnoresLimit(Repeat):
    def propose(self, id: str, limit: int) -> Draft:
        return Draft(self.texts[id][-1:] * self.caps.max_drafts)


class ExceedsItsOwnMaximum(Repeat):
    def propose(self, id: str, limit: int) -> Draft:
        return Draft(self.texts[id][-1:] * limit)


class LeavesTheVocabulary(Repeat):
    def propose(self, id: str, limit: int) -> Draft:
        return Draft([t + 1 for t in super().propose(id, limit).tokens])


class ForgetsToForget(Repeat):
    """The texts of ended sequences stay and are searched."""

    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        self.texts[id] = self.texts.get(id, []) + list(tokens)

    def propose(self, id: str, limit: int) -> Draft:
        return Draft(self.texts[id][:1] * min(limit, self.caps.max_drafts))

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
    def propose(self, id: str, limit: int) -> Draft:
        longest = max(self.texts.values(), key=lambda t: (len(t), t))
        return Draft(longest[-1:] * min(limit, self.caps.max_drafts))


class Random(Repeat):
    """Says that it is deterministic."""

    counter = itertools.count()

    def propose(self, id: str, limit: int) -> Draft:
        return Draft([next(self.counter) % 50 for _ in range(min(limit, self.caps.max_drafts))])


class KeepsTheCallersList(Repeat):
    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        self.texts[id] = tokens

    def extend(self, id: str, tokens: list[int]) -> None:
        self.texts[id] = self.texts[id] + tokens


class SharesBetweenInstances(Repeat):
    """Continues with what any instance has seen after the same tokens."""

    seen: dict[tuple[int, ...], list[int]] = {}

    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        super().start(id, tokens, scope)
        for i in range(len(tokens)):
            self.seen[tuple(tokens[:i])] = tokens[i:]

    def propose(self, id: str, limit: int) -> Draft:
        return Draft(self.seen.get(tuple(self.texts[id]), [])[: min(limit, 3)])


class IgnoresExtend(Repeat):
    def extend(self, id: str, tokens: list[int]) -> None:
        pass


class SaysDevice(Repeat):
    caps = SpeculatorCaps(place="device", max_drafts=3)


class Learns(Repeat):
    """Conforms: goes on as the latest sequence of its scope did behind the last two tokens. `key` names who
    shares."""

    def __init__(self) -> None:
        super().__init__()
        self.scopes: dict[str, Scope] = {}
        self.seen: dict[tuple[object, ...], list[int]] = {}

    def key(self, scope: Scope) -> object:
        return scope.tenant, scope.salt

    def start(self, id: str, tokens: list[int], scope: Scope) -> None:
        super().start(id, tokens, scope)
        self.scopes[id] = scope
        self.learn(id, len(tokens))

    def extend(self, id: str, tokens: list[int]) -> None:
        super().extend(id, tokens)
        self.learn(id, len(tokens))

    def learn(self, id: str, new: int) -> None:
        text, key = self.texts[id], self.key(self.scopes[id])
        for i in range(max(2, len(text) - new), len(text)):
            self.seen[key, text[i - 2], text[i - 1]] = text[i : i + 1]

    def propose(self, id: str, limit: int) -> Draft:
        text, out = self.texts[id][-2:], Draft()
        while len(out) < min(limit, self.caps.max_drafts):
            following = self.seen.get((self.key(self.scopes[id]), *text[-2:]))
            if following is None:
                break
            text += following
            out.tokens += following
        return out


class LearnsInSessions(Learns):
    """Conforms to `learns = "session"`."""

    counter = itertools.count()

    def key(self, scope: Scope) -> object:
        alone = "" if scope.session else next(self.counter)
        return scope.tenant, scope.salt, scope.session, alone

    def learn(self, id: str, new: int) -> None:
        if self.scopes[id].session:
            super().learn(id, new)


class SharesBetweenTenants(Learns):
    def key(self, scope: Scope) -> object:
        return scope.salt, scope.session


class SharesBetweenSalts(Learns):
    def key(self, scope: Scope) -> object:
        return scope.tenant, scope.session


class ParentsComeLater(Repeat):
    caps = SpeculatorCaps(place="host", max_drafts=3, topology="tree")

    def propose(self, id: str, limit: int) -> Draft:
        tokens = [1, 2, 3][:limit]
        return Draft(tokens, [1, ROOT, 0][: len(tokens)])


class SaysChainAndGrowsATree(Repeat):
    def propose(self, id: str, limit: int) -> Draft:
        tokens = [1, 2, 3][:limit]
        return Draft(tokens, [ROOT, ROOT, 0][: len(tokens)])


class Twins(SaysChainAndGrowsATree):
    caps = SpeculatorCaps(place="host", max_drafts=3, topology="tree")

    def propose(self, id: str, limit: int) -> Draft:
        draft = super().propose(id, limit)
        draft.tokens[1:2] = draft.tokens[:1] if len(draft) > 1 else []
        return draft


class SaysTree(SaysChainAndGrowsATree):
    """Conforms."""

    caps = SpeculatorCaps(place="host", max_drafts=3, topology="tree")


class Surer(Repeat):
    caps = SpeculatorCaps(place="host", max_drafts=3, confidence="prior")
    chance = 1.5

    def propose(self, id: str, limit: int) -> Draft:
        draft = super().propose(id, limit)
        draft.confidence = [self.chance] * len(draft)
        return draft


class Sure(Surer):
    """Conforms."""

    chance = 0.5


class ConfidenceUnsaid(Sure):
    caps = SpeculatorCaps(place="host", max_drafts=3)


class ConfidenceOfFewer(Surer):
    def propose(self, id: str, limit: int) -> Draft:
        draft = super().propose(id, limit)
        draft.confidence = [0.5] * (len(draft) - 1)
        return draft


class DrawsItself(Repeat):
    caps = SpeculatorCaps(place="host", max_drafts=3, deterministic=False, q_kind="dense")


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
    DrawsItself: "caps",
    Learns: "learns_as_declared",
    LearnsInSessions: "learns_as_declared",
    ParentsComeLater: "drafts_are_valid",
    SaysChainAndGrowsATree: "drafts_are_valid",
    Twins: "siblings_differ",
    Surer: "drafts_are_valid",
    ConfidenceUnsaid: "drafts_are_valid",
    ConfidenceOfFewer: "drafts_are_valid",
}


def suite(drafter: type[Repeat], learns: str = "request") -> type[HostSpeculatorSuite]:
    return type("Suite", (HostSpeculatorSuite,), {"build": lambda self: drafter(), "learns": learns})


@pytest.mark.parametrize(
    ("drafter", "learns"),
    [(Repeat, "request"), (SaysTree, "request"), (Sure, "request"), (Learns, "tenant"),
     (LearnsInSessions, "session")],
)  # fmt: skip
def test_a_plain_drafter_conforms(drafter: type[Repeat], learns: str) -> None:
    assert failures(suite(drafter, learns)) == []


@pytest.mark.parametrize("fault", [SharesBetweenTenants, SharesBetweenSalts])
def test_text_of_others_is_caught(fault: type[Repeat]) -> None:
    """Also where the drafter says that it learns from its tenant's sequences."""
    names = [line.split(":")[0] for line in failures(suite(fault, "tenant"))]
    assert "test_other_tenants_are_never_drafted" in names


def test_one_that_learns_nothing_is_no_learner() -> None:
    names = [line.split(":")[0] for line in failures(suite(Repeat, "session"))]
    assert names == ["test_learns_as_declared"]


@pytest.mark.parametrize("fault", CAUGHT, ids=lambda c: c.__name__)
def test_fault_is_caught(fault: type[Repeat]) -> None:
    names = [line.split(":")[0] for line in failures(suite(fault))]
    assert f"test_{CAUGHT[fault]}" in names
