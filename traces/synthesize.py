"""Makes agentic sessions: a shared system prompt, growing prompts, tools, sub-agents.

`python -m bien.traces.synthesize PATH` writes the sample that ships with bien, byte for byte.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bien.core.request import BlockRuns
from bien.traces.model import Fidelity, Session, Stream, TraceMeta, Turn
from bien.traces.native import write_native

_IDS_PER_SESSION = 1 << 32


class SynthesisParameters(msgspec.Struct, frozen=True):
    """Ranges are uniform and inclusive, in tokens and seconds."""

    sessions: int = 5
    seed: int = 7
    system_tokens: int = 448  # shared by all sessions
    agent_system_tokens: int = 192  # leading part of it that sub-agents share too
    task_tokens: tuple[int, int] = (160, 420)  # first user message
    turns: tuple[int, int] = (6, 8)
    result_tokens: tuple[int, int] = (40, 260)  # tool result or user message between turns
    output_tokens: tuple[int, int] = (8, 40)
    gap_seconds: tuple[float, float] = (0.0, 1.5)
    think_share: float = 0.15  # of turns that follow a user's message, not a tool
    agent_every: int = 2  # every n-th session has sub-agents
    agents: tuple[int, int] = (1, 2)  # spawned together
    agent_turns: tuple[int, int] = (2, 3)


class _Ids:
    """Hands out virtual ids of one session; the system prompt has the ids from 0."""

    def __init__(self, session: int) -> None:
        self._next = (session + 1) * _IDS_PER_SESSION

    def take(self, n: int) -> BlockRuns:
        self._next += n
        return BlockRuns.of([(self._next - n, n)])


def synthesize(parameters: SynthesisParameters) -> Iterator[Session]:
    """The sessions, one by one; a seed always gives the same ones."""
    rng = random.Random(parameters.seed)
    for number in range(parameters.sessions):
        yield _session(number, parameters, rng)


def sample_meta() -> TraceMeta:
    return TraceMeta(
        "synthetic", 16, "bien.traces.synthesize", Fidelity({"input": "exact", "output": "exact"})
    )


def write_sample(path: Path) -> None:
    """Write the shipped sample."""
    write_native(path, sample_meta(), synthesize(SynthesisParameters()))


def _session(number: int, p: SynthesisParameters, rng: random.Random) -> Session:
    ids = _Ids(number)
    opening = BlockRuns.of([(0, p.system_tokens)]).join(ids.take(rng.randint(*p.task_tokens)))
    root = Stream(0, _turns(opening, rng.randint(*p.turns), "start", ids, p, rng))
    streams = [root]
    if number % p.agent_every == p.agent_every - 1 or number == 0:
        after = rng.randint(0, max(0, len(root.turns) - 3))
        for _ in range(rng.randint(*p.agents)):
            streams.append(_agent(len(streams), after, ids, p, rng))
        root.turns[after + 1].joins = tuple(s.id for s in streams[1:])
        root.turns[after + 1].gap_kind = "tool"
    return Session(f"synthetic-{number}", streams, scope="synthetic", provenance=f"seed {p.seed}")


def _agent(id: int, after: int, ids: _Ids, p: SynthesisParameters, rng: random.Random) -> Stream:
    opening = BlockRuns.of([(0, p.agent_system_tokens)]).join(ids.take(rng.randint(*p.task_tokens)))
    turns = _turns(opening, rng.randint(*p.agent_turns), "spawn", ids, p, rng)
    return Stream(id, turns, parent=0, spawned_after=after, joined_before=after + 1, label="explore")


def _turns(
    prompt: BlockRuns, count: int, first: str, ids: _Ids, p: SynthesisParameters, rng: random.Random
) -> list[Turn]:
    turns: list[Turn] = []
    for k in range(count):
        output = ids.take(rng.randint(*p.output_tokens))
        turn = Turn(prompt, output, derived=len(output) if k + 1 < count else 0)
        if k:
            turn.gap = round(rng.uniform(*p.gap_seconds), 3)
            turn.gap_kind = "think" if rng.random() < p.think_share else "tool"
        else:
            turn.gap_kind = "start" if first == "start" else "spawn"
        turn.stop = "tool_use" if k + 1 < count else "end_turn"
        turns.append(turn)
        prompt = prompt.join(output).join(ids.take(rng.randint(*p.result_tokens)))
    return turns


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bien.traces.synthesize PATH")
    write_sample(Path(sys.argv[1]))
