"""The oracle of speculation: the law of the output, by enumeration of everything that chance decides.

On a vocabulary of a few tokens all drafts, coins and lengths can be enumerated. With rational numbers the
result is exact: it equals the target's law, or a rule is biased. Statistics over sampled texts would need
millions of rounds to see what this sees in milliseconds.

    verify-all, any rule            no difference
    cut where a sampled draft's own chance is low, or a budget that looks at the drafts it admits:
    differences of 0.1 and more (Cheng et al., "DSpark", 2026, appendix A, gives an example by hand)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product

Text = tuple[int, ...]
Row = list[Fraction]  # probabilities over the vocabulary
Model = Callable[[Text], Row]
Law = dict[Text, Fraction]
ONE, ZERO = Fraction(1), Fraction(0)


@dataclass(frozen=True, slots=True)
class Drafted:
    """One way in which a round's drafts may come out."""

    chance: Fraction
    tokens: Text  # nodes in order, parents first
    parents: tuple[int, ...]  # -1 = behind the text
    laws: tuple[Row, ...]  # what each was drawn from
    confidence: tuple[float, ...] = ()  # as the drafter reports it

    def cut(self, count: int) -> Drafted:
        return Drafted(
            self.chance,
            self.tokens[:count],
            self.parents[:count],
            self.laws[:count],
            self.confidence[:count],
        )


Drafter = Callable[[Text], Iterator[Drafted]]
Policy = Callable[[Drafted], int]
"""How many nodes are verified. An honest one decides on a node without looking at what was drawn for it."""
Rule = Callable[[Text, Drafted, Model], Law]
"""What a round adds to the text, by chance, given what was drafted."""


def target_law(target: Model, count: int, text: Text = ()) -> Law:
    """Of the next `count` tokens."""
    law: Law = {(): ONE}
    for _ in range(count):
        law = {
            (*more, token): chance * p
            for more, chance in law.items()
            for token, p in enumerate(target(text + more))
            if p
        }
    return law


def output_law(target: Model, drafter: Drafter, policy: Policy, rule: Rule, count: int) -> Law:
    """Of the first `count` tokens that rounds of speculation put out."""
    out: Law = {}
    open_: Law = {(): ONE}
    while open_:
        text, chance = open_.popitem()
        for drafted in drafter(text):
            admitted = drafted.cut(policy(drafted))
            for added, p in rule(text, admitted, target).items():
                whole = (text + added)[:count]
                into = out if len(whole) == count else open_
                into[whole] = into.get(whole, ZERO) + chance * drafted.chance * p
    return out


def distance(a: Law, b: Law) -> Fraction:
    """Total variation: 0 only where the laws are the same."""
    return sum((abs(a.get(t, ZERO) - b.get(t, ZERO)) for t in a.keys() | b.keys()), ZERO) / 2


# -- models and drafters


def random_model(seed: int, vocabulary: int, parts: int = 12) -> Model:
    """A law for every text, of multiples of 1 / parts; some tokens have none."""
    memo: dict[Text, Row] = {}

    def model(text: Text) -> Row:
        row = memo.get(text)
        if row is None:
            rng = random.Random(f"{seed}/{text}")
            cuts = sorted(rng.randrange(parts + 1) for _ in range(vocabulary - 1))
            edges = [0, *cuts, parts]
            row = memo[text] = [Fraction(b - a, parts) for a, b in pairwise(edges)]
        return row

    return model


def mixed(a: Model, b: Model, share: Fraction) -> Model:
    """A drafter's law that is like the target's."""
    return lambda text: [x * share + y * (1 - share) for x, y in zip(a(text), b(text), strict=True)]


def sampled_chain(model: Model, length: int, *, own: bool = False) -> Drafter:
    """Draws each token from `model`. Confidence of a node: the largest chance where it is drawn, which its
    own token does not change; `own`: the chance of the token that was drawn."""

    def draft(text: Text) -> Iterator[Drafted]:
        vocabulary = range(len(model(text)))
        for tokens in product(vocabulary, repeat=length):
            laws = tuple(model(text + tokens[:i]) for i in range(length))
            chance = ONE
            for law, token in zip(laws, tokens, strict=True):
                chance *= law[token]
            if chance:
                sure = [
                    float(law[token] if own else max(law)) for law, token in zip(laws, tokens, strict=True)
                ]
                yield Drafted(chance, tokens, tuple(range(-1, length - 1)), laws, tuple(sure))

    return draft


def greedy_chain(model: Model, length: int) -> Drafter:
    """The likeliest tokens, each of which is certain: confidence is its chance in `model`."""

    def draft(text: Text) -> Iterator[Drafted]:
        tokens: Text = ()
        laws, sure = [], []
        for _ in range(length):
            row = model(text + tokens)
            token = row.index(max(row))
            laws.append(_certain(token, len(row)))
            sure.append(float(row[token]))
            tokens = (*tokens, token)
        yield Drafted(ONE, tokens, tuple(range(-1, length - 1)), tuple(laws), tuple(sure))

    return draft


def greedy_tree(model: Model, width: int, depth: int) -> Drafter:
    """The `width` likeliest tokens behind every node, level by level."""

    def draft(text: Text) -> Iterator[Drafted]:
        nodes: list[tuple[int, Text, float]] = []
        level: list[tuple[int, Text]] = [(-1, ())]
        for _ in range(depth):
            following = []
            for parent, path in level:
                row = model(text + path)
                best = sorted(range(len(row)), key=lambda t: (-row[t], t))[:width]
                for token in best:
                    following.append((len(nodes), (*path, token)))
                    nodes.append((parent, (*path, token), float(row[token])))
            level = following
        size = len(model(text))
        tokens = tuple(path[-1] for _, path, _ in nodes)
        laws = tuple(_certain(token, size) for token in tokens)
        yield Drafted(ONE, tokens, tuple(p for p, _, _ in nodes), laws, tuple(c for _, _, c in nodes))

    return draft


def _certain(token: int, size: int) -> Row:
    return [ONE if t == token else ZERO for t in range(size)]


# -- rules


def standard(text: Text, drafted: Drafted, target: Model) -> Law:
    """Leviathan et al. 2023, of a chain."""
    law: Law = {}
    reached, chance = text, ONE
    for token, q in zip(drafted.tokens, drafted.laws, strict=True):
        p = target(reached)
        taken = min(ONE, p[token] / q[token])
        _spread(law, reached[len(text) :], chance * (1 - taken), residual(p, q, ONE))
        reached, chance = (*reached, token), chance * taken
    _spread(law, reached[len(text) :], chance, target(reached))
    return law


def block(text: Text, drafted: Drafted, target: Model) -> Law:
    """Sun et al. 2024, of a chain."""
    n = len(drafted.tokens)
    weights, bounds = [ONE], []
    for i, (token, q) in enumerate(zip(drafted.tokens, drafted.laws, strict=True)):
        p = target(text + drafted.tokens[:i])
        weights.append(min(weights[-1] * p[token] / q[token], ONE))
    for i in range(1, n + 1):
        if i == n:
            bounds.append(weights[n])
            continue
        p, q = target(text + drafted.tokens[:i]), drafted.laws[i]
        spare = sum((max(weights[i] * a - b, ZERO) for a, b in zip(p, q, strict=True)), ZERO)
        over = spare + 1 - weights[i]
        bounds.append(spare / over if over else ONE)
    law: Law = {}
    later = ONE  # that no longer prefix is taken
    for taken in range(n, -1, -1):
        chance = later * (bounds[taken - 1] if taken else ONE)
        later -= chance
        reached = text + drafted.tokens[:taken]
        p = target(reached)
        _spread(
            law,
            drafted.tokens[:taken],
            chance,
            p if taken == n else residual(p, drafted.laws[taken], weights[taken]),
        )
    return law


def invariant(text: Text, drafted: Drafted, target: Model) -> Law:
    """The target's own draws are walked along, in chains and trees."""
    law: Law = {}
    open_: list[tuple[int, Text, Fraction]] = [(-1, (), ONE)]
    while open_:
        node, path, chance = open_.pop()
        row = target(text + path)
        children = {drafted.tokens[i]: i for i, parent in enumerate(drafted.parents) if parent == node}
        for token, p in enumerate(row):
            if not p:
                continue
            child = children.get(token)
            if child is None:
                law[(*path, token)] = law.get((*path, token), ZERO) + chance * p
            else:
                open_.append((child, (*path, token), chance * p))
    return law


def siblings(text: Text, drafted: Drafted, target: Model) -> Law:
    """One-hot siblings are tried in turn, each by its chance among what is left (EAGLE's rule for trees)."""
    law: Law = {}
    open_: list[tuple[int, Text, Fraction]] = [(-1, (), ONE)]
    while open_:
        node, path, chance = open_.pop()
        row = list(target(text + path))
        for i, parent in enumerate(drafted.parents):
            token = drafted.tokens[i]
            if parent == node and row[token]:
                open_.append((i, (*path, token), chance * row[token]))
                chance *= 1 - row[token]
                row[token] = ZERO
                left = sum(row, ZERO)
                row = [x / left for x in row] if left else row
        _spread(law, path, chance, row)
    return law


def residual(p: Row, q: Row, weight: Fraction) -> Row:
    """max(weight p - q, 0), normalised; p where nothing is left."""
    left = [max(weight * a - b, ZERO) for a, b in zip(p, q, strict=True)]
    total = sum(left, ZERO)
    return [x / total for x in left] if total else p


def _spread(law: Law, path: Text, chance: Fraction, row: Row) -> None:
    if chance:
        for token, p in enumerate(row):
            if p:
                law[(*path, token)] = law.get((*path, token), ZERO) + chance * p


# -- policies


def all_of(drafted: Drafted) -> int:
    return len(drafted.tokens)


def at_most(count: int) -> Policy:
    return lambda drafted: min(count, len(drafted.tokens))
