"""`PlainCorpus`: the corpus in Python. Slower, and what the compiled one is held to in tests."""

from __future__ import annotations

import heapq

from bien.plugins.speculators.suffix.chances import Chances, cell_of
from bien.plugins.speculators.suffix.corpus import CONTEXT, Found, Size, Tokens, unpacked

LENGTHS = (20, 8, 4, 2)  # of the n-grams that are looked up, the longest first
MOST, WALK = 24, 64  # occurrences weighed, and looked at, per length
BRANCHES = 3  # of a tree's node
BREAK = -1
SMALLEST = 256


class PlainCorpus:
    def __init__(self, limit: int) -> None:
        self._most = SMALLEST
        while self._most < limit:
            self._most *= 2
        self.end = 0
        self._text = 0
        self._tokens: list[int] = []  # from position self._begin on
        self._begin = 0
        self._repeated: set[int] = set()
        self._seen: dict[tuple[int, ...], list[int]] = {}  # n-gram -> positions behind it, ascending

    def append(self, tokens: Tokens, *, fresh: bool, repeated: int = 0) -> int:
        if fresh and self.end > self._text:
            self._put(BREAK)
            self._text = self.end
        first = self.end
        for i, token in enumerate(unpacked(tokens)):
            if i >= repeated:
                self._enter()
            else:
                self._repeated.add(self.end)
            self._put(token)
        self._forget()
        return first

    def equal(self, position: int, tokens: Tokens, start: int, count: int) -> int:
        if not self._begin <= position <= self.end:
            return -1
        same = 0
        for token in unpacked(tokens[4 * start : 4 * (start + count)]):
            at = position + same
            if at >= self.end or self._at(at) != token or at in self._repeated:
                break
            same += 1
        return same

    def propose(
        self,
        shared: PlainCorpus | None,
        seam: tuple[int, int],
        added: Tokens,
        limit: int,
        *,
        tree: bool,
        least: float,
        chances: Chances,
    ) -> Found:
        if len(added):
            self.append(added, fresh=False)
        size = min(CONTEXT, self.end - max(self._text, self._begin))
        tail = self._tokens[len(self._tokens) - size :]
        found = _occurrences([self] if shared is None else [self, shared], tail)
        out = Found([], [], [], [])
        if not found:
            return out
        table = chances.table
        # By cumulative chance, then depth, then the order of finding: as the compiled one, but for equals.
        opened: list[tuple[float, int, int, int, int, int, list[int]]] = []
        count = 0

        def expand(members: list[int], depth: int, parent: int, chance: float) -> None:
            nonlocal count
            drafted: list[int] = []  # the path
            node = parent
            while node >= 0:
                drafted.append(out.tokens[node])
                node = out.parents[node]
            drafted.reverse()
            followers = [self._follow(found[m], depth, shared, seam, drafted) for m in members]
            for token, share, match, then in _children(found, members, followers)[: BRANCHES if tree else 1]:
                cell = cell_of(match + depth, share)
                after = chance * float(table[cell])
                if after >= least:
                    heapq.heappush(opened, (-after, depth, count, parent, token, cell, then))
                    count += 1

        expand(list(range(len(found))), 0, -1, 1.0)
        while opened and len(out.tokens) < limit:
            negative, depth, _, parent, token, cell, members = heapq.heappop(opened)
            node = len(out.tokens)
            out.tokens.append(token)
            out.parents.append(parent)
            out.chances.append(float(table[cell]))
            out.cells.append(cell)
            expand(members, depth + 1, node, -negative)
        return out

    def size(self) -> Size:
        grams = sum(len(positions) for positions in self._seen.values())
        return Size(len(self._tokens), 64 * len(self._tokens) + 150 * len(self._seen) + 40 * grams)

    def _follow(
        self,
        occurrence: tuple[PlainCorpus, int, int],
        depth: int,
        shared: PlainCorpus | None,
        seam: tuple[int, int],
        drafted: list[int],
    ) -> int:
        corpus, begin, _ = occurrence
        at = begin + depth
        if corpus is shared and begin <= seam[0] <= at:
            corpus, at = self, seam[1] + at - seam[0]
        if at < corpus.end:
            return corpus._at(at) if at >= corpus._begin else BREAK
        return drafted[at - corpus.end] if corpus is self and at - corpus.end < depth else BREAK

    def _at(self, position: int) -> int:
        return self._tokens[position - self._begin]

    def _put(self, token: int) -> None:
        self._tokens.append(token)
        self.end += 1

    def _enter(self) -> None:
        for n in LENGTHS:
            if self.end - max(self._text, self._begin) >= n:
                self._seen.setdefault(tuple(self._tokens[-n:]), []).append(self.end)

    def _forget(self) -> None:
        over = len(self._tokens) - self._most
        if over <= 0:
            return
        self._begin += over
        del self._tokens[:over]
        self._repeated = {p for p in self._repeated if p >= self._begin}
        kept = {}
        for gram, positions in self._seen.items():
            left = [p for p in positions if p - len(gram) >= self._begin]
            if left:
                kept[gram] = left
        self._seen = kept


def _occurrences(corpora: list[PlainCorpus], tail: list[int]) -> list[tuple[PlainCorpus, int, int]]:
    # (corpus, position behind, tokens that agree) of the longest n-gram that occurs, newest first.
    found: list[tuple[PlainCorpus, int, int]] = []
    for n in LENGTHS:
        if len(tail) < n or found:
            continue
        for corpus in corpora:
            for p in corpus._seen.get(tuple(tail[-n:]), [])[: -WALK - 1 : -1]:
                if len(found) == MOST:
                    break
                match = 0
                while (
                    match < len(tail)
                    and p - 1 - match >= corpus._begin
                    and corpus._at(p - 1 - match) == tail[-1 - match]
                ):
                    match += 1
                found.append((corpus, p, match))
    return found


def _children(
    found: list[tuple[PlainCorpus, int, int]], members: list[int], followers: list[int]
) -> list[tuple[int, float, int, list[int]]]:
    # (token, share of the weight, longest match, members), heaviest first.
    total = 0.0
    by_token: dict[int, list[int]] = {}
    for m, token in zip(members, followers, strict=True):
        total += found[m][2] ** 2
        if token != BREAK:
            by_token.setdefault(token, []).append(m)
    out = []
    for token, agreeing in by_token.items():
        weight = sum(found[m][2] ** 2 for m in agreeing)
        out.append((token, weight / total, max(found[m][2] for m in agreeing), agreeing))
    return sorted(out, key=lambda child: -child[1])
