from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from bien.core.worker.redis_link import ask, explained, redis_client, redis_trouble
from tests.redis_process import RedisProcess, redis_process


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    with redis_process() as process:
        yield process


async def test_who_is_cancelled_at_a_command_ends(server: RedisProcess) -> None:
    """At whatever moment. Without `ask` most of these go on."""
    rng = random.Random(1)
    cancelled = 0
    for _ in range(200):
        client = redis_client(server.url, 1.0)

        async def work(client: object = client) -> None:
            try:
                await ask(client.ping())  # type: ignore[attr-defined]
            except redis_trouble():
                pass

        task = asyncio.ensure_future(work())
        for _ in range(rng.randrange(14)):
            await asyncio.sleep(0)
        if task.cancel():
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            cancelled += 1
        await client.aclose()
    assert cancelled > 100


async def test_a_timeout_around_a_command_is_one(server: RedisProcess) -> None:
    server.freeze()
    client = redis_client(server.url, 30.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await ask(client.ping())
    server.thaw()
    await client.aclose()


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("READONLY You can't write against a read only replica.", "it is a replica"),
        ("READONLY You can't write against a replica. script: abc, on @user_script:1.", "it is a replica"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "it is full"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "a namespace of its own"),
        ("MISCONF Redis is configured to save RDB snapshots, but", "cannot save to its disk"),
        ("NOREPLICAS Not enough good replicas to write.", "too few replicas"),
        ("NOPERM this user has no permissions", "refuses these credentials"),
    ],
)
@pytest.mark.parametrize("in_script", [False, True])
def test_errors_are_explained_wherever_a_server_says_them(said: str, advice: str, in_script: bool) -> None:
    """As the library reads them, and as servers before 7 put those of scripts."""
    from redis._parsers.base import BaseParser

    if in_script:
        said = f"ERR Error running script (call to f_0a1b): @user_script:3: @user_script: 3: -{said}"
    for text in {said, said.removeprefix("ERR ")}:
        assert advice in explained(BaseParser.parse_error(text))
