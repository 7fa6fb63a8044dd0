"""What every `WorkerClient` must do. Subclass `ClientContract` as `Test...` and say how to open one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from bien.core.request import GenerateRequest, Prompt, SamplingParams, TokenIds
from bien.core.worker.client import WorkerClient
from bien.core.worker.messages import Output, StepFrame

SECONDS = 20.0  # of the loop's clock, virtual or real, until a wait counts as failed


@dataclass
class Recorder:
    """A listener that remembers."""

    frames: list[StepFrame] = field(default_factory=list)
    outputs: dict[int, list[Output]] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_frame(self, worker: WorkerClient, frame: StepFrame) -> None:
        assert not self.deaths, "a frame after the death"
        self.frames.append(frame)
        for output in frame.outputs:
            self.outputs.setdefault(output.rid, []).append(output)
        self._changed.set()

    def on_death(self, worker: WorkerClient, reason: str) -> None:
        assert not worker.alive
        self.deaths.append(reason)
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def finished(self, *rids: int) -> None:
        await self.until(lambda: all(self.finish(rid) for rid in rids))

    def finish(self, rid: int) -> str | None:
        got = self.outputs.get(rid)
        return got[-1].finish if got else None

    def tokens(self, rid: int) -> int:
        return sum(o.count for o in self.outputs.get(rid, []))


@dataclass
class Opened:
    """A client with a recorder attached, and a way to kill its worker."""

    client: WorkerClient
    recorder: Recorder
    kill: Callable[[], Awaitable[None]]


class ClientContract:
    def open(self) -> AbstractAsyncContextManager[Opened]:
        """A fresh worker with at least 4 slots, and a client of it; both gone at the end."""
        raise NotImplementedError

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Virtual-time clients run on their own loop."""
        asyncio.run(main)

    def prompt(self, tokens: int) -> Prompt:
        return TokenIds.of(range(tokens))

    def request(self, prompt: int = 20, output: int = 5, session: str = "") -> GenerateRequest:
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        return GenerateRequest("r", self.prompt(prompt), sampling, session=session)

    def test_submit_stream_finish(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                assert o.client.alive
                assert o.client.info.id
                assert o.client.info.generation
                o.client.submit(1, self.request(output=5))
                o.client.submit(2, self.request(output=7))
                await o.recorder.finished(1, 2)
                for rid, tokens in ((1, 5), (2, 7)):
                    got = o.recorder.outputs[rid]
                    assert o.recorder.tokens(rid) == tokens
                    assert [x.finish for x in got] == [None] * (len(got) - 1) + ["length"]
                    assert [x.cached >= 0 for x in got] == [True] + [False] * (len(got) - 1)
                await o.recorder.until(lambda: _stats(o).running == 0)

        self.run(main())

    def test_ids_of_requests_need_not_differ(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                request = self.request()
                for rid in (1, 2, 3):
                    o.client.submit(rid, request)
                await o.recorder.finished(1, 2, 3)
                assert {o.recorder.finish(rid) for rid in (1, 2, 3)} == {"length"}
                assert request.id == "r", "the gateway's request is not written to"

        self.run(main())

    def test_abort_stops_outputs_and_frees_the_slot(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                o.client.submit(1, self.request(output=3000, session="slow"))
                o.client.submit(2, self.request(output=3000, session="slow"))
                await o.recorder.until(lambda: 1 in o.recorder.outputs)
                seen = len(o.recorder.outputs[1])
                o.client.abort(1)
                o.client.abort(1)
                o.client.abort(77)
                o.client.submit(3, self.request())
                await o.recorder.finished(3)
                assert len(o.recorder.outputs[1]) == seen
                assert o.recorder.finish(1) is None
                o.client.abort(2)
                await o.recorder.until(lambda: _stats(o).running == _stats(o).waiting == 0)

        self.run(main())

    def test_abort_at_once(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                o.client.submit(1, self.request())
                o.client.abort(1)
                o.client.submit(2, self.request())
                await o.recorder.finished(2)
                assert 1 not in o.recorder.outputs

        self.run(main())

    def test_duplicate_rid_ends_both(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                o.client.submit(1, self.request(output=3000, session="slow"))
                o.client.submit(1, self.request(output=3000, session="slow"))
                await o.recorder.finished(1)
                last = o.recorder.outputs[1][-1]
                assert (last.finish, last.error_code) == ("error", "invalid_request")
                assert "rid 1 is in use" in last.error
                count = len(o.recorder.outputs[1])
                o.client.submit(2, self.request())
                await o.recorder.finished(2)
                assert len(o.recorder.outputs[1]) == count
                await o.recorder.until(lambda: _stats(o).running == _stats(o).waiting == 0)

        self.run(main())

    def test_impossible_request_gets_an_error_output(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                o.client.submit(1, self.request(prompt=o.client.info.max_context + 1))
                await o.recorder.finished(1)
                [output] = o.recorder.outputs[1]
                assert (output.finish, output.count) == ("error", 0)
                assert output.error_code == "context_length_exceeded"
                assert str(o.client.info.max_context) in output.error
                o.client.submit(1, self.request())  # the rid is free again
                await o.recorder.until(lambda: o.recorder.finish(1) == "length")

        self.run(main())

    def test_snapshot_equals_the_events(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                o.client.submit(1, self.request(prompt=64, output=20))
                await o.recorder.finished(1)
                snapshot = await o.client.snapshot()
                batches = [f.batch for f in o.recorder.frames if f.batch is not None]
                assert batches, "a finished request leaves blocks behind"
                assert [b.seq for b in batches] == list(range(batches[0].seq, batches[0].seq + len(batches)))
                assert snapshot.generation == batches[0].generation == o.client.info.generation
                assert snapshot.seq == batches[-1].seq
                stored = {h for b in batches for e in b.events for h in _hashes(e.group, e.hashes)}
                assert stored == {h for e in snapshot.events for h in _hashes(e.group, e.hashes)}

        self.run(main())

    def test_close(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                o.client.submit(1, self.request(output=3000, session="slow"))
                await o.client.close()
                frames = len(o.recorder.frames)
                self._check_deaf(o)
                await o.client.close()
                await o.kill()
                assert not o.recorder.deaths, "whoever closes knows it"
                assert len(o.recorder.frames) == frames

        self.run(main())

    def test_death(self) -> None:
        async def main() -> None:
            async with self.open() as o:
                o.client.submit(1, self.request(output=3000, session="slow"))
                await o.recorder.until(lambda: 1 in o.recorder.outputs)
                await o.kill()
                await o.recorder.until(lambda: o.recorder.deaths)
                self._check_deaf(o)
                await o.client.close()
                assert len(o.recorder.deaths) == 1
                assert o.recorder.deaths[0]
                assert 9 not in o.recorder.outputs

        self.run(main())

    def _check_deaf(self, o: Opened) -> None:
        assert not o.client.alive
        o.client.submit(9, self.request())
        o.client.abort(1)
        o.client.catch_up()


def _stats(o: Opened) -> Any:
    return next(f.stats for f in reversed(o.recorder.frames) if f.stats is not None)


def _hashes(group: int, packed: bytes) -> list[tuple[int, bytes]]:
    return [(group, packed[i : i + 16]) for i in range(0, len(packed), 16)]
