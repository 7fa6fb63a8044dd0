"""What a foreign server is asked for: prompts alone, and batches that decode together."""

from __future__ import annotations

import math

import msgspec

from bien.core.errors import UserError
from bien.replay.calibrate.probes import ANSWER, SHORTEST, TURNS, Batch, Reach, batches

CHUNK = 2048  # tokens of a prompt in one step that vLLM and SGLang allow at least, if nobody has set it
WINDOW = 24  # decode steps of a batch that are measured
ROUNDS = 3  # of everything, where the tokens allow: machines do not repeat themselves
REPEATS = 2  # of a prompt alone, in a round
LEAST = 128  # tokens of the longest prompt: fewer tell nothing of contexts
SHORT = 512  # tokens: longer ones cost more than their repeats tell
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


class RemotePlan(msgspec.Struct, frozen=True):
    lone: list[Lone]
    together: list[Together]


def remote_plan(reach: Reach, chunk: int, spare: int) -> RemotePlan:
    """`spare`: decode steps that pass while the server's metrics are read. UserError: too little room."""
    answer = _answer(Batch(reach.sessions, SHORTEST), 2, chunk, spare)
    longest = min(reach.context, reach.cache) - answer
    if longest < LEAST:
        raise UserError(
            f"a server with room for {reach.context} tokens of a sequence and {reach.cache} of all is too "
            f"small to calibrate with {reach.sessions} at a time; valid: {LEAST + answer} tokens or more"
        )
    lone = _lone(longest, chunk)
    while len(lone) > 4 and sum(p.cost for p in _repeated(lone)) > reach.tokens / 2:
        lone.pop()
    # Its own reserve for answers and turns is not needed.
    reserve = TURNS * (ANSWER + SHORTEST)
    room = Reach(reach.sessions, longest * 5 // 4 + reserve, reach.cache, reach.tokens // 2)
    planned = batches(room)
    cost = sum(p.cost for p in _repeated(lone)) + sum(b.sessions * b.prompt for b in planned)
    rounds = max(1, min(ROUNDS, reach.tokens // cost))
    together = []
    sizes = _doubling(2 * SHORTEST, min(longest, chunk - reach.sessions))
    for number, batch in enumerate(planned * rounds):
        new = tuple(sizes[(2 * number + i) % len(sizes)] for i in range(2)) if sizes else ()
        new = tuple(n for n in new if batch.sessions * (batch.prompt * 1.3 + answer) + n < reach.cache)
        together.append(Together(batch, new, _answer(batch, len(new), chunk, spare)))
    # A long context leaves less room for its answers.
    together = [t for t in together if t.batch.prompt * 1.3 + t.answer <= reach.context] or together[:1]
    return RemotePlan(_repeated(lone) * rounds, together)


def _lone(longest: int, chunk: int) -> list[Lone]:
    out = []
    for number, prompt in enumerate(_doubling(SHORTEST, longest)):
        sizes = [n for n in _doubling(SHORTEST, min(chunk, longest - prompt)) if prompt >= 128]
        out.append(Lone(prompt, _two(sizes, number)))
    return out


def _repeated(lone: list[Lone]) -> list[Lone]:
    return [*lone, *(p for p in lone if p.prompt <= SHORT for _ in range(REPEATS - 1))]


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
