"""What a foreign server is asked for: prompts alone, and batches that decode together."""

from __future__ import annotations

import math

import msgspec

from bien.core.errors import UserError
from bien.replay.calibrate.probes import ANSWER, SHORTEST, TURNS, Batch, Reach, batches

CHUNK = 2048  # tokens of a prompt in one step that vLLM and SGLang allow at least, if nobody has set it
WINDOW = 24  # decode steps of a batch that are measured
ROUNDS = (2, 4)  # of everything, as the tokens allow: machines do not repeat themselves
LEAST = 128  # tokens of the longest prompt: fewer tell nothing of contexts
_FIRST = 8  # steps in which a batch comes together, beside those of its prompts
_NEWCOMER = 8  # steps around one prompt that comes in between


class Lone(msgspec.Struct, frozen=True):
    """A prompt that runs alone, then more on top of it, each time something else."""

    prompt: int
    more: tuple[int, ...]

    @property
    def cost(self) -> int:
        return self.prompt + sum(self.more)


class Together(msgspec.Struct, frozen=True):
    """A batch; while its sequences decode, prompts of so many tokens come one after the other."""

    batch: Batch
    newcomers: tuple[int, ...]
    answer: int  # tokens of each sequence of the batch

    @property
    def cost(self) -> int:
        return self.batch.sessions * self.batch.prompt + sum(self.newcomers)


class RemotePlan(msgspec.Struct, frozen=True):
    """`rounds`: how often all of it is run."""

    lone: list[Lone]
    together: list[Together]
    rounds: int


def remote_plan(reach: Reach, chunk: int, spare: int) -> RemotePlan:
    """`spare`: decode steps that pass while the server's metrics are read. UserError: too little room."""
    answer = _answer(Batch(reach.sessions, SHORTEST), 2, chunk, spare)
    longest = min(reach.context, reach.cache) - answer
    if longest < LEAST:
        raise UserError(
            f"a server with room for {reach.context} tokens of a sequence and {reach.cache} of all is too "
            f"small to calibrate with {reach.sessions} at a time; valid: {LEAST + answer} tokens or more"
        )
    largest = min(chunk, max(LEAST, reach.tokens // 16))  # of what comes on top of others, or beside them
    lone = _lone(longest, largest)
    least, most = ROUNDS
    while len(lone) > 4 and sum(p.cost for p in lone) > reach.tokens / 2 / least:
        lone.pop()
    # Its own reserve for answers and turns is not needed.
    reserve = TURNS * (ANSWER + SHORTEST)
    room = Reach(reach.sessions, longest * 5 // 4 + reserve, reach.cache, reach.tokens // 2 // least)
    together = []
    sizes = _doubling(2 * SHORTEST, min(longest, largest, chunk - reach.sessions))
    for number, batch in enumerate(batches(room, every=False)):
        new = tuple(sizes[(2 * number + i) % len(sizes)] for i in range(2)) if sizes else ()
        new = tuple(n for n in new if batch.sessions * (batch.prompt * 1.3 + answer) + n < reach.cache)
        together.append(Together(batch, new, _answer(batch, len(new), chunk, spare)))
    # A long context leaves less room for its answers.
    together = [t for t in together if t.batch.prompt * 1.3 + t.answer <= reach.context]
    cost = sum(p.cost for p in lone) + sum(t.cost for t in together)
    rounds = max(least, min(most, reach.tokens // cost))
    return RemotePlan(lone, together, rounds)


def _lone(longest: int, largest: int) -> list[Lone]:
    out = []
    for number, prompt in enumerate(_doubling(SHORTEST, longest)):
        sizes = [n for n in _doubling(SHORTEST, min(largest, longest - prompt)) if prompt >= 128]
        out.append(Lone(prompt, _two(sizes, number)))
    return out


def _two(sizes: list[int], number: int) -> tuple[int, ...]:
    """A small one and a large one, not the same of every prompt."""
    if not sizes:
        return ()
    return tuple(sorted({sizes[number % len(sizes)], sizes[max(-len(sizes), -1 - number % 2)]}))


def _doubling(low: int, high: int) -> list[int]:
    out = [low] if low <= high else []
    while out and out[-1] < high:
        out.append(min(high, 2 * out[-1]))
    return out


def _answer(batch: Batch, newcomers: int, chunk: int, spare: int) -> int:
    coming = math.ceil(1.3 * batch.sessions * batch.prompt / chunk) + batch.sessions + _FIRST
    return coming + WINDOW + 2 * spare + newcomers * _NEWCOMER
