"""Virtual time: exact, free, and honest about deadlocks."""

from __future__ import annotations

import asyncio

import pytest

from bien.core.clock import VirtualClock


def test_waits_cost_nothing_and_end_on_time() -> None:
    async def main() -> list[float]:
        clock = VirtualClock()
        seen = []
        # A century: asyncio itself waits a day at most, and would be asked 36,500 times.
        for seconds in (0.25, 86400.0, 3.2e9, 0.5):
            await clock.sleep(seconds)
            seen.append(clock.time())
        return seen

    assert VirtualClock.run(main()) == [0.25, 86400.25, 3.2e9 + 86400.25, 3.2e9 + 86400.75]


def test_timers_fire_in_order() -> None:
    async def main() -> list[str]:
        order: list[str] = []

        async def at(seconds: float, name: str) -> None:
            await VirtualClock().sleep(seconds)
            order.append(name)

        await asyncio.gather(at(200_000, "c"), at(5, "a"), at(100_000, "b"))
        return order

    assert VirtualClock.run(main()) == ["a", "b", "c"]


def test_a_deadlock_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="virtual time stands still"):
        VirtualClock.run(main())
