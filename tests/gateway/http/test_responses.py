"""The openai SDK is the client of /v1/responses."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from bien.core.errors import WorkerDiedError


async def test_a_response(sdk: AsyncOpenAI, fake: Any) -> None:
    fake.cached, fake.finish = 7, "stop"
    fake.script = ["he", "llo", [1]]
    answer = await sdk.responses.create(
        model="toy", input="hi", instructions="be kind", store=False, metadata={"a": "b"}, temperature=0.5
    )
    assert (answer.output_text, answer.status, answer.error) == ("hello", "completed", None)
    assert fake.tokenizer.decode(list(fake.requests[0].prompt.ids())) == (
        "system\nbe kind\nuser\nhi\nassistant\n"
    )
    assert (answer.metadata, answer.temperature, answer.store) == ({"a": "b"}, 0.5, False)  # type: ignore[attr-defined]
    usage: Any = answer.usage
    assert usage.input_tokens == fake.requests[0].prompt_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens) == (7, 4)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (fake.ended, fake.aborted, fake.held) == ([answer.id], [], 0)


async def test_a_stream_is_the_full_envelope(sdk: AsyncOpenAI, fake: Any) -> None:
    fake.finish = "stop"
    stream = await sdk.responses.create(model="toy", input="hi", stream=True)
    events: list[Any] = [event async for event in stream]
    assert [e.type.removeprefix("response.") for e in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 4,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [e.sequence_number for e in events] == list(range(len(events)))
    final = events[-1].response
    assert events[0].response.id == final.id
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "hello worl"
    assert final.output == [events[-2].item]
    assert final.output[0].content[0].text == events[-4].text == "hello worl"
    assert len({final.output[0].id, *(e.item_id for e in events[3:-2])}) == 1


async def test_an_answer_ends_with_the_context_window(sdk: AsyncOpenAI, fake: Any) -> None:
    stream = await sdk.responses.create(model="toy", input="hi", max_output_tokens=500, stream=True)
    last: Any = [event async for event in stream][-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert (last.response.output_text, last.response.output[0].status) == ("hello world", "incomplete")
    assert fake.requests[0].sampling.max_tokens == 200 - fake.requests[0].prompt_tokens


async def test_a_stream_that_fails_says_why(sdk: AsyncOpenAI, fake: Any) -> None:
    fake.script = ["he", WorkerDiedError("worker w0 died")]
    stream = await sdk.responses.create(model="toy", input="hi", stream=True)
    last: Any = [event async for event in stream][-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == ("server_error", "worker w0 died")
    assert last.response.output[0].content[0].text == "he"


async def test_errors_before_have_their_status(sdk: AsyncOpenAI, fake: Any) -> None:
    fake.script = [WorkerDiedError("gone")]
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="gone"):
            await sdk.responses.create(model="toy", input="hi", stream=stream)
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.responses.create(model="toy", input="x" * 300)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve("resp_1")
