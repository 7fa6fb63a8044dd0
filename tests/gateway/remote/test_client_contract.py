"""`RemoteClient` keeps the contract of every `WorkerClient`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from bien.core.kv.hashing import extend_chain, tenant_key
from bien.core.providers import Context
from bien.core.request import GenerateRequest
from bien.gateway.remote.engine import RemoteEngine, endpoints
from bien.gateway.testing.stand_in import StandIn
from bien.plugins.engines.vllm import VllmDialect
from tests.core.worker.client_contract import ClientContract, Opened, Recorder

KEY = tenant_key("")


class TestRemoteClient(ClientContract):
    @asynccontextmanager
    async def open(self) -> AsyncIterator[Opened]:
        server = StandIn(context=4000)
        server.pace = 0.002
        await server.start()
        ctx = Context(pool="r", model="m", block_tokens=16, hash_key=KEY)
        engine = RemoteEngine(endpoints(ctx, [server.url], poll_seconds=0.05), VllmDialect(), ctx)
        client = await engine.connect("r-0")
        recorder = Recorder()
        client.attach(recorder)
        try:
            yield Opened(client, recorder, server.close)
        finally:
            await client.close()
            await server.close()

    def request(self, prompt: int = 20, output: int = 5, session: str = "") -> GenerateRequest:
        made = super().request(prompt, output, session)
        hashes = extend_chain(KEY, b"", made.prompt, 16, prompt)
        return msgspec.structs.replace(made, hashes=hashes, hash_key=KEY)

    def test_submit_stream_finish(self) -> None:
        """As every other one's, but for `cached`: such servers say it at the end."""

        async def main() -> None:
            async with self.open() as o:
                o.client.submit(1, self.request(output=5))
                o.client.submit(2, self.request(output=7))
                await o.recorder.finished(1, 2)
                for rid, tokens in ((1, 5), (2, 7)):
                    got = o.recorder.outputs[rid]
                    assert o.recorder.tokens(rid) == tokens
                    assert [x.finish for x in got] == [None] * (len(got) - 1) + ["length"]
                    assert [x.cached >= 0 for x in got] == [False] * (len(got) - 1) + [True]

        asyncio.run(main())
