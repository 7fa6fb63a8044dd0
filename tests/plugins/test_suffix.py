"""The suffix drafter: what it finds, what it keeps, for whom."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bien.core.api import HostSpeculator, Scope
from bien.core.testing.speculator import HostSpeculatorSuite
from bien.plugins.speculators.suffix import Suffix, SuffixConfig
from bien.plugins.speculators.suffix.chances import CELLS, Chances, cell_of, path
from bien.plugins.speculators.suffix.corpus import Corpus, corpus_maker, packed
from bien.plugins.speculators.suffix.native import NativeCorpus
from bien.plugins.speculators.suffix.plain import PlainCorpus

OURS, THEIRS = Scope("us", "s1"), Scope("them", "s1")


def build(**parameters: object) -> Suffix:
    config = SuffixConfig(**parameters)  # type: ignore[arg-type]
    return Suffix(config, corpus_maker(config.corpus))


def words(seed: int, count: int, vocabulary: int = 5000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(count)]


@pytest.fixture(params=["native", "python"])
def corpus(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


class TestAlone(HostSpeculatorSuite):
    def build(self) -> HostSpeculator:
        return build(scope="request", min_chance=0)


class TestInPython(HostSpeculatorSuite):
    def build(self) -> HostSpeculator:
        return build(scope="request", corpus="python", min_chance=0)


class TestOfSessions(HostSpeculatorSuite):
    learns = "session"

    def build(self) -> HostSpeculator:
        return build(scope="session", min_chance=0)


class TestOfTenants(HostSpeculatorSuite):
    learns = "tenant"

    def build(self) -> HostSpeculator:
        return build(tree=True, min_chance=0)


def test_a_copy_is_followed_to_its_end(corpus: str) -> None:
    file = words(1, 300)
    drafter = build(corpus=corpus, max_drafts=40, min_chance=0)
    drafter.start("a", [*file, 7, 7, *file[100:110]], OURS)
    assert drafter.propose("a", 40).tokens[:20] == file[110:130]
    drafter.extend("a", file[110:114])
    draft = drafter.propose("a", 8)
    assert draft.tokens == file[114:122]
    assert draft.source == "suffix"


def test_the_longest_repetition_wins(corpus: str) -> None:
    end = words(2, 24)
    drafter = build(corpus=corpus)
    drafter.start("a", [*end, 1, 1, 9, *end[-3:], 2, 2, 9, *end[-3:], 2, 2, 9, *end], OURS)
    assert drafter.propose("a", 2).tokens == [1, 1]


def test_frequent_ones_outweigh_rare_ones(corpus: str) -> None:
    drafter = build(corpus=corpus)
    drafter.start("a", [5, 6, 8, 1, 5, 6, 7, 2, 5, 6, 7, 3, 5, 6, 7, 4, 5, 6, 8, 0, 5, 6], OURS)
    assert drafter.propose("a", 1).tokens == [7]


def test_a_tree_branches_where_texts_did(corpus: str) -> None:
    head = words(3, 30)
    drafter = build(corpus=corpus, tree=True, min_chance=0.01)
    drafter.start("a", [*head, 1, 2, 3, 0, *head, 4, 5, 6, 0, *head], OURS)
    draft = drafter.propose("a", 6)
    assert draft.parents is not None
    roots = [t for t, p in zip(draft.tokens, draft.parents, strict=True) if p == -1]
    assert sorted(roots) == [1, 4]
    assert build(corpus=corpus, tree=False).caps.topology == "chain"


def test_a_turn_adds_only_what_is_new(corpus: str) -> None:
    drafter = build(corpus=corpus, min_chance=0)
    text = words(4, 4000)
    answers = [words(10 + i, 50) for i in range(5)]
    sizes = []
    for i, answer in enumerate(answers):
        drafter.start("a", text, OURS)
        drafter.extend("a", answer)
        drafter.end("a")
        sizes.append(drafter.size()[0])
        text = text + answer + words(100 + i, 30)  # a tool's result
    assert sizes[0] <= 4052
    assert all(after - before == 80 for before, after in pairwise(sizes))
    drafter.start("b", [*text, 1, *answers[1][:5]], OURS)
    assert drafter.propose("b", 4).tokens == answers[1][5:9], "an answer of an earlier turn"
    drafter.extend("b", [1, *words(102, 30)[:5]])
    assert drafter.propose("b", 4).tokens == words(102, 30)[5:9], "a tool's result"


def test_sessions_share_what_they_begin_with(corpus: str) -> None:
    drafter = build(corpus=corpus)
    system = words(5, 3000)
    for i in range(10):
        drafter.start(f"r{i}", system + words(50 + i, 20), Scope("us", f"s{i}"))
    assert drafter.size()[0] < 3000 + 10 * (20 + 3 * 65)


def test_a_text_that_goes_on_elsewhere(corpus: str) -> None:
    """Two sub-agents of a session fork its text; each finds what the other has read."""
    drafter = build(corpus=corpus)
    begin, left, right = words(6, 500), words(7, 100), words(8, 100)
    drafter.start("a", begin + left, OURS)
    drafter.start("b", begin + right, OURS)
    drafter.extend("b", left[40:46])
    assert drafter.propose("b", 3).tokens == left[46:49]
    drafter.extend("a", begin[-4:] + right[:2])  # over the seam of the fork
    assert drafter.propose("a", 3).tokens == right[2:5]


@pytest.mark.parametrize("scope", ["request", "session", "tenant"])
def test_other_tenants_and_salts_see_nothing(scope: str, corpus: str) -> None:
    drafter = build(scope=scope, corpus=corpus)
    secret = words(9, 200)
    drafter.start("a", secret, OURS)
    drafter.extend("a", secret[:50])
    drafter.end("a")
    for other in (THEIRS, Scope("us", "s1", "salt"), Scope("", ""), Scope("us\0s1", ""), Scope("u", "ss1")):
        drafter.start("b", secret[100:120], other)
        assert not drafter.propose("b", 8).tokens
        drafter.end("b")


def test_scopes_reach_as_far_as_they_say() -> None:
    text = words(11, 200)
    for scope, same, sibling, foreign in (
        ("request", False, False, False),
        ("session", True, False, False),
        ("tenant", True, True, False),
        ("global", True, True, True),
    ):
        drafter = build(scope=scope)
        drafter.start("a", text, OURS)
        drafter.end("a")
        found = []
        for other in (OURS, Scope("us", "s2"), THEIRS):
            drafter.start("b", text[60:90], other)
            found.append(bool(drafter.propose("b", 4).tokens))
            drafter.end("b")
        assert found == [same, sibling, foreign], scope


def test_without_a_session_nothing_is_kept_for_one() -> None:
    drafter = build(scope="session")
    drafter.start("a", words(12, 500), Scope("us"))
    drafter.end("a")
    assert drafter.size() == (0, 0)


def test_memory_is_bounded(corpus: str) -> None:
    drafter = build(scope="session", tokens=1024, memory_mb=1, corpus="native")
    for i in range(60):
        drafter.start("a", words(i, 5000), Scope("us", f"s{i}"))
        drafter.end("a")
    assert drafter.size()[1] <= 1 << 20
    long = build(tokens=1024, corpus=corpus)
    for i in range(20):
        long.start("a", words(i, 900), OURS)
        long.end("a")
    assert long.size()[0] <= 1024
    long.start("a", words(19, 900)[-40:-10], OURS)
    assert long.propose("a", 4).tokens == words(19, 900)[-10:-6], "the newest are still known"


def test_those_in_use_are_not_dropped() -> None:
    drafter = build(scope="session", tokens=1 << 14, memory_mb=1)
    file = words(13, 8000)
    drafter.start("a", file, OURS)
    for i in range(20):
        drafter.start("b", words(i, 8000), Scope("us", f"t{i}"))
        drafter.end("b")
    drafter.extend("a", file[50:60])
    assert drafter.propose("a", 4).tokens == file[60:64]


def test_an_answer_joins_its_scope_when_it_ends(corpus: str) -> None:
    drafter = build(corpus=corpus, min_chance=0)
    answer = words(20, 60)
    drafter.start("a", words(21, 30), OURS)
    drafter.extend("a", answer)
    drafter.start("b", answer[20:30], Scope("us", "s2"))
    assert not drafter.propose("b", 4).tokens, "it is not known before"
    drafter.end("a")
    assert drafter.propose("b", 4).tokens == answer[30:34]


def test_a_scope_in_use_is_there_for_others_that_join_it() -> None:
    drafter = build(scope="session", tokens=1 << 14, memory_mb=1)
    file = words(13, 8000)
    drafter.start("a", file, OURS)
    for i in range(20):
        drafter.start("b", words(i, 8000), Scope("us", f"t{i}"))
        drafter.end("b")
    drafter.start("c", file[50:60], OURS)
    assert drafter.propose("c", 4).tokens == file[60:64]


def test_a_text_that_others_have_pushed_out_goes_on(corpus: str) -> None:
    """Sessions in turn, more than the corpus holds: each adds what is new, not its whole text again."""
    drafter = build(corpus=corpus, tokens=1024)
    sessions = [words(i, 400) for i in range(6)]
    for turn in range(4):
        before = drafter._scopes["tenant", "us", ""].corpus.end if turn else 0
        for i, text in enumerate(sessions):
            drafter.start("a", text, Scope("us", f"s{i}"))
            drafter.end("a")
            sessions[i] = text + words(100 * turn + i, 20)
        after = drafter._scopes["tenant", "us", ""].corpus.end
        if turn:
            assert after - before <= 6 * (20 + 64 + 1)
    drafter.start("a", sessions[2][:-3] + [9999], Scope("us", "s2"))  # it is not what was there
    assert drafter._live["a"].text.length == len(sessions[2]) - 2


def test_many_turns_in_turn_leave_few_pieces() -> None:
    drafter = build()
    texts = [words(1, 50), words(2, 50)]
    for turn in range(300):
        for i in range(2):
            drafter.start("a", texts[i], Scope("us", f"s{i}"))
            assert len(drafter._live["a"].text.pieces) <= 65
            assert drafter._live["a"].text.length == len(texts[i])
            drafter.end("a")
            texts[i] = texts[i] + words(turn * 2 + i, 3)


def test_many_sessions_are_remembered() -> None:
    drafter = build()
    sessions = [words(i, 100) for i in range(200)]
    for _ in range(2):
        for i, text in enumerate(sessions):
            drafter.start("a", text, Scope("us", f"s{i}"))
            drafter.end("a")
    assert drafter.size()[0] <= 200 * 102


def test_chances_are_learned_from_what_followed() -> None:
    first = Chances().table
    drafter = build()
    drafter.start("a", words(14, 50) * 2, OURS)
    for _ in range(40):
        drafter.extend("a", drafter.propose("a", 1).tokens)
    assert len(drafter.propose("a", 16)) == 16
    misled = build()
    misled.start("a", words(14, 50) * 2, OURS)
    lengths = []
    for i in range(200):
        lengths.append(len(misled.propose("a", 16)))
        misled.extend("a", [9000 + i, *words(14, 50)[i % 40 : i % 40 + 6]])
    assert sum(lengths[-20:]) < sum(lengths[:20]) / 2
    assert (first == Chances().table).all()
    learned = misled._live["a"].texts.chances.table
    assert (learned < first - 0.1).any()


def test_path_knows_accepted_rejected_and_unseen() -> None:
    assert path([-1, 0, 1], [1, 2, 3], [1, 9]) == [(0, True), (1, False)]
    assert path([-1, 0, 1], [1, 2, 3], [1, 2]) == [(0, True), (1, True)]
    assert path([-1, -1, 1, 2], [1, 2, 3, 4], [2, 3, 4]) == [(0, False), (1, True), (2, True), (3, True)]


def test_cells_are_numbered_without_gaps() -> None:
    found = {cell_of(m, s) for m in range(1, 60) for s in (0.1, 0.5, 0.8, 1.0)}
    assert found == set(range(CELLS))


tokens = st.integers(0, 3)
steps = st.lists(
    st.tuples(st.lists(tokens, max_size=60), st.booleans(), st.booleans(), st.lists(tokens, max_size=3)),
    max_size=12,
)


@settings(max_examples=60)
@given(steps, st.sampled_from([256, 700]), st.booleans(), st.sampled_from([0.01, 0.1, 0.3]))
def test_the_compiled_corpus_equals_pythons(
    steps: list[tuple[list[int], bool, bool, list[int]]], limit: int, tree: bool, least: float
) -> None:
    pairs: list[list[Corpus]] = [[NativeCorpus(limit), PlainCorpus(limit)] for _ in range(2)]
    chances = Chances()
    for added, fresh, second, own in steps:
        for times in range(8):
            text = packed(added * 2 if times % 3 else added)
            repeated = len(own) * (times % 2)
            firsts = [c.append(text, fresh=fresh, repeated=repeated) for c in pairs[second]]
            assert firsts[0] == firsts[1]
            position = pairs[second][0].end * times // 8
            assert len({c.equal(position, packed(own), 0, len(own)) for c in pairs[second]}) == 1
        found = [
            mine.propose(
                theirs, (theirs.end // 2, mine.end), packed(own), 10, tree=tree, least=least, chances=chances
            )
            for mine, theirs in zip(*pairs, strict=True)
        ]
        assert found[0] == found[1]
