"""Tools through the openai SDK: what the model writes becomes calls, what clients send becomes a prompt."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from bien.core.providers import Context, NoParameters
from bien.core.testing.text import CHATML
from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.core.worker.messages import Output
from bien.plugins.parsers import hermes, none
from tests.gateway.http.conftest import AGAIN, Start

USER: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
TOOLS: list[Any] = [WEATHER, CLOCK]
# As ChatML templates that know tools; blocks of text stand in for what the real ones say.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<think>"
    "<|im_end|>\n{% endif %}" + CHATML
)
ANSWER = [
    "<think>\nI wo",
    "nder\n</think>\n\nLook: <tool_",
    'call>\n{"name": "weather", "arg',
    'uments": {"city": "Zü',
    'rich"}}\n</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
]


def parser(module: Any = hermes) -> Any:
    return module.bien_providers()[0].factory(NoParameters(), Context())


@pytest.fixture
async def server(start: Start, fake: Any) -> Any:
    fake.finish = "stop"
    text = TextModel(fake.tokenizer, ChatTemplate(TEMPLATE))
    return await start(text=text, parser=parser(), max_context=4000)


def script(fake: Any, *steps: Any) -> None:
    """The last token is the stop token, which has no text."""
    fake.script = [*steps, [1]]


async def test_calls(sdk: AsyncOpenAI, fake: Any) -> None:
    script(fake, *ANSWER)
    answer = await sdk.chat.completions.create(model="toy", messages=USER, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Look:"
    assert choice.message.model_extra == {"reasoning_content": "I wonder"}
    assert choice.message.tool_calls is not None
    calls: list[Any] = list(choice.message.tool_calls)
    assert [(c.type, c.function.name) for c in calls] == [("function", "weather"), ("function", "clock")]
    assert [json.loads(c.function.arguments) for c in calls] == [{"city": "Zürich"}, {}]
    assert len({c.id for c in calls}) == 2 and all(c.id.startswith("call_") for c in calls)
    usage = answer.usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert (
        usage.completion_tokens_details.reasoning_tokens == len(fake.text("<think>\nI wonder\n</think>")) - 6
    )
    assert (len(fake.ended), fake.aborted) == (1, [])


async def test_a_stream_of_calls(sdk: AsyncOpenAI, fake: Any) -> None:
    script(fake, *ANSWER)
    stream = await sdk.chat.completions.create(
        model="toy", messages=USER, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [c.choices[0].delta for c in chunks[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(d.content or "" for d in deltas) == "Look:"
    assert "".join((d.model_extra or {}).get("reasoning_content", "") for d in deltas) == "I wonder"
    calls = [call for d in deltas for call in d.tool_calls or ()]
    heads = [c for c in calls if c.id]
    assert [(c.index, c.type, c.function and c.function.name) for c in heads] == [
        (0, "function", "weather"),
        (1, "function", "clock"),
    ]
    assert all(c.type is None and c.function and c.function.name is None for c in calls if not c.id)
    pieces = {i: [c.function.arguments for c in calls if c.index == i and c.function] for i in (0, 1)}
    assert [json.loads("".join(map(str, p))) for p in pieces.values()] == [{"city": "Zürich"}, {}]
    assert len(pieces[0]) > 2  # arguments do not wait for their end
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-2:] == [None, "tool_calls"]
    assert deltas[-1].model_dump(exclude_unset=True) == {}
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdk_puts_a_stream_together_as_it_reads_a_whole(
    sdk: AsyncOpenAI, fake: Any, stream: bool
) -> None:
    script(fake, *ANSWER)
    ask: dict[str, Any] = {"model": "toy", "messages": USER, "tools": TOOLS}
    if stream:
        async with sdk.chat.completions.stream(**ask) as events:
            message = (await events.get_final_completion()).choices[0].message
    else:
        message = (await sdk.chat.completions.create(**ask)).choices[0].message
    assert [c.function.arguments for c in message.tool_calls] == ['{"city": "Zürich"}', "{}"]  # type: ignore
    assert message.content == "Look:"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_max_tokens_cuts(sdk: AsyncOpenAI, fake: Any, stream: bool) -> None:
    fake.finish, fake.script = "length", ANSWER[:-1]
    ask: dict[str, Any] = {"model": "toy", "messages": USER, "tools": TOOLS}
    if stream:
        chunks = [c async for c in await sdk.chat.completions.create(**ask, stream=True)]
        finish = chunks[-1].choices[0].finish_reason
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
        arguments = "".join(c.function.arguments for c in calls)
    else:
        choice = (await sdk.chat.completions.create(**ask)).choices[0]
        finish = choice.finish_reason
        arguments = choice.message.tool_calls[0].function.arguments  # type: ignore
    assert finish == "length"
    assert arguments == '{"city": "Zü'


async def test_one_call_at_a_time(sdk: AsyncOpenAI, fake: Any) -> None:
    """The answer ends with it: what follows is neither given nor counted, and the engine is left."""
    script(fake, *ANSWER)
    answer = await sdk.chat.completions.create(
        model="toy", messages=USER, tools=TOOLS, parallel_tool_calls=False
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [c.function.name for c in answer.choices[0].message.tool_calls] == ["weather"]  # type: ignore
    used = len(fake.text("".join(ANSWER[:4]) + 'rich"}}'))
    assert answer.usage is not None and abs(answer.usage.completion_tokens - used) < 4


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ("required", "call at least one"),
        ({"type": "function", "function": {"name": "clock"}}, "call the function clock, and no other"),
        ("none", "without calling"),
        ("auto", None),
    ],
)
async def test_what_is_wanted_of_calls_is_told_last(
    sdk: AsyncOpenAI, fake: Any, choice: Any, told: str | None
) -> None:
    script(fake, "fine")
    answer = await sdk.chat.completions.create(model="toy", messages=USER, tools=TOOLS, tool_choice=choice)
    prompt = fake.tokenizer.decode(list(fake.requests[0].prompt.ids()))
    head, _, tail = prompt.partition("user\nhello")
    assert '"name": "weather"' in head and '"name": "clock"' in head
    assert (told in tail) if told else tail == "\nassistant\n"
    # It did not comply: there is no call, and the reason says that there is none.
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("fine", "stop")


async def test_with_none_no_call_is_read(sdk: AsyncOpenAI, fake: Any) -> None:
    script(fake, *ANSWER)
    answer = await sdk.chat.completions.create(model="toy", messages=USER, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls is None
    assert "<tool_call>" in (answer.choices[0].message.content or "")


@pytest.mark.parametrize("stop", ['"Zür', "arguments", "ch"])
async def test_stop_strings_are_found_in_calls_as_the_model_writes_them(
    sdk: AsyncOpenAI, fake: Any, stop: str
) -> None:
    script(fake, *ANSWER)
    answer = await sdk.chat.completions.create(model="toy", messages=USER, tools=TOOLS, stop=stop)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    calls: list[Any] = choice.message.tool_calls or []
    assert [c.function.arguments for c in calls] == {
        '"Zür': ['{"city": '],
        "arguments": [],
        "ch": ['{"city": "Züri'],
    }[stop]
    assert choice.message.content == "Look:"


async def test_a_conversation_with_calls_is_rendered(sdk: AsyncOpenAI, start: Start, fake: Any) -> None:
    """The template knows no tools: Hermes writes them into the messages."""
    script(fake, "fine")
    server = await start(
        text=TextModel(fake.tokenizer, ChatTemplate(CHATML)), parser=parser(), max_context=4000
    )
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": ""}}
    messages: list[Any] = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
    ]
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        await client.chat.completions.create(model="toy", messages=messages, tools=TOOLS)
    prompt = fake.tokenizer.decode(list(fake.requests[0].prompt.ids()))
    assert prompt.startswith("system\n# Tools") and '"name": "weather"' in prompt
    assert prompt.count('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>') == 2
    results = "user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response>\n"
    assert prompt.endswith(f"{results}assistant\n")


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "valid: 'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0].type", "no function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "second 'clock'"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'required'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "clocks"}}},
            "tool_choice",
            "did you mean 'clock'",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "valid: \\[\\]"),
        ({"tools": [{"type": "function", "function": {"nam": "f"}}]}, "tools[0].function.nam", "unknown"),
    ],
)
async def test_refusals(sdk: AsyncOpenAI, fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text) as caught:
        await sdk.chat.completions.create(model="toy", messages=USER, extra_body=fields)
    assert caught.value.param == param


async def test_tools_are_refused_where_nothing_reads_calls(start: Start, fake: Any) -> None:
    for reads in (None, parser(none)):
        text = TextModel(fake.tokenizer, ChatTemplate(TEMPLATE))
        server = await start(text=text, parser=reads)
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="tools is not served by this model"):
                await client.chat.completions.create(model="toy", messages=USER, tools=TOOLS)


async def test_a_whole_answer_with_calls_survives_a_workers_death(sdk: AsyncOpenAI, fake: Any) -> None:
    script(fake, ANSWER[0], ANSWER[1], AGAIN, *ANSWER)
    answer = await sdk.chat.completions.create(model="toy", messages=USER, tools=TOOLS)
    assert answer.choices[0].message.model_extra == {"reasoning_content": "I wonder"}
    assert len(answer.choices[0].message.tool_calls or ()) == 2


async def test_logprobs_and_ids_come_with_events(sdk: AsyncOpenAI, fake: Any) -> None:
    script(fake, *ANSWER)
    stream = await sdk.chat.completions.create(
        model="toy", messages=USER, tools=TOOLS, stream=True, extra_body={"return_token_ids": True}
    )
    ids: list[int] = []
    async for chunk in stream:
        ids += getattr(chunk.choices[0], "token_ids", None) or []
    assert ids == [*(i for step in ANSWER for i in fake.text(step)), 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_gives_text_only(sdk: AsyncOpenAI, fake: Any, stream: bool) -> None:
    fake.script = [Output(1, 7, text=text) for text in ANSWER]
    ask: dict[str, Any] = {"model": "toy", "messages": USER, "tools": TOOLS}
    if stream:
        async with sdk.chat.completions.stream(**ask, stream_options={"include_usage": True}) as events:
            answer: Any = await events.get_final_completion()
    else:
        answer = await sdk.chat.completions.create(**ask)
    assert [c.function.name for c in answer.choices[0].message.tool_calls] == ["weather", "clock"]
    assert answer.choices[0].finish_reason == "tool_calls"
    details = answer.usage.completion_tokens_details
    assert (answer.usage.completion_tokens, details.reasoning_tokens) == (35, 14)


async def test_one_output_is_one_chunk_of_each_kind(sdk: AsyncOpenAI, fake: Any) -> None:
    """However many tokens it has."""
    script(fake, "".join(ANSWER))
    stream = await sdk.chat.completions.create(model="toy", messages=USER, tools=TOOLS, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    said = [d.model_dump(exclude_unset=True) for d in deltas]
    assert [next(iter(d)) for d in said[1:-1]] == ["reasoning_content", "content", *["tool_calls"] * 4]


async def test_with_one_call_the_engine_is_left(sdk: AsyncOpenAI, fake: Any) -> None:
    script(fake, *ANSWER, "and more", "and more")
    await sdk.chat.completions.create(model="toy", messages=USER, tools=TOOLS, parallel_tool_calls=False)
    assert (fake.ended, len(fake.aborted), fake.held) == ([], 1, 0)
