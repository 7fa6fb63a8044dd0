"""Of the suite of engines: answers, and what becomes of them in an upstream's trouble."""

from __future__ import annotations

import json
from typing import Any

from bien.core.errors import WorkerDiedError
from bien.core.request import TokenIds
from bien.core.worker.messages import Output
from bien.gateway.testing.engine_base import LONG, EngineTests
from bien.gateway.testing.engine_rig import EngineRig, until

REFUSALS = {400: "invalid_request", 429: "overloaded", 503: "overloaded", 500: "internal_error"}
GARBAGE = (b"data: {half an\n\n", b"data: 7\n\n", b'data: {"choices": 3}\n\n', b"<html>proxy error</html>")


def text_of(outputs: list[Output]) -> list[int]:
    """What an answer says: the stand-in's words are its token ids."""
    found: list[int] = []
    for output in outputs:
        found += TokenIds(output.tokens).ids().tolist() if output.tokens else map(int, output.text.split())
    return found


class AnswerTests(EngineTests):
    async def test_answers_come_whole(self) -> None:
        async with self.opened() as rig:
            rids = [rig.ask(range(100 * n, 100 * n + 20), output=n) for n in (1, 2, 7)]
            for n, rid in zip((1, 2, 7), rids, strict=True):
                got = await rig.answered(rid)
                first = 100 * n + 20
                assert text_of(got) == list(range(first, first + n)), (
                    f"the server wrote {n} tokens from {first} on, and {text_of(got)} were passed on"
                )
                assert sum(o.count for o in got) == n, f"{n} tokens count as {sum(o.count for o in got)}"
                finishes = [o.finish for o in got]
                assert finishes == [None] * (len(got) - 1) + ["length"], f"outputs end with {finishes}"

    async def test_tokens_are_passed_on_as_they_come(self) -> None:
        server = self.server()
        server.hold_at = 2
        async with self.opened(server) as rig:
            rid = rig.ask()
            await rig.begun(rid)
            assert rig.finish(rid) is None, "it ended before the server had written all"
            server.released.set()
            assert text_of(await rig.answered(rid)) == [120, 121, 122, 123, 124]

    async def test_a_stop_is_told_from_the_length(self) -> None:
        server = self.server()
        server.stop = (2, True)
        async with self.opened(server) as rig:
            assert (await rig.answered(rig.ask()))[-1].finish == "stop"

    async def test_parameters_reach_the_server(self) -> None:
        async with self.opened() as rig:
            await rig.answered(rig.ask(output=3, temperature=0.5, top_p=0.25, seed=9))
            body = rig.server.asked[-1]
            wanted = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "seed": 9}
            for name, value in wanted.items():
                assert body.get(name) == value, f"{name} is {value}; the server was told {body.get(name)!r}"

    async def test_cached_tokens_are_reported_once(self) -> None:
        async with self.opened() as rig:
            told = 0
            for cached in (8, 0, 16):
                rig.server.cached = cached
                got = await rig.answered(rig.ask())
                said = [o.cached for o in got if o.cached >= 0]
                assert said == [cached], f"the server says cached_tokens {cached}, the outputs {said}"
                told += cached
            await self._settled(rig)
            total = rig.mirror.stats[-1].cached_tokens
            assert total == told, f"{told} tokens were cached in all, and stats.cached_tokens is {total}"
            assert rig.mirror.stats[-1].output_tokens == 15, f"{rig.mirror.stats[-1]} after 15 tokens"

    async def test_what_is_not_told_is_not_made_up(self) -> None:
        """A server that says nothing of its cache is no server that found nothing."""
        server = self.server()
        server.report = False
        async with self.opened(server) as rig:
            got = await rig.answered(rig.ask())
            assert [o.cached for o in got] == [-1] * len(got), "cached is unknown: -1"

    async def test_an_abort_frees_the_upstream(self) -> None:
        server = self.slow_server()
        async with self.opened(server) as rig:
            rid = rig.ask(output=LONG)
            await rig.begun(rid)
            seen = len(rig.outputs(rid))
            rig.client.abort(rid)
            rig.client.abort(rid)
            rig.client.abort(12345)
            await until(lambda: server.gone == 1, "a request was aborted, and the server still computes it")
            await rig.answered(rig.ask())
            assert len(rig.outputs(rid)) == seen, "outputs follow an abort"
            await self._settled(rig)

    async def test_an_abort_before_the_first_token(self) -> None:
        async with self.opened() as rig:
            rid = rig.ask()
            rig.client.abort(rid)
            await rig.answered(rig.ask())
            assert not rig.outputs(rid), "outputs follow an abort"
            await self._settled(rig)

    async def test_a_rid_in_use_ends_both(self) -> None:
        server = self.slow_server()
        async with self.opened(server) as rig:
            rid = rig.ask(output=LONG)
            await rig.begun(rid)
            rig.client.submit(rid, rig.request())
            self._failed(await rig.answered(rid), "rid")
            await until(lambda: server.gone == 1, "the first of the two is still computed")

    async def test_a_prompt_beyond_the_context_is_refused(self) -> None:
        async with self.opened() as rig:
            most = rig.client.info.max_context
            got = await rig.answered(rig.ask(range(most), output=1))
            assert got[-1].error_code == "context_length_exceeded", f"it ended with {got[-1]}"
            assert str(most) in got[-1].error, f"{got[-1].error!r} does not say what the context holds"
            assert not rig.server.asked, "what cannot fit needs no server"

    async def test_refusals_are_passed_on(self) -> None:
        async with self.opened() as rig:
            for status, code in REFUSALS.items():
                rig.server.refuse = status, {"error": {"message": "because of the moon"}}
                got = await rig.answered(rig.ask())
                self._failed(got, "because of the moon")
                assert got[-1].error_code == code, f"status {status} is {code}, not {got[-1].error_code}"
            rig.server.refuse = None
            assert (await rig.answered(rig.ask()))[-1].finish == "length", "a refusal is no death"

    async def test_an_error_in_the_stream_is_passed_on(self) -> None:
        said = json.dumps({"error": {"message": "out of the moon", "code": 500}})
        async with self.opened() as rig:
            for after in (0, 2):
                rig.server.says_at = after, f"data: {said}\n\ndata: [DONE]\n\n".encode()
                got = await rig.answered(rig.ask())
                self._failed(got, "out of the moon")
                assert len(text_of(got)) == after
                await self._settled(rig)

    async def test_an_answer_that_is_cut_is_an_error(self) -> None:
        server = self.server()
        server.cut_after = 2
        async with self.opened(server) as rig:
            got = await rig.answered(rig.ask())
            self._failed(got, "")
            assert got[-1].error_code == WorkerDiedError.code, f"a cut answer ended with {got[-1]}"
            assert text_of(got) == [120, 121], f"two tokens came, and {text_of(got)} were passed on"
            await self._settled(rig)

    async def test_an_end_without_a_finish_is_an_error(self) -> None:
        async with self.opened() as rig:
            for said in (b"data: [DONE]\n\n", b""):
                rig.server.says_at = 2, said
                self._failed(await rig.answered(rig.ask()), "")

    async def test_garbage_is_an_error(self) -> None:
        async with self.opened() as rig:
            for said in GARBAGE:
                rig.server.says_at = 1, said
                got = await rig.answered(rig.ask())
                self._failed(got, "")
                assert text_of(got) == [120]
                rig.server.says_at = None
                assert (await rig.answered(rig.ask()))[-1].finish == "length", "one bad answer is no death"

    async def test_an_answer_that_hangs_ends(self) -> None:
        """The server is well by its own word, and writes no more."""
        server = self.server()
        server.hold_at = 2
        async with self.opened(server) as rig:
            got = await rig.answered(rig.ask())
            self._failed(got, "")
            assert text_of(got) == [120, 121]
            await until(lambda: server.gone == 1, "nobody reads an answer that is still computed")

    async def _settled(self, rig: EngineRig) -> None:
        """Reports say in time that nothing runs."""
        await until(
            lambda: rig.mirror.stats and rig.mirror.stats[-1].running == rig.mirror.stats[-1].waiting == 0,
            f"nothing runs there, and the reports say {rig.mirror.stats[-1:]}",
        )

    def _failed(self, got: list[Output], text: str) -> None:
        last: Any = got[-1]
        assert last.finish == "error", f"it failed upstream, and ended as {last.finish!r}"
        assert last.error and last.error_code, f"an error says what is wrong, and has a code: {last}"
        assert text in last.error, f"the error is {last.error!r}; the reason was {text!r}"
        assert [o.finish for o in got[:-1]] == [None] * (len(got) - 1)
