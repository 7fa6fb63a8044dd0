"""`RemoteClient` against a stand-in server, alone and behind a gateway."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from bien.core.clock import WallClock
from bien.core.deployment import GatewaySpec
from bien.core.errors import BienError, ResourceError, UserError, WorkerDiedError
from bien.core.kv.hashing import extend_chain, tenant_key
from bien.core.providers import Context
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.gateway.core import Gateway
from bien.gateway.remote.dialect import Dialect, salt_of
from bien.gateway.remote.engine import RemoteEngine, endpoints
from bien.gateway.remote.fleet import RemoteFleet
from bien.gateway.routing import Decision, cached_tokens
from bien.plugins.engines.sglang import SglangDialect
from bien.plugins.engines.vllm import VllmDialect
from bien.plugins.indexes.memory import MemoryIndex

CTX = Context(pool="r", model="m", block_tokens=4, hash_key=tenant_key(""))


def request(prompt=range(100, 120), output=5, tenant="", **sampling):
    tokens = TokenIds.of(prompt)
    key = tenant_key(tenant)
    return GenerateRequest(
        "q",
        tokens,
        SamplingParams(max_tokens=output, **({"temperature": 0.0} | sampling)),
        tenant=tenant,
        hashes=extend_chain(key, b"", tokens, 4, len(tokens)),
        hash_key=key,
    )


class Recorder:
    def __init__(self):
        self.outputs, self.frames, self.deaths = {}, [], []

    def on_frame(self, worker, frame):
        self.frames.append(frame)
        for output in frame.outputs:
            self.outputs.setdefault(output.rid, []).append(output)

    def on_death(self, worker, reason):
        self.deaths.append(reason)

    def over(self, rid):
        return self.outputs.get(rid) and self.outputs[rid][-1].finish

    def tokens(self, rid):
        return [t for o in self.outputs[rid] for t in TokenIds(o.tokens).ids()]

    @property
    def stored(self):
        return [e for f in self.frames if f.batch for e in f.batch.events]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def opened(server, dialect=None, **fields):
    """A client of it, with a recorder."""
    await server.start()
    fields = {"poll_seconds": 0.02} | fields
    engine = RemoteEngine(endpoints(CTX, [server.url], **fields), dialect or VllmDialect(), CTX)
    client = await engine.connect("r-0")
    recorder = Recorder()
    client.attach(recorder)
    try:
        yield client, recorder
    finally:
        await client.close()
        await server.close()


async def test_tokens_usage_and_parameters(stand_in):
    server = stand_in()
    server.cached = 8
    async with opened(server) as (client, recorder):
        assert client.info.max_context == 1000 and client.info.block_tokens == 4
        work = request(temperature=0.7, seed=5, top_k=9, logit_bias=((3, 1.5),), stop_token_ids=(7,))
        client.submit(1, work)
        client.submit(2, request(output=3))
        await until(lambda: recorder.over(1) and recorder.over(2))
        assert recorder.tokens(1) == [120, 121, 122, 123, 124] and recorder.over(1) == "length"
        assert [o.cached for o in recorder.outputs[1]] == [-1, -1, -1, -1, 8]
        assert sum(o.count for o in recorder.outputs[2]) == 3
        await until(lambda: recorder.frames[-1].stats)
        assert recorder.frames[-1].stats.running == recorder.frames[-1].stats.waiting == 0
        assert recorder.frames[-1].stats.output_tokens == 8
    body = next(b for b in server.asked if b["max_tokens"] == 5)
    assert body["prompt"] == list(range(100, 120)) and body["model"] == "a-model"
    assert (body["seed"], body["top_k"], body["logit_bias"], body["stop_token_ids"]) == (
        5,
        9,
        {"3": 1.5},
        [7],
    )
    assert body["return_token_ids"] and body["stream_options"] == {"include_usage": True}
    assert "cache_salt" not in body and "min_p" not in body


async def test_answers_of_one_seed_differ(stand_in):
    server = stand_in()
    async with opened(server) as (client, recorder):
        for choice in range(3):
            client.submit(choice, request(output=1, temperature=1.0, seed=5, choice=choice))
        await until(lambda: all(recorder.over(n) for n in range(3)))
    assert len({body["seed"] for body in server.asked}) == 3


async def test_text_is_passed_on_where_there_are_no_ids(stand_in):
    async with opened(stand_in(ids=False), Dialect()) as (client, recorder):
        client.submit(1, request())
        await until(lambda: recorder.over(1))
        got = recorder.outputs[1]
        assert "".join(o.text for o in got) == " 120 121 122 123 124"
        assert got[0].count == 1 and sum(o.count for o in got) == 5
        assert not any(o.tokens for o in got)


@pytest.mark.parametrize("shows", [False, True])
async def test_the_stop_token_is_the_last_one(stand_in, shows):
    server = stand_in()
    server.stop = (2, shows)
    async with opened(server) as (client, recorder):
        client.submit(1, request())
        await until(lambda: recorder.over(1))
        assert recorder.over(1) == "stop" and recorder.tokens(1) == [120, 121, 122, 2]


async def test_abort_closes_the_connection(stand_in):
    server = stand_in()
    server.pace = 0.02
    async with opened(server) as (client, recorder):
        client.submit(1, request(output=400))
        await until(lambda: 1 in recorder.outputs)
        client.abort(1)
        client.abort(1)
        client.abort(9)
        seen = len(recorder.outputs[1])
        await until(lambda: server.gone == 1)
        assert len(recorder.outputs[1]) == seen
        client.submit(2, request(output=400))
        client.submit(2, request(output=400))
        await until(lambda: recorder.over(2))
        assert "rid 2 is in use" in recorder.outputs[2][-1].error
        client.submit(2, request(output=1))
        await until(lambda: recorder.over(2) == "length")


@pytest.mark.parametrize(
    ("status", "said", "code", "text"),
    [
        (400, {"error": {"message": "no such thing"}}, "invalid_request", "no such thing"),
        (400, {"message": "of older ones"}, "invalid_request", "of older ones"),
        (503, "busy", "overloaded", "busy"),
        (500, {}, "internal_error", "500"),
    ],
)
async def test_refusals_are_told(stand_in, status, said, code, text):
    server = stand_in()
    server.refuse = status, said
    async with opened(server) as (client, recorder):
        client.submit(1, request())
        await until(lambda: recorder.over(1))
        [output] = recorder.outputs[1]
        assert (output.finish, output.error_code) == ("error", code) and text in output.error
        assert client.alive


@pytest.mark.parametrize(
    ("change", "dialect", "text"),
    [
        ({"logprobs": 2}, VllmDialect(), "logprobs"),
        ({"prompt_logprobs": 0}, VllmDialect(), "prompt_logprobs"),
        ({"top_k": 4}, Dialect(), "top_k is 4"),
        ({"ignore_eos": True}, Dialect(), "ignore_eos"),
        ({"max_tokens": 2000}, VllmDialect(), "valid: 1000 tokens in all"),
    ],
)
async def test_what_the_server_cannot_do_is_refused_here(stand_in, change, dialect, text):
    server = stand_in()
    async with opened(server, dialect) as (client, recorder):
        work = request()
        work.sampling = msgspec.structs.replace(work.sampling, **change)
        client.submit(1, work)
        forced = request()
        forced.forced = TokenIds.of([1])
        client.submit(2, forced)
        await until(lambda: recorder.over(1) and recorder.over(2))
        assert text in recorder.outputs[1][0].error
        assert recorder.outputs[2][0].error_field == "trace_decode_token_ids"
    assert not server.asked


async def test_a_cut_connection_is_made_once_more(stand_in):
    server = stand_in()
    server.cut_after, server.cuts = 0, 1
    async with opened(server) as (client, recorder):
        client.submit(1, request())
        await until(lambda: recorder.over(1))
        assert recorder.over(1) == "length" and len(server.asked) == 2
        server.cut_after, server.cuts = 2, 1
        client.submit(2, request())
        await until(lambda: recorder.over(2))
        assert recorder.outputs[2][-1].error_code == WorkerDiedError.code, "something was given out"
        assert client.alive


async def test_a_server_that_goes_is_dead(stand_in):
    server = stand_in()
    server.pace = 0.05
    async with opened(server) as (client, recorder):
        client.submit(1, request(output=400))
        await until(lambda: 1 in recorder.outputs)
        await server.close()
        await until(lambda: recorder.deaths)
        assert not client.alive and len(recorder.deaths) == 1
        client.submit(3, request())
        with pytest.raises(BienError, match="is gone"):
            await client.snapshot()


async def test_a_server_that_is_not_healthy_is_dead(stand_in):
    server = stand_in()
    async with opened(server) as (client, recorder):
        server.healthy = False
        await until(lambda: recorder.deaths)
        assert "not healthy" in recorder.deaths[0] and not client.alive


async def test_what_cannot_be_served_is_said(stand_in):
    server = await stand_in(context=None).start()
    for fields, text in (({}, "max_context"), ({"served": "other"}, "has no model 'other'")):
        engine = RemoteEngine(endpoints(CTX, [server.url], **fields), VllmDialect(), CTX)
        with pytest.raises(UserError, match=text):
            await engine.connect("r-0")
    await server.close()
    with pytest.raises(ResourceError, match="no engine at"):
        await engine.connect("r-0")


async def test_load_is_what_it_says_and_what_we_know(stand_in):
    server = stand_in()
    server.metrics = (
        'vllm:num_requests_running{engine="0"} 7.0\nvllm:num_requests_waiting{engine="0"} 3.0\n'
        'vllm:num_requests_running{engine="1"} 90.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:cache_config_info{num_gpu_blocks="80",block_size="16",engine="0"} 1.0\n'
    )
    server.pace = 0.05
    async with opened(server, ranks=1) as (client, recorder):
        assert client.info.capacity_tokens == 1280 and client.info.cached_in == 16
        client.submit(1, request(output=200))
        await until(lambda: recorder.frames and recorder.frames[-1].stats is not None)
        await until(lambda: any(f.stats and f.stats.used_blocks for f in recorder.frames))
        stats = [f.stats for f in recorder.frames if f.stats][-1]
        # 100 in all, ours among them, which has no token yet.
        assert (stats.running, stats.waiting, stats.used_blocks, stats.total_blocks) == (96, 4, 20, 80)


async def test_ranks_of_one_server_are_workers_of_their_own(stand_in):
    server = await stand_in().start()
    places = endpoints(CTX, [server.url], events=["tcp://h:5557"], replay=["tcp://h:6557"], ranks=2)
    assert [(e.id, e.rank, e.events, e.replay) for e in places] == [
        ("r-0.0", 0, "tcp://h:5557", "tcp://h:6557"),
        ("r-0.1", 1, "tcp://h:5558", "tcp://h:6558"),
    ]
    server.metrics = 'vllm:num_requests_running{engine="0"} 7\nvllm:num_requests_running{engine="1"} 90\n'
    for dialect in (VllmDialect(), SglangDialect()):
        engine = RemoteEngine(endpoints(CTX, [server.url], ranks=2), dialect, CTX)
        client = await engine.connect("r-0.1")
        recorder = Recorder()
        client.attach(recorder)
        client.submit(1, request(output=1))
        await until(lambda: recorder.over(1))  # noqa: B023
        await client.close()
    assert server.headers[0]["X-data-parallel-rank"] == "1"
    assert server.asked[1]["routed_dp_rank"] == 1 and server.asked[1]["top_k"] == -1
    await server.close()


async def test_without_events_what_was_sent_counts_for_a_time(stand_in):
    async with opened(stand_in(), history_seconds=0.3, poll_seconds=0.02) as (client, recorder):
        work = request()
        client.submit(1, work)
        await until(lambda: recorder.over(1))
        snapshot = await client.snapshot()
        chain = extend_chain(work.hash_key, b"", TokenIds.of(range(100, 124)), 4, 24)
        assert b"".join(e.hashes for e in recorder.stored if e.op == "stored") == chain, "prompt and output"
        assert b"".join(e.hashes for e in snapshot.events) == chain
        await until(lambda: sum(len(e.hashes) for e in recorder.stored if e.op == "removed") == len(chain))
        client.submit(2, request(prompt=range(3)))
        await until(lambda: recorder.over(2))


class Deepest:
    """Where most of the prompt is; else where least is going on."""

    def choose(self, request, targets):
        found = [(-cached_tokens(request, t), t.inflight, i) for i, t in enumerate(targets)]
        best = min(found)
        return Decision(best[2], -best[0])

    def observe(self, decision, outcome):
        pass

    def report(self, worker, stats):
        pass

    def close(self):
        pass


def gateway_of(clients):
    clock = WallClock()
    return Gateway(clients, Deepest(), MemoryIndex(clock), clock, GatewaySpec(), predict_ttl=0.001)


async def generate(gateway, work):
    tokens = []
    async with gateway.generate(work) as stream:
        async for output in stream:
            tokens += TokenIds(output.tokens).ids()
    return tokens, stream


def message(*events):
    return msgspec.msgpack.encode([0.0, list(events), None])


def stored(names, parent, tokens, *more):
    return ["BlockStored", names, parent, list(tokens), 4, None, "GPU", None, *more]


@pytest.mark.parametrize("long", [False, True])
async def test_events_over_real_sockets_reach_the_router(stand_in, publisher_at, tmp_path, long):
    """Two servers; what one of them tells it has decides where a request goes, and with which prediction."""
    servers = [await stand_in().start() for _ in range(2)]
    folders = [tmp_path / "a", tmp_path / "b"]
    sockets = [publisher_at(folder, long) for folder in folders]
    await sockets[1].publish(0, message(stored([1, 2], None, range(100, 108))), send=False)  # long ago
    places = endpoints(
        CTX,
        [s.url for s in servers],
        events=[s.events for s in sockets],
        replay=[s.replay for s in sockets],
        salt=True,
        poll_seconds=0.05,
    )
    engine = RemoteEngine(places, VllmDialect(), CTX)
    fleet = RemoteFleet([engine], WallClock())
    gateway = gateway_of(await fleet.connect(lambda who, why: None))
    fleet.watch(gateway)
    for socket in sockets:
        await socket.subscribed()
    await gateway.warm(10)
    _, stream = await generate(gateway, request())
    assert (stream.worker, stream.decision.predicted_cached) == ("r-1", 8)
    counts = [engine._watches[f"r-{n}"].counts for n in range(2)]
    await sockets[1].publish(1, message(stored([3, 4], 2, range(108, 116))))
    await until(lambda: counts[1].messages == 2)
    _, stream = await generate(gateway, request())
    assert (stream.worker, stream.decision.predicted_cached) == ("r-1", 16)

    # A tenant's blocks are told with the salt that its requests carried.
    _, stream = await generate(gateway, request(tenant="alice"))
    assert stream.decision.predicted_cached == 0, "nobody else's blocks"
    at = int(stream.worker[-1])
    salt = next(b["cache_salt"] for b in servers[at].asked if "cache_salt" in b)
    assert salt == salt_of(tenant_key("alice"))
    await sockets[at].publish(at * 2, message(stored([70], None, range(100, 104), [[salt]])))
    await until(lambda: counts[at].messages == 1 + at * 2)
    _, stream = await generate(gateway, request(tenant="alice"))
    assert (stream.worker, stream.decision.predicted_cached) == (f"r-{at}", 4)
    _, stream = await generate(gateway, request())
    assert stream.decision.predicted_cached == 16

    # It starts again, with an empty cache, faster than its health is looked at.
    sockets[1].kept.clear()
    await sockets[1].publish(0, message(stored([90], None, range(500, 504))))
    await until(lambda: counts[1].restarts)
    await gateway.warm(10)
    _, stream = await generate(gateway, request())
    assert stream.decision.predicted_cached == 0
    await fleet.close()
    await gateway.close()
    for thing in (*sockets, *servers):
        await thing.close()


async def test_what_has_not_streamed_is_placed_again_and_who_returns_joins(stand_in):
    servers = [await stand_in().start() for _ in range(2)]
    for server in servers:
        server.pace = 0.2
    engine = RemoteEngine(endpoints(CTX, [s.url for s in servers], poll_seconds=0.05), VllmDialect(), CTX)
    fleet = RemoteFleet([engine], WallClock())
    gateway = gateway_of(await fleet.connect(lambda who, why: None))
    fleet.watch(gateway)
    prompts = [range(30 * n, 30 * n + 20) for n in range(6)]
    going = [asyncio.create_task(generate(gateway, request(p, output=3))) for p in prompts]
    await until(lambda: all(server.asked for server in servers))
    port = servers[0].port
    await servers[0].close()
    results = await asyncio.gather(*going)
    for prompt, (tokens, _) in zip(prompts, results, strict=True):
        assert tokens == list(range(prompt.stop, prompt.stop + 3))
    assert gateway.totals.replaced >= 1 and gateway.totals.deaths == 1
    assert [info.id for info in gateway.infos] == ["r-1"]
    await servers[0].start(port)
    await until(lambda: len(gateway.infos) == 2)
    await fleet.close()
    await gateway.close()
    for server in servers:
        await server.close()


async def test_a_fleet_that_nobody_answers_says_so():
    engine = RemoteEngine(endpoints(CTX, ["http://127.0.0.1:9"]), VllmDialect(), CTX)
    fleet = RemoteFleet([engine], WallClock())
    said = []
    with pytest.raises(ResourceError, match="no engine at"):
        await fleet.connect(lambda who, why: said.append(who))
    assert said == ["r-0"]
    await fleet.close()


class Odd(VllmDialect):
    """Fails at pages that it did not foresee."""

    broken = False

    def readings(self, samples, labels):
        if self.broken:
            raise ValueError("cannot convert float NaN to integer")
        return super().readings(samples, labels)


async def test_metrics_that_cannot_be_read_cost_their_news_and_no_request(stand_in, caplog):
    server, dialect = stand_in(), Odd()
    server.metrics = (
        'vllm:num_requests_running 3\nvllm:cache_config_info{num_gpu_blocks="9",block_size="4"} 1\n'
    )
    async with opened(server, dialect) as (client, recorder):
        await until(lambda: recorder.frames and recorder.frames[-1].stats.running == 3)
        dialect.broken = True
        await until(lambda: "cannot be read" in caplog.text)
        frames = len(recorder.frames)
        await until(lambda: len(recorder.frames) > frames + 3)
        client.submit(1, request())
        await until(lambda: recorder.over(1))
        assert client.alive and not recorder.deaths and recorder.frames[-1].stats.running == 3
        assert caplog.text.count("cannot be read") == 1
        dialect.broken, server.metrics = False, "vllm:num_requests_running 5\n"
        await until(lambda: recorder.frames[-1].stats.running == 5)
    async with opened(stand_in(), Odd()) as (client, _):
        client._look = lambda: 1 / 0
        await until(lambda: "a look at it failed" in caplog.text)
        assert client.alive
