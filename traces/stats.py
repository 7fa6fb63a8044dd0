"""What a trace is like: counts, lengths, and the reuse that an infinite cache would find in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from bien.traces.model import Session, Stream, Turn
from bien.traces.prefix import PrefixTree


class TraceStats(msgspec.Struct):
    """Totals in tokens. `reused` is what the turns' prompts share with earlier prompts and outputs of
    their tenant and scope, token by token; `hit` the part of it in whole blocks short of the last token."""

    block_tokens: int
    sessions: int = 0
    turns: int = 0
    streams: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    reused: int = 0
    hit: int = 0
    longest: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit / self.input_tokens if self.input_tokens else 0.0


def turn_order(session: Session) -> Iterator[tuple[Stream, Turn]]:
    """The turns in an order that respects spawns and joins: a sub-agent runs right after its spawn."""
    children: dict[tuple[int | None, int | None], list[Stream]] = {}
    for stream in session.streams:
        children.setdefault((stream.parent, stream.spawned_after), []).append(stream)

    def below(stream: Stream) -> Iterator[tuple[Stream, Turn]]:
        for child in children.get((stream.id, None), ()):
            yield from below(child)
        for index, turn in enumerate(stream.turns):
            yield stream, turn
            for child in children.get((stream.id, index), ()):
                yield from below(child)

    for root in children.get((None, None), ()):
        yield from below(root)


def whole_blocks(shared: int, input_tokens: int, block_tokens: int) -> int:
    """How much of a shared prefix a cache of whole blocks can serve; the last token is always computed."""
    return min(shared, input_tokens - 1) // block_tokens * block_tokens


class Measure:
    """Adds sessions up one by one. A scope that is its session's own is forgotten with it."""

    def __init__(self, block_tokens: int) -> None:
        self.stats = TraceStats(block_tokens)
        self._trees: dict[tuple[str, str], PrefixTree] = {}

    def clone(self) -> Measure:
        """Another one that goes on from here by itself."""
        other = Measure(self.stats.block_tokens)
        other.stats = msgspec.structs.replace(self.stats)
        other._trees = {key: tree.clone() for key, tree in self._trees.items()}
        return other

    def add(self, session: Session) -> None:
        stats = self.stats
        key = (session.tenant, session.scope)
        tree = self._trees.get(key)
        if tree is None:
            tree = PrefixTree()
            if session.scope != session.id:
                self._trees[key] = tree
        stats.sessions += 1
        stats.streams += len(session.streams)
        stats.longest = max(stats.longest, session.longest)
        for _, turn in turn_order(session):
            shared = tree.match(turn.input)
            tree.insert(turn.input.join(turn.output))
            stats.turns += 1
            stats.input_tokens += turn.input_tokens
            stats.output_tokens += turn.output_tokens
            stats.reused += shared
            stats.hit += whole_blocks(shared, turn.input_tokens, stats.block_tokens)


def measure(sessions: Iterable[Session], block_tokens: int) -> TraceStats:
    """The statistics of all sessions, in trace order."""
    total = Measure(block_tokens)
    for session in sessions:
        total.add(session)
    return total.stats
