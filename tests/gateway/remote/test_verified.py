"""What the verifier and salts need of a remote engine."""

from __future__ import annotations

import msgspec

from bien.core.kv.hashing import tenant_key
from bien.gateway.remote.dialect import salt_of
from bien.plugins.engines.vllm import VllmDialect
from tests.gateway.remote.test_client import opened, request, until


async def test_the_engine_s_own_count_of_the_prompt_comes_with_the_last_output(stand_in):
    server = stand_in()
    server.cached = 8
    async with opened(server) as (client, recorder):
        client.submit(1, request())
        await until(lambda: recorder.over(1))
    assert [o.prompt_tokens for o in recorder.outputs[1]] == [-1, -1, -1, -1, 20]


async def test_a_salt_keeps_requests_without_a_tenant_apart_in_the_engine(stand_in):
    server = stand_in()
    key = tenant_key("", salt="mine")
    async with opened(server, VllmDialect(), salt=True) as (client, recorder):
        client.submit(1, msgspec.structs.replace(request(), salt="mine", hash_key=key))
        client.submit(2, request())
        await until(lambda: recorder.over(1) and recorder.over(2))
    assert sorted(body.get("cache_salt", "") for body in server.asked) == ["", salt_of(key)]
