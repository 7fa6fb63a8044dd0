"""The restart protocol: `pytest -m slow -s tests/replay/restart`."""

from __future__ import annotations

import asyncio
import json

import pytest

from bien.gateway.feed import IndexFeed
from bien.plugins.indexes.redis.index import RedisIndex
from bien.replay.bench.restart import is_blind, measure, parser
from tests.redis_process import require_redis


def test_what_is_blind() -> None:
    held = {"a": 1000, "b": 0}
    for predicted, found, worker, truth, known, blind in (
        (960, 960, "a", held, held, False),
        (0, 960, "a", held, {"a": 0, "b": 0}, True),
        (400, 960, "a", held, held, True),
        (480, 960, "a", held, held, False),
        (0, 0, "b", held, {"a": 0, "b": 0}, True),
        (0, 0, "b", held, {"a": 499, "b": 0}, True),
        (0, 0, "b", held, held, False),  # it knew, and chose to compute it again
        (0, 0, "b", {"a": 0, "b": 0}, {"a": 0, "b": 0}, False),
        (0, 0, "new", {"a": 0}, {"a": 0}, False),
    ):
        assert is_blind(predicted, found, worker, truth, known) == blind


@pytest.mark.slow
def test_hardly_a_placement_is_blind_whatever_is_restarted() -> None:
    require_redis()
    result = asyncio.run(measure(parser().parse_args([])))
    print(json.dumps(result, indent=1))
    assert result["placements"] >= 2000 and result["failed"] == 0
    assert result["blind_share"] <= 0.005
    assert result["stale"] <= 0.005 * result["placements"]
    for phase in result["phases"].values():
        assert phase["placements"] >= 400 and phase["reuse"] > 0.85


@pytest.mark.slow
def test_a_gateway_that_starts_in_the_middle_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes events as they come, and no start: the protocol notices."""
    require_redis()
    fetch = IndexFeed._fetch

    async def nothing(feed: IndexFeed, client: object, dp_rank: int, held: list[object]) -> None:
        if not isinstance(feed._index, RedisIndex):
            await fetch(feed, client, dp_rank, held)  # type: ignore[arg-type]

    async def never(index: RedisIndex, worker: str, dp_rank: int) -> bool:
        return False

    monkeypatch.setattr(IndexFeed, "_fetch", nothing)
    monkeypatch.setattr(RedisIndex, "restore", never)
    words = ["--requests", "400", "--workers", "3", "--sessions", "12", "--phases", "gateways"]
    result = asyncio.run(measure(parser().parse_args(words)))
    assert result["blind_share"] > 0.05
