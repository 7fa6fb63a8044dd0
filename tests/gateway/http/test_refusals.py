"""Bad input: each is refused with its status, the field named, before a slot or a token is spent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from bien.core.errors import UserError
from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.gateway.http.errors import refusal

USER = [{"role": "user", "content": "hi"}]

BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "temperature=-1; valid: from 0 to 2"),
    ({"temperature": "hot"}, "temperature", "Expected `float"),
    ({"top_p": 0}, "top_p", "valid: above 0 to 1"),
    ({"top_p": 1.5}, "top_p", "top_p=1.5"),
    ({"top_k": -2}, "top_k", "valid: -1 to 2147483647"),
    ({"max_tokens": 0}, "max_tokens", "valid: 1 to 2147483647"),
    ({"max_tokens": 2**31}, "max_tokens", "max_tokens=2147483648; valid: 1 to 2147483647"),
    ({"max_tokens": 10**12}, "max_tokens", "1000000000000"),
    ({"max_tokens": 1.5}, "max_tokens", "Expected `int"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "contradict"),
    ({"max_tokens": 200}, "max_tokens", "maximum context length is 200"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "valid: 0..3"),
    ({"n": 0}, "n", "n=0; valid: 1 to 128"),
    ({"n": 129}, "n", "n=129; valid: 1 to 128"),
    ({"n": True}, "n", "Expected `int"),
    ({"best_of": 2}, "best_of", "best_of=2 is not served; valid: 1 (what n is), null"),
    ({"n": 3, "best_of": 1}, "best_of", "valid: 3"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "valid: 0 to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "valid: 0 to 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "needs stream=false"),
    ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty=2.5; valid: from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty=-3; valid: from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty=0; valid: from 0.01 to 2"),
    ({"repetition_penalty": 2.1}, "repetition_penalty", "valid: from 0.01 to 2"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", "repetition_penalty=1e-300"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5=101; valid: from -100 to 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias", 'the key "x"; valid: token ids'),
    ({"logit_bias": {"-1": 1}}, "logit_bias", 'the key "-1"'),
    ({"logit_bias": {"²": 1}}, "logit_bias", "valid: token ids"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "valid: token ids"),
    ({"logit_bias": {"5": "up"}}, "logit_bias[...]", "Expected `float"),
    ({"logit_bias": {"5": 1, "100000": 1}}, "logit_bias", "holds 100000; valid: 0.."),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1025 ids; valid: at most 1024"),
    ({"min_p": 1.1}, "min_p", "min_p=1.1; valid: from 0 to 1"),
    ({"min_p": -0.1}, "min_p", "valid: from 0 to 1"),
    ({"response_format": {"type": "json_object"}}, "response_format", 'valid: {"type":"text"}'),
    ({"stop": [""]}, "stop", "0 characters"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": ["a" * 257]}, "stop", "257 characters"),
    ({"stop": 5}, "stop", "Expected `str"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "holds -1"),
    ({"stop_token_ids": [100000]}, "stop_token_ids", "holds 100000; valid: 0.."),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "at most 256"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
    ({"stream": True, "stream_options": {"include_use": True}},
     "stream_options.include_use", "did you mean 'include_usage'"),
    ({"temprature": 1}, "temprature", "unknown field 'temprature'"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    ({"session_id": "s" * 257}, "session_id", "at most 256"),
    ({"priority": "high"}, "priority", "Expected `int"),
    ({"priority": -101}, "priority", "valid: -100 to 100"),
    ({"priority": 101}, "priority", "valid: -100 to 100"),
    ({"priority": -(1 << 70)}, "priority", ""),
    ({"model": "other"}, "model", "'other' is not served here"),
    ({"model": None}, "model", "Expected `str`, got `null`"),
]  # fmt: skip
CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", "Expected `array`"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "no content"),
    ({"messages": [*USER, {"content": "x"}]}, "messages[1].role", "required"),
    ({"messages": [{**USER[0], "contnt": "y"}]}, "messages[0].contnt", "did you mean 'content'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type", "'image_url'; valid: 'text'"),
    ({"messages": [{**USER[0], "content": [{"type": "text"}]}]}, "messages[0].content[0].type", "no text"),
    ({"messages": [{**USER[0], "audio": {"id": "a"}}]}, "messages[0].audio", "not served"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "maximum context length is 200"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "valid: []"),
    ({"tool_choice": "required"}, "tool_choice", "'auto'"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "valid: none, minimal, low"),
    ({"top_logprobs": 3}, "top_logprobs", "top_logprobs=3 needs logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs=21; valid: 0 to 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "valid: 0 to 20"),
    ({"logprobs": 2}, "logprobs", "Expected `bool"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "may not set 'messages'"),
    ({"prompt": "x"}, "prompt", "unknown field 'prompt'"),
]  # fmt: skip
TEXT: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "neither of prompt and prompt_token_ids_b64"),
    ({"prompt": "x", "prompt_token_ids_b64": "AAAA"}, "prompt", "both of"),
    ({"prompt": ["a", "b"]}, "prompt", "2 prompts; valid: one string"),
    ({"prompt": [[1], [2]]}, "prompt", "2 prompts"),
    ({"prompt": [1, "a"]}, "prompt", "mixed"),
    ({"prompt": []}, "prompt", "0 prompts"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": [[]]}, "prompt", "prompt is empty"),
    ({"prompt": [1, -5]}, "prompt", "holds -5"),
    ({"prompt": [1, 99999999999999999999]}, "prompt", "holds 99999999999999999999"),
    ({"prompt": [1, 4000000000]}, "prompt", "prompt[1] is 4000000000; valid: token ids 0.."),
    ({"prompt": [1, True]}, "prompt[1]", "got `bool`"),
    ({"prompt": {"a": 1}}, "prompt", "got `object`"),
    ({"prompt": [1] * 200}, "prompt", "maximum context length is 200"),
    ({"prompt": None, "prompt_token_ids_b64": "AAAA"}, "prompt_token_ids_b64", "3 bytes"),
    ({"prompt": None, "prompt_token_ids_b64": "AAAAAAA="}, "prompt_token_ids_b64", "5 bytes"),
    ({"prompt": None, "prompt_token_ids_b64": "%%"}, "prompt_token_ids_b64", "not base64"),
    ({"prompt": None, "prompt_token_ids_b64": "é"}, "prompt_token_ids_b64", "not base64"),
    ({"trace_decode_token_ids": [1], "trace_decode_token_ids_b64": "AAAA"}, "trace_decode_token_ids", "both"),
    ({"trace_decode_token_ids": [5000]}, "trace_decode_token_ids", "trace_decode_token_ids[0] is 5000"),
    ({"echo": 1}, "echo", "Expected `bool"),
    ({"max_tokens": 0}, "max_tokens", "valid: 1 to"),
    ({"echo": True, "max_tokens": -1}, "max_tokens", "valid: 0 to"),
    ({"logprobs": 6}, "logprobs", "logprobs=6; valid: 0 to 5"),
    ({"logprobs": -1}, "logprobs", "valid: 0 to 5"),
    ({"logprobs": True}, "logprobs", "logprobs=true; valid: 0 to 5"),
    ({"suffix": "x"}, "suffix", "not served"),
    ({"messages": USER}, "messages", "unknown field 'messages'"),
]  # fmt: skip


async def refused(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json=body) as response:
        assert response.content_type == "application/json"
        return response.status, (await response.json())["error"]


@pytest.mark.parametrize(("extra", "field", "words"), BOTH + CHAT)
async def test_chat(
    http: aiohttp.ClientSession, fake: Any, extra: dict[str, Any], field: str, words: str
) -> None:
    body = {"model": "toy", "messages": USER, **extra}
    status, error = await refused(http, "/v1/chat/completions", body)
    assert status == (404 if extra.get("model") == "other" else 400)
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert words in error["message"]
    assert fake.requests == []


@pytest.mark.parametrize(("extra", "field", "words"), BOTH + TEXT)
async def test_completions(
    http: aiohttp.ClientSession, fake: Any, extra: dict[str, Any], field: str, words: str
) -> None:
    body = {"model": "toy", "prompt": "hello", **extra}
    status, error = await refused(http, "/v1/completions", body)
    assert status == (404 if extra.get("model") == "other" else 400)
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert words in error["message"]
    assert fake.requests == []


async def test_fields_without_effect_are_accepted(http: aiohttp.ClientSession, fake: Any) -> None:
    neutral: dict[str, Any] = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0, "frequency_penalty": 0.0,
        "logit_bias": {}, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto",
        "parallel_tool_calls": True, "store": True, "metadata": {"a": "b"}, "service_tier": "auto",
        "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "reasoning_effort": None,
        "temperature": None, "top_p": 1, "top_k": -1, "stop": None, "seed": -7, "max_completion_tokens": 5,
    }  # fmt: skip
    body = {"model": "toy", "messages": USER, **neutral}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
    sampling = fake.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (5, 1.0, 0)
    assert sampling.seed is not None
    assert 0 <= sampling.seed < 1 << 63


async def test_what_an_assistant_said_may_be_echoed_back(http: aiohttp.ClientSession, fake: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "d"},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": [],
         "audio": None, "function_call": None, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]  # fmt: skip
    async with http.post("/v1/chat/completions", json={"model": "toy", "messages": messages}) as response:
        assert response.status == 200, await response.text()
    assert fake.tokenizer.decode(list(fake.requests[0].prompt.ids())).startswith("system\nd\nuser\nhi\n")


async def test_without_max_tokens_chat_may_fill_the_context(http: aiohttp.ClientSession, fake: Any) -> None:
    async with http.post("/v1/chat/completions", json={"model": "toy", "messages": USER}) as response:
        assert response.status == 200
    request = fake.requests[0]
    assert request.sampling.max_tokens == 200 - request.prompt_tokens


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"model": "toy"', "not valid JSON"),
        (b'{"model": "toy", "user": "\xff"}', "not valid JSON"),
        (b'{"model": "toy", "user": "\\ud800"}', "not valid JSON"),
        (b"[1]", "Expected `object`"),
        (b"NaN", "not valid JSON"),
        (b"[" * 100000, "Expected `object`"),
        (b'{"model": "toy", "metadata": ' + b"[" * 100000 + b"]" * 100000 + b"}", "not valid JSON"),
    ],
)
async def test_bodies_that_are_no_request(http: aiohttp.ClientSession, body: bytes, words: str) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        async with http.post(path, data=body, headers=headers) as response:
            assert response.status == 400
            assert words in (await response.json())["error"]["message"]


async def test_media_method_path_and_size(start: Any) -> None:
    server = await start(max_body_bytes=100)
    async with aiohttp.ClientSession(server.url) as http:
        async with http.post("/v1/completions", data="a=b", headers={"Content-Type": "text/plain"}) as r:
            assert (r.status, (await r.json())["error"]["code"]) == (415, "unsupported_media_type")
        async with http.get("/v1/completions") as r:
            assert (r.status, r.headers["Allow"]) == (405, "POST")
            assert "valid: POST" in (await r.json())["error"]["message"]
        async with http.post("/v1/completion", json={}) as r:
            assert r.status == 404
            assert "did you mean '/v1/completions'?" in (await r.json())["error"]["message"]
        async with http.get("/v1/nothing") as r:
            message = (await r.json())["error"]["message"]
            assert "/v1/models, /v1/models/{id}, /v1/responses, /version" in message and ".+" not in message
        async with http.post("/v1/completions", json={"model": "toy", "prompt": "x" * 200}) as r:
            assert (r.status, (await r.json())["error"]["code"]) == (413, "request_too_large")


async def raw(server: Any, head: bytes, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    """Bytes that no client would send."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(head + b"Host: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    first, _, rest = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(rest)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Session-ID", b"\xff"),
        ("X-Session-ID", "caf\xe9".encode("latin-1")),
        ("Authorization", b"Bearer \xff"),
        ("Authorization", b"\xff\xfe"),
        ("x-api-key", b"\xff\xfe"),
    ],
)
async def test_headers_that_are_no_text_name_the_header(
    start: Any, fake: Any, header: str, value: bytes
) -> None:
    server = await start()
    body = json.dumps({"model": "toy", "prompt": "x", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\n" + header.encode() + b": " + value + b"\r\n"
    status, answer = await raw(server, head, body)
    assert (status, answer["error"]["param"]) == (400, header)
    assert "UTF-8" in answer["error"]["message"] and header in answer["error"]["message"]
    assert not fake.held and not fake.requests


@pytest.mark.parametrize("name", [b"traceparent", b"x-request-id", b"user-agent", b"x-other", b"cookie"])
async def test_headers_that_go_no_further_may_be_of_any_bytes(start: Any, fake: Any, name: bytes) -> None:
    fake.script = ["a"]
    body = json.dumps({"model": "toy", "prompt": "x", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nX-Session-ID: caf\xc3\xa9\r\n" + name + b": \xff00-\xe9\r\n"
    assert (await raw(await start(), head, body))[0] == 200
    (request,) = fake.requests
    assert (request.session, request.traceparent) == ("caf\xe9", "")


async def test_what_a_refusal_quotes_may_be_of_any_bytes(start: Any) -> None:
    server = await start()
    for path in (b"/v1/models/%ff", b"/v1/models/%ed%a0%80", b"/%ff"):
        status, answer = await raw(server, b"GET " + path + b" HTTP/1.1\r\n")
        assert status == 404 and answer["error"]["message"]
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: text/\xff\r\n"
    assert (await raw(server, head, b"{}"))[0] == 415
    found = refusal(UserError("no \udcff here"))
    assert found.status == 400 and "udcff" in json.loads(found.openai())["error"]["message"]


@pytest.mark.parametrize(
    "field", ["session_id", "cache_salt", "user", "prompt", "model", "stop", "prompt_cache_key"]
)
@pytest.mark.parametrize("text", [rb"\ud800", rb"\udcff", b"\xff"])
async def test_no_field_takes_half_a_character(start: Any, fake: Any, field: str, text: bytes) -> None:
    rest = {"model": "toy", "prompt": "x"}
    rest.pop(field, None)
    body = json.dumps(rest).encode()[:-1] + b', "' + field.encode() + b'": "a' + text + b'"}'
    status, answer = await raw(await start(), b"POST /v1/completions HTTP/1.1\r\n", body)
    assert status == 400 and "not valid JSON" in answer["error"]["message"]
    assert not fake.held and not fake.requests


async def test_a_template_that_refuses_gives_its_own_words(start: Any, fake: Any) -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    server = await start(text=TextModel(fake.tokenizer, template))
    async with aiohttp.ClientSession(server.url) as http:
        status, error = await refused(http, "/v1/chat/completions", {"model": "toy", "messages": USER})
    assert (status, error["param"]) == (400, "messages")
    assert "roles must alternate" in error["message"]
    assert fake.held == 0


async def test_overload_is_refused_before_any_tokenising(start: Any, fake: Any) -> None:
    class Untouched(TextModel):
        def encode_text(self, text: str) -> Any:
            raise AssertionError("tokenised")

    fake.places = 0
    server = await start(text=Untouched(fake.tokenizer))
    async with aiohttp.ClientSession(server.url) as http:
        async with http.post("/v1/completions", json={"model": "toy", "prompt": "x"}) as response:
            assert response.status == 503
            assert (response.headers["Retry-After"], response.headers["retry-after-ms"]) == ("3", "2500")
            error = json.loads(await response.text())["error"]
    assert (error["type"], error["code"]) == ("server_error", "overloaded")
