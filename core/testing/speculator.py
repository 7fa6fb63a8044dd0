"""Conformance of host speculators. Subclass `HostSpeculatorSuite` with `build()`.

class TestMine(HostSpeculatorSuite):
    def build(self) -> HostSpeculator:
        return Mine(...)
"""

from __future__ import annotations

import gc
import tracemalloc

from bien.core.guarded import draft_fault
from bien.core.speculation.draft import Draft, Scope
from bien.core.speculation.speculator import HostSpeculator, SpeculatorCaps

_PHRASE = [11, 7, 3, 5, 2, 9, 4]
_OWN = Scope("tenant")


def check_caps(caps: SpeculatorCaps, place: str) -> None:
    """AssertionError unless the caps make sense together."""
    assert caps.place == place, f"caps.place is {caps.place!r}, not {place!r}"
    assert caps.max_drafts >= 1, f"caps.max_drafts is {caps.max_drafts}: a drafter drafts at least one token"
    assert caps.q_kind == "onehot" or not caps.deterministic, "a deterministic drafter's q is one-hot"
    assert caps.topology == "chain" or caps.q_kind == "onehot", "the nodes of a tree are one-hot"
    assert caps.lookahead in (0, 1), f"caps.lookahead is {caps.lookahead}; valid: 0, 1"


class HostSpeculatorSuite:
    """What the engine relies on. `vocab_size` bounds the tokens given and proposed. `learns` says between
    which sequences a drafter passes on what it has seen, on purpose: none ("request"), those of one session
    ("session"), or those of one tenant and salt ("tenant")."""

    vocab_size = 64
    learns = "request"

    def build(self) -> HostSpeculator:
        """A fresh drafter."""
        raise NotImplementedError

    def text(self, length: int = 60) -> list[int]:
        """Repetitive tokens, on which most drafters propose something."""
        return [(_PHRASE[i % len(_PHRASE)] + i // 21) % self.vocab_size for i in range(length)]

    def unlike(self, length: int = 60) -> list[int]:
        """Tokens that do not repeat and do not occur in `text`, each followed by the next."""
        return [self.vocab_size - 1 - i % (self.vocab_size // 2) for i in range(length)]

    def test_caps(self) -> None:
        drafter = self.build()
        check_caps(drafter.caps, "host")
        assert not drafter.caps.taps, "a host drafter sees no hidden states"
        assert drafter.caps.deterministic, "a host drafter's q is one-hot"

    def test_at_most_limit_drafts(self) -> None:
        drafter = self.build()
        drafter.start("a", self.text(), _OWN)
        most = drafter.caps.max_drafts
        for limit in range(most + 4):
            drafts = drafter.propose("a", limit)
            assert len(drafts) <= min(limit, most), f"limit {limit}, max_drafts {most}: {len(drafts)} drafts"

    def test_drafts_lie_in_the_vocabulary(self) -> None:
        """The highest ids occur in the text: a drafter that counts on from them leaves the vocabulary."""
        top = self.vocab_size - 1
        for text in (self.text(), [top, top - 1, top] * 9, [top], []):
            drafter = self.build()
            drafter.start("a", text, _OWN)
            for token in drafter.propose("a", drafter.caps.max_drafts).tokens:
                assert isinstance(token, int), f"draft {token!r} is a {type(token).__name__}, not an int"
                assert 0 <= token < self.vocab_size, f"draft {token} outside 0..{top}"

    def test_drafts_are_valid(self) -> None:
        """Along a text and at its end: parents come first and only where caps say "tree", confidences are
        chances and there exactly where caps say so."""
        drafter, text = self.build(), self.text()
        drafter.start("a", text[:10], _OWN)
        for token in text[10:]:
            for limit in range(drafter.caps.max_drafts + 1):
                draft = drafter.propose("a", limit)
                wrong = draft_fault(draft, limit, self.vocab_size, drafter.caps.topology)
                assert not wrong, wrong
                told = draft.confidence is not None
                assert not len(draft) or told is (drafter.caps.confidence != "none"), (
                    f"confidence is {draft.confidence}, but caps.confidence is {drafter.caps.confidence!r}"
                )
            drafter.extend("a", [token])

    def test_siblings_differ(self) -> None:
        """Two nodes of one parent with one token are the same node, verified twice."""
        drafter = self.build()
        drafter.start("a", self.text(), _OWN)
        draft = drafter.propose("a", drafter.caps.max_drafts)
        if draft.parents is not None:
            nodes = list(zip(draft.parents, draft.tokens, strict=True))
            assert len(set(nodes)) == len(nodes), f"a node occurs twice among (parent, token) {nodes}"

    def test_proposing_changes_nothing(self) -> None:
        drafter = self.build()
        drafter.start("a", self.text(), _OWN)
        first = drafter.propose("a", drafter.caps.max_drafts)
        for _ in range(4):
            assert drafter.propose("a", drafter.caps.max_drafts) == first

    def test_deterministic_as_declared(self) -> None:
        assert self.history(self.build()) == self.history(self.build())

    def test_sequences_do_not_mix(self) -> None:
        alone = self.history(self.build())
        drafter = self.build()
        other = Scope("someone else" if self.learns == "tenant" else _OWN.tenant, "another session")
        drafter.start("other", [t + 1 for t in reversed(self.text(30))], other)
        drafter.propose("other", 2)
        drafter.extend("other", self.text(3))
        assert self.history(drafter) == alone, "another sequence's tokens changed the drafts"
        drafter.propose("other", 2)  # it is still there after the end of "a"

    def test_other_tenants_are_never_drafted(self) -> None:
        """Nor other salts of one tenant, whatever the session is called: neither while the sequence lives nor
        after its end is anything of it proposed."""
        secret, own = self.unlike(), Scope("mine", "s", "salt")
        for other in (Scope("theirs", "s", "salt"), Scope("mine", "s", "pepper"), Scope("", "s", "salt")):
            for ended in (False, True):
                drafter = self.build()
                drafter.start("other", secret[:40], other)
                drafter.propose("other", 2)
                drafter.extend("other", secret[40:])
                if ended:
                    drafter.end("other")
                tail = secret[20:26]
                drafter.start("a", self.text() + tail, own)
                found = drafter.propose("a", drafter.caps.max_drafts)
                leaked = set(found.tokens) & (set(secret) - set(tail))
                assert not leaked, f"{own} was drafted {sorted(leaked)} of {other}"
                drafter.end("a")

    def test_learns_as_declared(self) -> None:
        """A second sequence continues as the first one did exactly where the drafter says that it learns."""
        valid = ("request", "session", "tenant")
        assert self.learns in valid, f"learns is {self.learns!r}; valid: {', '.join(valid)}"
        seen, first = self.unlike(32), Scope("mine", "s")
        scopes = {"session": first, "tenant": Scope("mine", "t"), "none": Scope("mine")}
        for name, scope in scopes.items():
            drafter = self.build()
            drafter.start("first", seen, first)
            drafter.end("first")
            drafter.start("a", self.text(20) + seen[8:16], scope)
            found = drafter.propose("a", drafter.caps.max_drafts).tokens
            learned = bool(set(found) & set(seen[16:]))
            wanted = self.learns == "tenant" or (self.learns == "session" and name == "session")
            assert learned is wanted, f"learns {self.learns!r}, {scope} after {first}: {found}"

    def test_end_forgets(self) -> None:
        """The id comes back with other tokens: nothing of the first sequence is left."""
        fresh, used = self.build(), self.build()
        used.start("a", [41, 50, *self.text()], Scope("before"))
        used.propose("a", 3)
        used.extend("a", self.text(9))
        used.observe("a", 3, 1)
        used.end("a")
        for text in ([_PHRASE[0], _PHRASE[1], _PHRASE[2]], self.text(8), list(range(20, 40))):
            for drafter in (fresh, used):
                drafter.start("a", text, _OWN)
            most = fresh.caps.max_drafts
            assert used.propose("a", most) == fresh.propose("a", most), (
                "drafts from a sequence that had ended"
            )
            for drafter in (fresh, used):
                drafter.end("a")

    def test_memory_is_given_back(self) -> None:
        """A worker runs for months: what sequences took must go with them."""
        if self.learns != "request":
            return
        drafter, text = self.build(), self.text(1000)

        def live(first: int, stop: int) -> None:
            for i in range(first, stop):
                drafter.start(f"s{i}", text, Scope(f"t{i}", f"s{i}"))
                drafter.extend(f"s{i}", text[:20])
                drafter.propose(f"s{i}", 1)
                drafter.end(f"s{i}")

        tracemalloc.start()
        try:
            live(0, 10)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            live(10, 110)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 200_000, f"100 sequences of 1,000 tokens have ended; {grown:,} bytes of them are left"

    def test_start_again_replaces(self) -> None:
        """After a preemption `start` brings the prompt with the confirmed output."""
        if self.learns != "request":
            return
        text = self.text()
        kept, again = self.build(), self.build()
        kept.start("a", text, _OWN)
        again.start("a", text[:20], _OWN)
        again.extend("a", text[20:30])
        again.end("a")
        again.start("a", text, _OWN)
        most = kept.caps.max_drafts
        assert again.propose("a", most) == kept.propose("a", most)

    def test_extend_equals_start(self) -> None:
        """Tokens count alike whether they came as prompt or were confirmed, one by one or many at once."""
        text = self.text()
        parts = self.build()
        parts.start("a", text[:9], _OWN)
        for begin, stop in ((9, 10), (10, 11), (11, 15), (15, 29), (29, 60)):
            parts.extend("a", text[begin:stop])
            whole = self.build()
            whole.start("a", text[:stop], _OWN)
            most = whole.caps.max_drafts
            found, expected = parts.propose("a", most), whole.propose("a", most)  # confidences may be learned
            same = (found.tokens, found.parents) == (expected.tokens, expected.parents)
            assert same, f"differs at {stop} tokens"

    def test_does_not_see_the_future(self) -> None:
        """Tokens that the caller appends to its own list, or that another drafter has seen, are not known."""
        text = self.text()
        for cut in (7, 14, 25):
            drafter, cheated = self.build(), self.build()
            drafter.start("a", text[:cut], _OWN)
            expected = drafter.propose("a", drafter.caps.max_drafts)
            other, given = self.build(), text[:cut]
            other.start("a", text[:cut] + [1, 2, 3, 4, 5], _OWN)
            other.propose("a", 1)
            cheated.start("a", given, _OWN)
            given.extend([1, 2, 3, 4, 5])
            found = cheated.propose("a", cheated.caps.max_drafts)
            assert found == expected, (
                f"after {cut} tokens: {found}, but {expected} without knowing what follows"
            )

    def test_observe_is_taken(self) -> None:
        drafter = self.build()
        drafter.start("a", self.text(), _OWN)
        for drafted, accepted in ((0, 0), (3, 0), (3, 3)):
            drafter.observe("a", drafted, accepted)
        drafter.end("a")
        drafter.close()

    def history(self, drafter: HostSpeculator) -> list[Draft]:
        """What it proposes along the text, a token at a time."""
        text = self.text()
        drafter.start("a", text[:10], _OWN)
        out = []
        for token in text[10:40]:
            out.append(drafter.propose("a", drafter.caps.max_drafts))
            drafter.extend("a", [token])
        drafter.end("a")
        return out
