"""The openai SDK is the client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from bien.core.errors import ContextLengthError, OverloadError, WorkerDiedError
from tests.gateway.http.conftest import AGAIN

USER: list[Any] = [{"role": "user", "content": "hello"}]


def tokens(fake: Any) -> int:
    return sum(len(fake.text(step)) for step in fake.script)


async def test_chat(sdk: AsyncOpenAI, fake: Any) -> None:
    fake.cached = 7
    answer = await sdk.chat.completions.create(model="toy", messages=USER, max_tokens=9, seed=3)
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == fake.requests[0].prompt_tokens
    assert answer.usage.completion_tokens == tokens(fake)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    assert answer.created == 10**9
    assert fake.requests[0].sampling.seed == 3
    assert fake.tokenizer.decode(list(fake.requests[0].prompt.ids())) == "user\nhello\nassistant\n"
    assert (fake.ended, fake.aborted, fake.held) == ([answer.id], [], 0)


async def test_chat_stream(sdk: AsyncOpenAI, fake: Any) -> None:
    stream = await sdk.chat.completions.create(
        model="toy", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({c.id for c in chunks}) == 1
    assert all(c.object == "chat.completion.chunk" for c in chunks)
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert [c.choices[0].delta.content for c in chunks[1:-2]] == ["he", "llo", " wor", "ld"]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 5 + ["length"]
    assert chunks[-2].choices[0].delta.model_dump(exclude_unset=True) == {}
    assert [c.usage for c in chunks[:-1]] == [None] * 6
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == tokens(fake)
    assert (len(fake.ended), fake.aborted, fake.held) == (1, [], 0)


async def test_without_usage_asked_for_the_finish_chunk_is_the_last(sdk: AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(model="toy", messages=USER, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all("usage" not in c.model_fields_set for c in chunks)


async def test_completion(sdk: AsyncOpenAI, fake: Any) -> None:
    answer = await sdk.completions.create(model="toy", prompt="hello", max_tokens=9, temperature=0)
    assert answer.choices[0].text == "hello world"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert fake.requests[0].sampling.temperature == 0
    assert fake.requests[0].sampling.max_tokens == 9


async def test_completion_stream(sdk: AsyncOpenAI, fake: Any) -> None:
    stream = await sdk.completions.create(
        model="toy",
        prompt=[3, 4],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "hello world"
    ids = [i for c in chunks[:-2] for i in c.choices[0].token_ids]  # type: ignore[attr-defined]
    assert ids == [i for step in fake.script for i in fake.text(step)]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 4 + ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 2 + len(ids)
    assert list(fake.requests[0].prompt.ids()) == [3, 4]


async def test_models(sdk: AsyncOpenAI) -> None:
    assert [m.id async for m in await sdk.models.list()] == ["toy"]
    assert (await sdk.models.retrieve("toy")).owned_by == "bien"
    with pytest.raises(openai.NotFoundError, match="valid: 'toy'"):
        await sdk.models.retrieve("org/other")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (
            ContextLengthError("too long", field="max_tokens"),
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        (OverloadError("full", retry_after=3), openai.InternalServerError, "overloaded"),
        (RuntimeError("a secret"), openai.InternalServerError, "internal_error"),
        (WorkerDiedError("gone"), openai.InternalServerError, "worker_died"),
    ],
)
async def test_errors_before_the_first_token_have_their_status(
    sdk: AsyncOpenAI, fake: Any, stream: bool, error: Exception, kind: type[openai.APIStatusError], code: str
) -> None:
    fake.script = [error]
    with pytest.raises(kind) as caught:
        await sdk.chat.completions.create(model="toy", messages=USER, stream=stream)
    assert caught.value.code == code
    assert "secret" not in str(caught.value)
    assert fake.held == 0


async def test_an_error_after_the_first_token_ends_the_stream_as_an_error(
    sdk: AsyncOpenAI, fake: Any
) -> None:
    fake.script = ["he", WorkerDiedError("worker w0 died")]
    stream = await sdk.chat.completions.create(model="toy", messages=USER, stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="worker w0 died"):
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)
    assert texts == ["", "he"]


async def test_an_answer_that_is_not_streamed_survives_a_workers_death(sdk: AsyncOpenAI, fake: Any) -> None:
    fake.script = ["hey", "you", AGAIN, "he", "llo"]
    answer = await sdk.completions.create(model="toy", prompt="a", extra_body={"return_token_ids": True})
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].model_extra["token_ids"] == [*fake.text("he"), *fake.text("llo")]
    assert answer.usage.completion_tokens == len(answer.choices[0].model_extra["token_ids"])


async def test_an_unknown_model_is_not_found(sdk: AsyncOpenAI, fake: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here; valid: 'toy'") as caught:
        await sdk.chat.completions.create(model="gpt", messages=USER)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert fake.requests == []
