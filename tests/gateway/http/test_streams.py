"""What goes over the wire, stop strings, held-back text, and clients that leave."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bien.core.request import TokenIds
from bien.core.speculation.counts import DraftCounts, SourceCounts
from bien.core.testing.text import byte_level
from bien.core.text.model import TextModel
from bien.core.text.tokenizer import Tokenizer
from bien.core.worker.messages import Output
from bien.gateway.http.app import make_app
from bien.gateway.http.progress import Progress
from bien.gateway.http.server import Server, serve

CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"model": "toy", "prompt": "hello"}


async def events(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    async with http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_exact_events_of_a_chat(http: aiohttp.ClientSession, fake: Any) -> None:
    fake.script = ["he", "llo"]
    got = await events(http, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    head = {"id": got[0]["id"], "object": "chat.completion.chunk", "created": 10**9, "model": "toy"}

    def choice(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        one = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [one], "usage": None}

    prompt = fake.requests[0].prompt_tokens
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert got == [
        choice({"role": "assistant", "content": ""}),
        choice({"content": "he"}),
        choice({"content": "llo"}),
        choice({}, "length"),
        {**head, "choices": [], "usage": usage},
    ]


async def test_usage_in_every_chunk(http: aiohttp.ClientSession, fake: Any) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    got = await events(http, "/v1/completions", {**TEXT, **options})
    assert [e["usage"] and e["usage"]["completion_tokens"] for e in got] == [1, 3, 6, 8, 8, 8]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_totals_of_speculation_come_with_token_ids(
    http: aiohttp.ClientSession, fake: Any, path: str, body: dict[str, Any]
) -> None:
    ids = TokenIds.of(fake.text("llo"))
    counts = DraftCounts({"own": SourceCounts(2, 6, 4, [2, 2, 2], [2, 1, 1])})
    fake.script = ["he", Output(1, 3, ids.packed, drafted=6, accepted=4, rounds=2, drafts=counts)]
    totals = {"drafted": 6, "accepted": 4, "rounds": 2, "drafted_at": [2, 2, 2], "accepted_at": [2, 1, 1]}
    totals["sources"] = {"own": dict(totals)}
    for more, want in (({"return_token_ids": True}, totals), ({}, None)):
        usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        for options in ({}, usage):
            got = await events(http, path, {**body, **more, **options})
            assert [e.get("bien") for e in got if e["choices"] and e["choices"][0]["finish_reason"]] == [want]
            assert sum("bien" in e for e in got) == bool(want)
        async with http.post(path, json={**body, **more}) as response:
            assert (await response.json()).get("bien") == want


async def test_a_stop_string_aborts_and_surplus_tokens_do_not_count(
    http: aiohttp.ClientSession, fake: Any
) -> None:
    fake.script = ["he", "llo", " wxyzab", "never"]
    got = await events(http, "/v1/completions", {**TEXT, "stop": ["xy"], "return_token_ids": True})
    assert "".join(e["choices"][0]["text"] for e in got) == "hello w"
    assert got[-1]["choices"][0]["finish_reason"] == "stop"
    assert "bien" not in got[-1]  # the totals were still to come
    ids = [i for e in got[:-1] for i in e["choices"][0]["token_ids"]]
    assert fake.tokenizer.decode(ids) == "hello wxy"
    assert (len(fake.aborted), fake.ended) == (1, [])

    async with http.post("/v1/completions", json={**TEXT, "stop": "xy"}) as response:
        whole = await response.json()
    assert whole["choices"][0]["text"] == "hello w"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == len(ids)
    assert (len(fake.aborted), fake.held) == (2, 0)


async def test_text_that_may_become_a_stop_string_is_held_back_and_flushed(
    http: aiohttp.ClientSession, fake: Any
) -> None:
    got = await events(http, "/v1/completions", {**TEXT, "stop": ["old", "world!"]})
    assert [e["choices"][0]["text"] for e in got] == ["he", "ll", "o ", "world", ""]
    assert (len(fake.ended), fake.aborted) == (1, [])


async def test_a_stop_token_counts_without_text(http: aiohttp.ClientSession, fake: Any) -> None:
    fake.finish = "stop"
    fake.script = ["a", fake.text("b")]
    async with http.post("/v1/completions", json={**TEXT, "return_token_ids": True}) as response:
        whole = await response.json()
    assert whole["choices"][0]["text"] == "a"
    assert whole["choices"][0]["token_ids"] == fake.text("ab")
    assert whole["usage"]["completion_tokens"] == 2


async def test_tokens_without_text_are_sent_only_where_ids_are_asked_for(
    http: aiohttp.ClientSession, fake: Any
) -> None:
    fake.script = [[t] for t in fake.text("a😀")]
    got = await events(http, "/v1/completions", TEXT)
    assert [e["choices"][0]["text"] for e in got] == ["a", "😀", ""]
    got = await events(http, "/v1/completions", {**TEXT, "return_token_ids": True})
    assert [(e["choices"][0]["text"], len(e["choices"][0].get("token_ids", ()))) for e in got] == [
        ("a", 1), ("", 1), ("", 1), ("", 1), ("😀", 1), ("", 0),
    ]  # fmt: skip


async def test_packed_ids_of_prompt_and_recorded_continuation(http: aiohttp.ClientSession, fake: Any) -> None:
    def pack(ids: list[int]) -> str:
        return base64.b64encode(np.array(ids, dtype="<u4").tobytes()).decode()

    bodies: list[dict[str, Any]] = [
        {"prompt_token_ids_b64": pack([5, 6, 7]), "trace_decode_token_ids_b64": pack([8, 9])},
        {"prompt": [5, 6, 7], "trace_decode_token_ids": [8, 9]},
        {"prompt": [[5, 6, 7]], "trace_decode_token_ids": [8, 9]},
    ]
    for body in bodies:
        async with http.post(
            "/v1/completions", json={"model": "toy", "ignore_eos": True, **body}
        ) as response:
            assert response.status == 200, await response.text()
        request = fake.requests.pop()
        assert list(request.prompt.ids()) == [5, 6, 7]
        assert list(request.forced.ids()) == [8, 9]
        assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (2, True)


async def test_a_list_of_one_text_is_one_prompt(http: aiohttp.ClientSession, fake: Any) -> None:
    async with http.post("/v1/completions", json={"model": "toy", "prompt": ["hello"]}) as response:
        assert response.status == 200
    assert list(fake.requests[0].prompt.ids()) == fake.text("hello")


async def test_control_tokens_of_a_message_are_text(http: aiohttp.ClientSession, fake: Any) -> None:
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "x<|im_end|>"}, {"type": "text", "text": "y"}],
    }
    async with http.post("/v1/chat/completions", json={"model": "toy", "messages": [message]}) as response:
        assert response.status == 200
    ids = list(fake.requests[0].prompt.ids())
    assert [i for i in ids if i < 3] == [0, 1, 0]
    assert "x<|im_end|>\ny" in fake.tokenizer.decode(ids)


async def test_tenant_and_session_of_a_request(http: aiohttp.ClientSession, fake: Any) -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    sent: list[tuple[dict[str, str], dict[str, str]]] = [
        ({}, {}),
        ({"Authorization": "Bearer key", "X-Session-ID": "head", "traceparent": trace}, {}),
        ({"x-api-key": "key", "X-Session-ID": "head", "traceparent": "x"}, {"session_id": "body"}),
        ({"Authorization": "Bearer other"}, {}),
    ]
    for headers, extra in sent:
        async with http.post("/v1/completions", json={**TEXT, **extra}, headers=headers) as response:
            assert response.status == 200
    none, first, second, third = fake.requests
    assert (none.tenant, none.session, none.traceparent) == ("", "", "")
    assert first.tenant == second.tenant != third.tenant
    assert first.tenant and "key" not in first.tenant
    assert (first.session, second.session) == ("head", "body")
    assert (first.traceparent, second.traceparent) == (trace, "")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_priority_of_a_request(http: aiohttp.ClientSession, fake: Any, path: str) -> None:
    body = CHAT if "chat" in path else TEXT
    for extra in ({}, {"priority": None}, {"priority": -100}, {"priority": 100}):
        async with http.post(path, json={**body, **extra}) as response:
            assert response.status == 200
    assert [r.priority for r in fake.requests] == [0, 0, -100, 100]


# -- clients that leave


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("produced", [0, 1])
async def test_leaving_aborts(
    http: aiohttp.ClientSession, fake: Any, path: str, stream: bool, produced: int
) -> None:
    fake.script = ["he", "llo"][:produced] + [asyncio.Event(), "never"]
    body = {**(CHAT if "chat" in path else TEXT), "stream": stream}
    async with asyncio.timeout(20):
        call = asyncio.create_task(http.post(path, json=body).__aenter__())
        await fake.waiting.wait()
        if stream and produced:
            (await call).close()
        else:
            call.cancel()
        await fake.left.wait()
    assert (len(fake.aborted), fake.ended) == (1, [])
    while fake.held:
        await asyncio.sleep(0)


async def test_leaving_while_the_prompt_is_tokenised_gives_the_slot_back(start: Any, fake: Any) -> None:
    class Slow(TextModel):
        def encode_text(self, text: str) -> Any:
            loop.call_soon_threadsafe(begun.set)
            return asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result() and None

    loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    server = await start(text=Slow(fake.tokenizer))
    async with asyncio.timeout(20), aiohttp.ClientSession(server.url) as http:
        call = asyncio.create_task(http.post("/v1/completions", json=TEXT).__aenter__())
        await begun.wait()
        assert fake.held == 1
        call.cancel()
        while fake.held:
            await asyncio.sleep(0.001)
        go_on.set()
    assert fake.requests == []


async def test_a_client_that_stops_reading_stops_its_answer_only(server: Server, fake: Any) -> None:
    fake.endless = True
    fake.script = ["x" * 500]
    body = json.dumps({**TEXT, "stream": True, "return_token_ids": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", server.port))
        stuck.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        async with asyncio.timeout(60), aiohttp.ClientSession(server.url) as http:
            before = -1
            while not fake.produced == before > 0:
                before = fake.produced
                for _ in range(10):
                    async with http.get("/health") as response:
                        assert response.status == 200
        assert fake.aborted == []
    async with asyncio.timeout(20):
        await fake.left.wait()
    assert len(fake.aborted) == 1


async def test_small_writes_are_not_delayed(fake: Any) -> None:
    seen = []

    async def note(request: aiohttp.web.Request, response: aiohttp.web.StreamResponse) -> None:
        assert request.transport is not None
        sock = request.transport.get_extra_info("socket")
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    app = make_app(fake, TextModel(fake.tokenizer), "toy", max_context=100)
    app.on_response_prepare.append(note)
    server = await serve(app, "127.0.0.1", 0)
    async with aiohttp.ClientSession(server.url) as http:
        await events(http, "/v1/completions", TEXT)
    await server.close()
    assert seen == [1]


# -- chunks


MODEL = TextModel(Tokenizer(byte_level()))


@given(
    st.text(st.sampled_from("abhelo 漢😀"), min_size=1, max_size=16),
    st.lists(st.text("abh漢", min_size=1, max_size=2), max_size=2),
    st.lists(st.integers(1, 4), min_size=30, max_size=30),
    st.sampled_from(["stop", "length"]),
)
def test_how_the_engine_cuts_its_outputs_changes_nothing(
    text: str, stops: list[str], sizes: list[int], finish: str
) -> None:
    ids = MODEL.tokenizer.encode(text)

    def run(sizes: list[int]) -> tuple[str, bytes, str, int]:
        progress = Progress(MODEL.output((), stops))
        shown, kept, at = "", b"", 0
        for n in sizes:
            last = at + n >= len(ids)
            part = ids.slice(at, min(at + n, len(ids)))
            piece = progress.take(Output(1, len(part), part.packed, finish if last else None))
            shown, kept, at = shown + piece.text, kept + piece.ids, at + n
            if progress.finish:
                break
        return shown, kept, progress.reason, progress.tokens

    whole = run([len(ids)])
    assert run([*sizes, len(ids)]) == whole
    assert len(whole[1]) == 4 * whole[3]
