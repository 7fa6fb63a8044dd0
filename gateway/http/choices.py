"""`Choices`: the generations behind one answer, and what they share of its prompt.

The prompt is computed once: the first choice runs alone until its first token is there, and the prompt's
blocks with it. Then the others are placed like any request, and find them in that worker's cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from bien.core.logprobs import TokenLogprobs
from bien.core.request import GenerateRequest, TokenIds
from bien.core.speculation.counts import DraftCounts
from bien.core.worker.messages import Output
from bien.core.worker.threads import in_thread
from bien.gateway.http.progress import Progress
from bien.gateway.http.scoring import Scoring
from bien.gateway.http.served import Served
from bien.gateway.protocols.ask import Ask, Usage
from bien.gateway.protocols.scores import Score, prompt_logprobs


@dataclass(slots=True)
class Preface:
    """What each choice begins with: the prompt, where its client wants it back."""

    text: str = ""
    scores: list[Score] | None = None


class Choices:
    def __init__(self, served: Served, ask: Ask, work: GenerateRequest) -> None:
        """`work`: the first choice."""
        self.prompt_logprobs: bytes | None = None  # as JSON, where asked for, once a choice has begun
        self._served = served
        self._ask = ask
        self._work = work
        self._progress: dict[int, Progress] = {}
        self._preface: Preface | None = None
        self._computed = asyncio.Event()  # the prompt
        self._ready = asyncio.Event()  # the preface

    async def run(self, one: Callable[[int], Awaitable[None]]) -> None:
        """`one(index)` for each choice; it calls `start`, and `began` with its first output. The first error
        ends them all, and is raised."""
        if self._ask.n == 1:
            return await one(0)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self._ask.n):
                    group.create_task(self._one(index, one))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _one(self, index: int, one: Callable[[int], Awaitable[None]]) -> None:
        if index:
            await self._computed.wait()
        await one(index)
        self._computed.set()

    def start(self, index: int) -> Progress:
        """A choice begins, or begins again."""
        ask, prompts = self._ask, self._served.prompts
        assert isinstance(self._work.prompt, TokenIds)
        scoring = None if ask.logprobs is None else Scoring(prompts.text.tokenizer)
        progress = Progress(
            prompts.output(ask, self._work.prompt),
            scoring,
            silent=ask.max_tokens == 0,
            wants_ids=ask.return_token_ids,
            reply=prompts.reply(ask, self._work.prompt),
            keeps_ids=ask.n == 1 and ask.notes.turn is not None,
        )
        self._progress[index] = progress
        return progress

    def request(self, index: int) -> GenerateRequest:
        """The others are asked for when the gateway has given the first one its seed."""
        if not index:
            return self._work
        sampling = msgspec.structs.replace(self._work.sampling, choice=index, prompt_logprobs=-1)
        id = f"{self._work.id}-{index}"
        return msgspec.structs.replace(self._work, id=id, sampling=sampling, predicted_cached_tokens=0)

    async def began(self, index: int, output: Output) -> Preface:
        """The first output of a choice is there. What it begins with."""
        if not index and self._preface is None:
            self._computed.set()
            self._preface = await self._make_preface(output)
            self._ready.set()
        await self._ready.wait()
        assert self._preface is not None
        self._progress[index].shift(len(self._preface.text))
        return self._preface

    async def _make_preface(self, output: Output) -> Preface:
        ask, work, made = self._ask, self._work, Preface()
        assert isinstance(work.prompt, TokenIds)
        if ask.echo:
            made.text = await self._served.prompts.echo(ask, work.prompt)
        found = output.prompt_logprobs
        if found is None and work.prompt_tokens == 1:
            found = TokenLogprobs()  # nothing comes before its only token
        if ask.scored is None or found is None:
            return made
        tokenizer = self._served.prompts.text.tokenizer

        def read(ids: list[int], found: TokenLogprobs) -> None:
            if ask.echo and ask.logprobs is not None:
                made.scores = Scoring(tokenizer).prompt(ids, found, ask.logprobs, made.text)
            if ask.prompt_logprobs is not None:
                scores = Scoring(tokenizer).prompt(ids, found, ask.prompt_logprobs)
                self.prompt_logprobs = prompt_logprobs(scores)

        await in_thread(read, work.prompt.ids().tolist(), found)
        return made

    def over(self) -> None:
        """All have ended. A conversation goes on from its one answer; from which of several is not known."""
        self._served.prompts.answered(self._ask, self._progress[0].answer if self._ask.n == 1 else b"")

    @property
    def usage(self) -> Usage:
        """So far. The prompt counts once."""
        every = self._progress.values()
        return Usage.of(
            self._work.prompt_tokens,
            sum(progress.tokens for progress in every),
            self._progress[0].cached,
            accepted=sum(progress.predicted.accepted for progress in every),
            reasoning=sum(progress.reasoning for progress in every),
            rejected=sum(progress.predicted.drafted - progress.predicted.accepted for progress in every),
        )

    @property
    def drafts(self) -> DraftCounts | None:
        """What became of those of all choices; None where one was cut at a stop string."""
        out = DraftCounts()
        for progress in self._progress.values():
            if progress.drafts is None:
                return None
            out.merge(progress.drafts)
        return out
