"""Of the suite of engines: how workers come, live, and go."""

from __future__ import annotations

import asyncio

from bien.core.errors import ResourceError, WorkerDiedError
from bien.gateway.testing.engine_base import LONG, EngineTests
from bien.gateway.testing.engine_rig import BLOCK, EngineRig, until


class LifeTests(EngineTests):
    async def test_workers_say_what_they_are(self) -> None:
        async with self.opened() as rig:
            info = rig.client.info
            assert info.id == rig.engine.ids[0] and info.id.startswith("suite"), (
                f"worker {info.id!r} of pool 'suite'"
            )
            assert (info.block_tokens, info.model) == (BLOCK, "a-model"), f"{info} is not as ctx says"
            assert info.max_context == 1000, f"the server's context is 1000, not {info.max_context}"
            assert info.generation and rig.client.alive

    async def test_who_is_not_there_may_come_later(self) -> None:
        async with self.opened() as rig:
            port = rig.server.port
            await rig.leave()
            await rig.server.close()
            try:
                await rig.engine.connect(rig.engine.ids[0])
            except ResourceError:
                pass
            else:
                raise AssertionError("nobody listens there, and it connects; valid: ResourceError")
            await rig.server.start(port)
            await rig.connect()
            await rig.answered(rig.ask())

    async def test_a_worker_that_goes_is_dead(self) -> None:
        server = self.server()
        server.hold_at = 1
        async with self.opened(server) as rig:
            rid = rig.ask()
            await rig.begun(rid)
            await server.close()
            await self._dead(rig)
            assert rig.finish(rid) in (None, "error"), "its answer has not come to an end"

    async def test_a_worker_that_is_not_healthy_is_dead(self) -> None:
        async with self.opened() as rig:
            rig.server.healthy = False
            await self._dead(rig)

    async def test_a_worker_that_hangs_is_dead(self) -> None:
        """Connections are taken, and nothing is answered."""
        server = self.server()
        server.hold_at = 0
        async with self.opened(server) as rig:
            rig.ask()
            server.hung = True
            await self._dead(rig)

    async def test_one_bad_moment_is_no_death(self) -> None:
        async with self.opened() as rig:
            rig.server.refuse = 500, "a bad moment"
            await rig.answered(rig.ask())
            rig.server.refuse = None
            rig.server.cut_after, rig.server.cuts = 0, 1
            await rig.answered(rig.ask())
            assert (await rig.answered(rig.ask()))[-1].finish == "length"
            assert not rig.mirror.deaths and rig.client.alive

    async def test_another_life_is_another_generation(self) -> None:
        async with self.opened() as rig:
            before, port = rig.client.info.generation, rig.server.port
            await rig.server.close()
            await self._dead(rig)
            await rig.leave()
            await rig.server.start(port)
            await rig.connect()
            after = rig.client.info.generation
            assert after != before, f"generation {after!r} in both lives: what the first one had would count"
            got = await rig.client.snapshot()
            assert got.generation == after, f"a snapshot of generation {got.generation!r} in {after!r}"
            assert not got.events, "an engine that has just come has nothing cached that anybody knows of"

    async def test_work_under_way_comes_to_its_end(self) -> None:
        """A gateway that drains sends nothing more, and waits."""
        server = self.server()
        server.hold_at = 2
        async with self.opened(server) as rig:
            rids = [rig.ask() for _ in range(4)]
            for rid in rids:
                await rig.begun(rid)
            await until(
                lambda: rig.mirror.stats and rig.mirror.stats[-1].running == 4,
                "four answers are being written, and no report says so",
            )
            server.released.set()
            for rid in rids:
                assert (await rig.answered(rid))[-1].finish == "length"
            last = rig.mirror.stats
            await until(lambda: last[-1].running == last[-1].waiting == 0, "all has ended; a report says not")

    async def test_closing_leaves_nothing_behind(self) -> None:
        server = self.slow_server()
        before = asyncio.all_tasks()
        async with self.opened(server) as rig:
            of_others = asyncio.all_tasks()
            await rig.begun(rig.ask(output=LONG))
            await rig.leave()
            await rig.leave()
            await until(lambda: server.gone == 1, "its client is closed, and the server still computes")
            assert not rig.client.alive and not rig.mirror.deaths, "whoever closes knows it"
            rig.client.submit(99, rig.request())
            rig.client.abort(99)
            rig.client.catch_up()
            try:
                await rig.client.snapshot()
            except WorkerDiedError:
                pass
            assert not rig.outputs(99), "a closed client answers"
        left = [task for task in asyncio.all_tasks() - before - of_others if not task.done()]
        assert not left, f"tasks are left: {', '.join(task.get_name() for task in left)}"

    async def _dead(self, rig: EngineRig) -> None:
        await until(
            lambda: rig.mirror.deaths, "its server is gone or ill, and the worker is not said to be dead"
        )
        assert len(rig.mirror.deaths) == 1 and rig.mirror.deaths[0], f"deaths: {rig.mirror.deaths}"
        assert not rig.client.alive
        try:
            await rig.client.snapshot()
        except WorkerDiedError:
            pass
        else:
            raise AssertionError("a dead worker gives a snapshot; valid: WorkerDiedError")
        rid = rig.ask()
        rig.client.abort(rid)
        assert not rig.outputs(rid), "a dead worker answers"
