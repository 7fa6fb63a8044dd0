"""Life of a server, and the endpoints for operators."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from bien.core import __version__
from bien.core.errors import ResourceError
from bien.core.text.model import TextModel
from bien.gateway.http.app import make_app
from bien.gateway.http.server import check_port, serve

TEXT = {"model": "toy", "prompt": "hello"}


async def test_health_ready_version(http: aiohttp.ClientSession, fake: Any) -> None:
    for path, body in (
        ("/health", {"status": "ok"}),
        ("/ready", {"status": "ready"}),
        ("/version", {"version": __version__}),
    ):
        async with http.get(path) as response:
            assert (response.status, await response.json()) == (200, body)
        async with http.head(path) as response:
            assert response.status == 200
    fake.ready = False
    async with http.get("/ready") as response:
        assert response.status == 503
        assert "no worker is ready" in (await response.json())["error"]["message"]
    async with http.get("/health") as response:
        assert response.status == 200


async def test_draining_refuses_new_work_and_finishes_the_old(start: Any, fake: Any) -> None:
    go_on = asyncio.Event()
    fake.script = ["he", go_on, "llo"]
    server = await start()
    async with aiohttp.ClientSession(server.url) as http, asyncio.timeout(20):
        running = asyncio.create_task(http.post("/v1/completions", json=TEXT).__aenter__())
        await fake.waiting.wait()
        server.drain()
        for call in (http.get("/ready"), http.post("/v1/completions", json=TEXT)):
            async with call as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert "shutting down" in (await response.json())["error"]["message"]
        async with http.get("/health") as response:
            assert response.status == 200
        go_on.set()
        response = await running
        assert (await response.json())["choices"][0]["text"] == "hello"


async def test_closing_aborts_what_does_not_end(start: Any, fake: Any) -> None:
    fake.script = ["he", asyncio.Event(), "never"]
    server = await start()
    async with aiohttp.ClientSession(server.url) as http, asyncio.timeout(20):
        response = await http.post("/v1/completions", json={**TEXT, "stream": True})
        await fake.waiting.wait()
        whole = asyncio.create_task(http.post("/v1/completions", json=TEXT).__aenter__())
        while len(fake.requests) < 2:
            await asyncio.sleep(0)
        await server.close()
        assert (len(fake.aborted), fake.held) == (2, 0)
        *_, last = (await response.text()).strip().split("\n\n")  # told, not cut off
        assert "shutting down" in last and '"overloaded"' in last
        refused = await whole
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")


async def test_a_taken_port_is_named(start: Any, fake: Any) -> None:
    server = await start()
    app = make_app(fake, TextModel(fake.tokenizer), "toy", max_context=10)
    with pytest.raises(
        ResourceError, match=rf"port {server.port} on 127.0.0.1 is in use .* set another"
    ) as caught:
        await serve(app, "127.0.0.1", server.port)
    assert caught.value.status == 503
    with pytest.raises(ResourceError) as early:
        await check_port("127.0.0.1", server.port)
    assert (str(early.value), early.value.field) == (str(caught.value), "port")


async def test_a_check_leaves_the_port_free(start: Any, fake: Any) -> None:
    server = await start()
    await server.close()
    await check_port("127.0.0.1", server.port)
    app = make_app(fake, TextModel(fake.tokenizer), "toy", max_context=10)
    again = await serve(app, "127.0.0.1", server.port)
    assert again.port == server.port
    await again.close()


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [("127.0.0.1", 70000, "valid: 1 to 65535"), ("192.0.2.1", 0, "no address of this machine")],
)
async def test_an_impossible_address_is_named(fake: Any, host: str, port: int, words: str) -> None:
    app = make_app(fake, TextModel(fake.tokenizer), "toy", max_context=10)
    for attempt in (serve(app, host, port), check_port(host, port)):
        with pytest.raises(ResourceError, match=words):
            await attempt


async def test_request_ids(http: aiohttp.ClientSession) -> None:
    for given, kept in (("abc-1", True), ("a b", False), ("x" * 200, False)):
        for path in ("/health", "/nowhere"):
            async with http.get(path, headers={"x-request-id": given}) as response:
                assert (response.headers["x-request-id"] == given) == kept
    async with http.post(
        "/v1/completions", json={**TEXT, "stream": True}, headers={"x-request-id": "s"}
    ) as response:
        assert response.headers["x-request-id"] == "s"
        await response.read()


async def test_metrics_show_the_registry_and_the_responses(start: Any) -> None:
    registry = CollectorRegistry()
    Counter("bien_something", "Of somebody else.", registry=registry).inc(3)
    server = await start(registry=registry)
    async with aiohttp.ClientSession(server.url) as http:
        async with http.post("/v1/completions", json=TEXT):
            pass
        async with http.get("/nowhere"):
            pass
        async with http.get("/metrics") as response:
            assert response.content_type == "text/plain"
            page = await response.text()
    assert "bien_something_total 3.0" in page
    assert 'bien_http_responses_total{route="/v1/completions",status="200"} 1.0' in page
    assert 'bien_http_responses_total{route="other",status="404"} 1.0' in page
    assert "bien_http_streams 0.0" in page


async def test_what_is_no_http_costs_one_line_of_the_log(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for text in (b"GET / HTTP/9.x\r\n\r\n", b"GET /health HTTP/1.1\r\nContent-Length: one\r\n\r\n"):
        caplog.clear()
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(text)
        assert (await reader.readline()).startswith(b"HTTP/1.0 400")
        writer.close()
        (record,) = caplog.records
        assert record.exc_info is None and "\n" not in logging.Formatter().format(record)
        assert "from 127.0.0.1: " in record.getMessage()
