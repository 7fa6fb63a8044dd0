"""What several cases do: prompts that were absent before, that one engine alone has, or two."""

from __future__ import annotations

from typing import Any, NamedTuple

from bien.core.errors import BienError
from bien.replay.chaos.ask import Message, Reply
from bien.replay.chaos.case import NotApplicable
from bien.replay.chaos.engine import Served
from bien.replay.chaos.router import Router
from bien.replay.chaos.world import World

PLAIN = 12  # prompts
CHARACTERS = 2400  # of each, which are as many tokens: more than a router's soft terms should outweigh
# Share of tokens that must be found where a router has to choose by what it was told: soft terms may move one
# or two of twelve, and one that does not know finds half or a third.
DECISIVE = 0.8


class Spoiled(BienError):
    """A prompt was cached before anybody had sent it, or not at all after: then hits would say nothing."""


class Placed(NamedTuple):
    messages: list[Message]
    prompt: Served
    engine: int  # that computed it


async def warm(world: World, router: Router, count: int = 0, **fields: Any) -> list[Placed]:
    """Fresh prompts (0: as many as is usual), each sent once. Spoiled: one failed, or was cached before."""
    found = []
    prompts = world.prompts.several(count or PLAIN, CHARACTERS)
    for messages, reply in zip(prompts, await router.all(prompts, at_once=3, **fields), strict=True):
        absent(reply)
        words = messages[-1]["content"][:16]
        found.append(Placed(messages, router.engines[reply.engine].last(words), reply.engine))
    return found


def listening(router: Router) -> None:
    if not router.listened_to:
        raise NotApplicable("nobody listens to the engines' events")


def absent(reply: Reply) -> None:
    if not reply.ok:
        raise Spoiled(f"a fresh prompt was not answered: {reply.status} {reply.error or 'cut off'}")
    if reply.cached > reply.prompt / 10:
        raise Spoiled(f"of a fresh prompt {reply.cached} of {reply.prompt} tokens were cached")


async def elsewhere(world: World, router: Router, count: int = 0, **fields: Any) -> list[Placed]:
    """Fresh prompts, each held by one engine only, and not by the one that the router had sent it to.
    NotApplicable: who does not listen to events cannot know."""
    listening(router)
    found, engines = [], router.engines
    for messages, prompt, at in await warm(world, router, count, **fields):
        other = (at + 1) % len(engines)
        await engines[other].hold(prompt)
        await engines[at].drop(prompt)
        found.append(Placed(messages, prompt, other))
    await router.settle()
    return found


async def twins(world: World, router: Router, count: int = 0) -> list[Placed]:
    """Fresh prompts that the engines 0 and 1 hold, both, and no other one. NotApplicable: as `elsewhere`."""
    listening(router)
    found, engines = [], router.engines
    for messages, prompt, at in await warm(world, router, count):
        for engine in engines[:2]:
            await engine.hold(prompt)
        if at > 1:
            await engines[at].drop(prompt)
        found.append(Placed(messages, prompt, 1))
    await router.settle()
    return found


async def again(router: Router, placed: list[Placed], **fields: Any) -> list[Reply]:
    """Each once more, one after the other."""
    return [await router.ask(one.messages, **fields) for one in placed]


async def noise(world: World, at: int) -> None:
    """A sign of life: an engine tells of a prompt that nobody asks for."""
    ids = [16 + ord(letter) for letter in world.prompts.text(64)]
    await world.engines[at].hold(Served(ids, "", 0))
