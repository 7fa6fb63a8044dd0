"""The anthropic SDK is the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from bien.core.errors import OverloadError, WorkerDiedError
from bien.gateway.http.server import Server

USER: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def claude(server: Server) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        yield client


def prompt(fake: Any) -> str:
    text: str = fake.tokenizer.decode(list(fake.requests[-1].prompt.ids()))
    return text


async def test_a_message(claude: AsyncAnthropic, fake: Any) -> None:
    fake.cached, fake.finish = 7, "stop"
    fake.script = ["he", "llo", [1]]  # the last one is a stop token
    answer = await claude.messages.create(model="toy", messages=USER, max_tokens=9, system="be kind")
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [
        {"type": "text", "text": "hello"}
    ]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    assert prompt(fake) == "system\nbe kind\nuser\nhello\nassistant\n"
    assert answer.usage.input_tokens == fake.requests[0].prompt_tokens - 7
    assert (answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens) == (7, 0)
    assert answer.usage.output_tokens == len(fake.text("he") + fake.text("llo")) + 1
    assert answer._request_id
    assert (fake.ended, fake.aborted, fake.held) == ([answer.id], [], 0)


async def test_a_stream_is_anthropics_sequence(claude: AsyncAnthropic, fake: Any) -> None:
    fake.cached = 7
    stream = await claude.messages.create(model="toy", messages=USER, max_tokens=5, stream=True)
    events = [event async for event in stream]
    assert [e.type for e in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * 4, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start: Any = events[0]
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert start.message.usage.cache_read_input_tokens == 7
    assert start.message.usage.input_tokens == fake.requests[0].prompt_tokens - 7
    delta: Any = events[-2]
    assert delta.delta.stop_reason == "max_tokens"
    assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == "hello world"


async def test_the_sdks_own_stream_makes_the_message(claude: AsyncAnthropic, fake: Any) -> None:
    fake.finish = "stop"
    async with claude.messages.stream(model="toy", messages=USER, max_tokens=50) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(texts) == final.content[0].text == "hello worl"  # type: ignore[union-attr]
    assert final.usage.output_tokens == sum(len(fake.text(step)) for step in fake.script)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(claude: AsyncAnthropic, fake: Any, stream: bool) -> None:
    create = claude.messages.create(
        model="toy", messages=USER, max_tokens=50, stop_sequences=["x", "o w"], stream=stream
    )
    if stream:
        events = [e async for e in await create]
        delta = events[-2].delta
        text = "".join(e.delta.text for e in events if e.type == "content_block_delta")
    else:
        delta = await create
        text = delta.content[0].text
    assert (text, delta.stop_reason, delta.stop_sequence) == ("hell", "stop_sequence", "o w")


async def test_errors_are_anthropics(claude: AsyncAnthropic, fake: Any) -> None:
    fake.script = [OverloadError("full", retry_after=2)]
    with pytest.raises(anthropic.InternalServerError) as caught:
        await claude.messages.create(model="toy", messages=USER, max_tokens=5)
    assert caught.value.status_code == 529
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")
    assert body["request_id"] == caught.value.response.headers["request-id"]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 199 maximum"):
        await claude.messages.create(
            model="toy", messages=[{"role": "user", "content": "x" * 300}], max_tokens=5
        )
    fake.script = ["he", WorkerDiedError("worker w0 died")]
    with pytest.raises(anthropic.APIStatusError, match="worker w0 died"):
        async for _ in await claude.messages.create(model="toy", messages=USER, max_tokens=5, stream=True):
            pass
    with pytest.raises(anthropic.NotFoundError, match="valid: 'toy'"):
        await claude.messages.create(model="claude", messages=USER, max_tokens=5)


async def test_models(claude: AsyncAnthropic) -> None:
    (model,) = [m async for m in claude.models.list()]
    assert (model.id, model.type, model.created_at.year) == ("toy", "model", 2001)
    assert (await claude.models.retrieve("toy")).max_input_tokens == 200
