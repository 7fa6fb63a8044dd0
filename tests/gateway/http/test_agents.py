"""Coding agents: several turns with tools and reasoning, in the shapes that Claude Code and Codex send."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from bien.core.providers import Context, NoParameters
from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.gateway.http.server import Server
from bien.plugins.parsers import hermes
from tests.gateway.http.conftest import Start

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% if enable_thinking %}<think>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
CALLING = [
    "<think>\nI won",
    "der\n</think>\n\nLook: <tool_",
    'call>\n{"name": "ls", "arguments": {"path": "',
    '."}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
]
LS: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}
BLOCK_TOOLS: list[Any] = [{"name": "ls", "input_schema": LS}, {"name": "now", "input_schema": {}}]
FUNCTIONS: list[Any] = [
    {"type": "function", "name": "ls", "parameters": LS, "strict": False},
    {"type": "function", "name": "now", "parameters": {}, "strict": False},
]
SECOND = 'user\nlist\nassistant\n[I wonder]Look:(ls {"path": "."})(now {})\ntool\na b\ntool\n12:00\nassistant'


@pytest.fixture
async def server(start: Start, fake: Any) -> Server:
    fake.finish = "stop"
    text = TextModel(fake.tokenizer, ChatTemplate(TEMPLATE))
    (provider,) = hermes.bien_providers()
    parser: Any = provider.factory(NoParameters(), Context())
    return await start(text=text, parser=parser, max_context=9000)


@pytest.fixture
async def claude(server: Server) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        yield client


def say(fake: Any, *steps: Any) -> None:
    fake.script = [*steps, [1]]  # the last one is the stop token


def prompt(fake: Any) -> str:
    text: str = fake.tokenizer.decode(list(fake.requests[-1].prompt.ids()))
    return text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_turns_of_messages(claude: AsyncAnthropic, fake: Any, stream: bool, display: Any) -> None:
    turns: list[Any] = [{"role": "user", "content": "list"}]
    asked: dict[str, Any] = {"model": "toy", "max_tokens": 3000, "tools": BLOCK_TOOLS}
    asked["thinking"] = {"type": "adaptive", "display": display}

    async def ask() -> Any:
        if not stream:
            return await claude.messages.create(**asked, messages=turns)
        async with claude.messages.stream(**asked, messages=turns) as events:
            return await events.get_final_message()

    say(fake, *CALLING)
    answer = await ask()
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, ls, now = answer.content
    assert (thinking.thinking, text.text) == ("I wonder" if display == "summarized" else "", "Look:")
    assert thinking.signature
    assert [(c.name, c.input) for c in (ls, now)] == [("ls", {"path": "."}), ("now", {})]
    assert answer.stop_reason == "tool_use"
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens
    turns.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]})
    turns.append({"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": ls.id, "content": "a b"},
        {"type": "tool_result", "tool_use_id": now.id, "content": [{"type": "text", "text": "12:00"}]},
    ]})  # fmt: skip
    counted = await claude.messages.count_tokens(
        model="toy", messages=turns, tools=BLOCK_TOOLS, thinking=asked["thinking"]
    )
    say(fake, "done")
    answer = await ask()
    assert prompt(fake).endswith(SECOND)
    assert prompt(fake).startswith('{"type": "function"')
    assert answer.content[-1].text == "done"
    assert answer.stop_reason == "end_turn"
    assert counted.input_tokens == answer.usage.input_tokens == fake.requests[-1].prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("summary", [None, "auto"])
async def test_turns_of_responses(sdk: AsyncOpenAI, fake: Any, stream: bool, summary: Any) -> None:
    items: list[Any] = [{"role": "user", "content": "list"}]
    asked: dict[str, Any] = {"model": "toy", "store": False, "tools": FUNCTIONS}
    asked |= {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "high", "summary": summary}}

    async def ask() -> Any:
        if not stream:
            return await sdk.responses.create(**asked, input=items)
        async with sdk.responses.stream(**asked, input=items) as events:
            return await events.get_final_response()

    say(fake, *CALLING)
    answer = await ask()
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, ls, now = answer.output
    shown = reasoning.summary if summary else reasoning.content
    assert [part.text for part in shown] == ["I wonder"]
    assert message.content[0].text == "Look:"
    assert [(c.name, json.loads(c.arguments)) for c in (ls, now)] == [("ls", {"path": "."}), ("now", {})]
    assert len({item.id for item in answer.output}) == 4
    assert answer.status == "completed"
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
    items += [
        {"type": "function_call_output", "call_id": ls.call_id, "output": "a b"},
        {"type": "function_call_output", "call_id": now.call_id, "output": "12:00"},
    ]
    say(fake, "done")
    assert (await ask()).output_text == "done"
    assert prompt(fake).endswith(SECOND)


async def test_each_block_has_its_own_events(claude: AsyncAnthropic, fake: Any) -> None:
    say(fake, *CALLING)
    stream = await claude.messages.create(
        model="toy",
        max_tokens=3000,
        tools=BLOCK_TOOLS,
        stream=True,
        messages=[{"role": "user", "content": "x"}],
    )
    seen: list[tuple[str, Any]] = []
    async for event in stream:
        if event.type == "content_block_start":
            seen.append(("start", (event.index, event.content_block.type)))
        elif event.type == "content_block_delta" and seen[-1] != (event.delta.type, event.index):
            seen.append((event.delta.type, event.index))
        elif event.type == "content_block_stop":
            seen.append(("stop", event.index))
    assert seen == [
        ("start", (0, "thinking")), ("thinking_delta", 0), ("signature_delta", 0), ("stop", 0),
        ("start", (1, "text")), ("text_delta", 1), ("stop", 1),
        ("start", (2, "tool_use")), ("input_json_delta", 2), ("stop", 2),
        ("start", (3, "tool_use")), ("input_json_delta", 3), ("stop", 3),
    ]  # fmt: skip


async def test_each_item_has_its_own_events(sdk: AsyncOpenAI, fake: Any) -> None:
    say(fake, *CALLING)
    stream = await sdk.responses.create(model="toy", input="x", tools=FUNCTIONS, stream=True)
    events: list[Any] = [event async for event in stream]
    kinds = [e.type.removeprefix("response.") for e in events]
    assert [k for i, k in enumerate(kinds) if not i or kinds[i - 1] != k] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
          "output_item.done"] * 2,
        "completed",
    ]  # fmt: skip
    assert [e.sequence_number for e in events] == list(range(len(events)))
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert events[-1].response.output == done
    for item in done[2:]:
        pieces = [e.delta for e in events if e.type.endswith("arguments.delta") and e.item_id == item.id]
        assert "".join(pieces) == item.arguments


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_is_no_call(
    claude: AsyncAnthropic, sdk: AsyncOpenAI, fake: Any, stream: bool
) -> None:
    fake.script, fake.finish = CALLING[:3], "length"
    user: list[Any] = [{"role": "user", "content": "x"}]
    most = sum(len(fake.text(step)) for step in fake.script)
    made: Any = await claude.messages.create(
        model="toy", max_tokens=most, tools=BLOCK_TOOLS, messages=user, stream=stream
    )
    if stream:
        events = [event async for event in made]
        assert events[-2].delta.stop_reason == "max_tokens"
    else:
        assert made.stop_reason == "max_tokens"
        assert [block.type for block in made.content] == ["thinking", "text"]
    response: Any = await sdk.responses.create(model="toy", input="x", tools=FUNCTIONS, stream=stream)
    if stream:
        last: Any = [event async for event in response][-1]
        assert last.type == "response.incomplete"
        response = last.response
    assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")
    assert [item.status for item in response.output[:-1]] == ["completed"] * 2


CLAUDE_CODE: dict[str, Any] = {
    "model": "toy",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_ab_account__session_0f0e-1"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.36; cch=0a1b2;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs.", "input_schema": {"$schema": "x", **LS}},
        {"name": "Read", "input_schema": LS, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>now</system-reminder>"},
            {"type": "text", "text": "fix it", "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "EqQB"},
            {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}},
        ]},
        {"role": "user", "content": [
            {"tool_use_id": "toolu_01", "type": "tool_result", "content": "", "is_error": False},
        ]},
        {"role": "system", "content": "A hook says so."},
        {"role": "user", "content": "go on"},
    ],
}  # fmt: skip
CODEX: dict[str, Any] = {
    "model": "toy",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<may>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": None,
         "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a"}'},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": LS},
        {"type": "custom", "name": "apply_patch", "description": "x", "format": {"type": "grammar"}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-ab",
    "text": {"verbosity": "low"},
}  # fmt: skip


async def test_claude_code(http: aiohttp.ClientSession, fake: Any) -> None:
    say(fake, "ok")
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "k"}
    async with http.post("/v1/messages?beta=true", json=CLAUDE_CODE, headers=headers) as response:
        text = await response.text()
        assert response.status == 200, text
        assert response.headers["request-id"]
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [
        (head.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for head, data in blocks
    ]
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    assert [name for name, _ in events][:2] == ["message_start", "ping"]
    assert events[-2][1]["context_management"] == {"applied_edits": []}
    assert fake.requests[0].session == "0f0e-1"
    assert fake.requests[0].tenant
    assert "system\nA hook says so.\nuser\ngo on\n" in prompt(fake)
    counting = {k: v for k, v in CLAUDE_CODE.items() if k not in ("max_tokens", "stream")}
    async with http.post("/v1/messages/count_tokens?beta=true", json=counting, headers=headers) as response:
        assert await response.json() == {"input_tokens": fake.requests[0].prompt_tokens}


async def test_codex(http: aiohttp.ClientSession, fake: Any) -> None:
    say(fake, "ok")
    async with http.post("/v1/responses", json=CODEX) as response:
        text = await response.text()
        assert response.status == 200, text
    last = json.loads(text.strip().split("\n\n")[-1].split("data: ")[1])
    assert last["type"] == "response.completed"
    assert [tool["name"] for tool in last["response"]["tools"]] == ["shell"]
    assert fake.requests[0].session == "0199-ab"
    assert "system\nYou are Codex.\n\n<may>\nuser\n<environment>\nuser\nfix it\n" in prompt(fake)


async def test_a_template_that_knows_one_system_message_only(start: Start, fake: Any) -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    server = await start(text=TextModel(fake.tokenizer, ChatTemplate(strict)), max_context=4000)
    body = {**CLAUDE_CODE, "tools": []}
    async with (
        aiohttp.ClientSession(server.url) as client,
        client.post("/v1/messages", json=body) as response,
    ):
        assert response.status == 200, await response.text()
    assert "user: <system-reminder>\nA hook says so.\n</system-reminder>\nuser: go on\n" in prompt(fake)


async def test_versions_of_the_api(http: aiohttp.ClientSession) -> None:
    body = {"model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    async with http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-01-01"}) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "valid: '2023-06-01' or later" in answer["error"]["message"]
    assert answer["request_id"] == response.headers["request-id"]


JUNK: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 10**30, "", "x", "\x00", "auto", [], [[]], [None], {}, {"type": "text"},
    {"type": None}, {"a": {}}, "é" * 300, [{"role": "user"}], {"type": "function", "name": []},
]  # fmt: skip


def mutated(value: Any, rng: random.Random) -> Any:
    """With one thing in it replaced, dropped or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return {**value, rng.choice(["type", "content", "name", "text"]): rng.choice(JUNK)}
        return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(value[at], rng), *value[at + rng.randrange(2) :]]
    return rng.choice(JUNK)


async def test_malformed_bodies_are_no_fault_of_the_server(http: aiohttp.ClientSession, fake: Any) -> None:
    say(fake, "ok")
    rng = random.Random(8)
    tokenize = {"messages": [{"role": "user", "content": "x"}], "tools": [], "return_token_strs": True}
    bodies = {
        "/v1/messages": {**CLAUDE_CODE, "tool_choice": {"type": "tool", "name": "Bash"}},
        "/v1/messages/count_tokens": CLAUDE_CODE,
        "/v1/responses": CODEX,
        "/tokenize": tokenize,
        "/detokenize": {"tokens": [1, 2]},
    }
    statuses: set[int] = set()
    for n in range(1000):
        path = list(bodies)[n % 3] if n % 10 else list(bodies)[3 + n // 10 % 2]
        body: Any = bodies[path]
        for _ in range(rng.randrange(1, 4)):
            body = mutated(body, rng)
        data = json.dumps(body).encode()
        if n % 20 == 0:
            at = rng.randrange(len(data))
            data = data[:at] + rng.choice([b"", b"\xff", b"{", b'"', b"\\ud800"]) + data[at + 1 :]
        headers = {"Content-Type": "application/json"}
        async with http.post(path, data=data, headers=headers) as response:
            text = await response.text()
            assert response.status < 500, (path, data, text)
            assert "response.failed" not in text and "event: error" not in text
            statuses.add(response.status)
    assert statuses >= {200, 400, 404}
    assert fake.held == 0


async def test_effort_and_tokens_of_chats(http: aiohttp.ClientSession, sdk: AsyncOpenAI, fake: Any) -> None:
    say(fake, "ok")
    user: list[Any] = [{"role": "user", "content": "hello"}]
    await sdk.chat.completions.create(model="toy", messages=user, reasoning_effort="high")
    assert prompt(fake).startswith("<think>\n")
    await sdk.chat.completions.create(model="toy", messages=user, reasoning_effort="none")
    assert prompt(fake).startswith("user\n")
    async with http.post("/tokenize", json={"messages": user, "return_token_strs": True}) as response:
        found = await response.json()
    ids = list(fake.requests[-1].prompt.ids())
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 9000)
    assert found["token_strs"][:2] == ["<|im_start|>", "u"]
    async with http.post("/tokenize", json={"prompt": "hello", "model": "toy"}) as response:
        assert (await response.json())["tokens"] == fake.text("hello")
    async with http.post("/detokenize", json={"tokens": fake.text("hello w")}) as response:
        assert await response.json() == {"prompt": "hello w"}


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("/tokenize", {}, "prompt", "neither of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "both of"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens", "valid: true"),
        ("/tokenize", {"messages": [], "add_special_tokens": True}, "add_special_tokens", "valid: false"),
        (
            "/tokenize",
            {"messages": [], "add_generation_prompt": False},
            "add_generation_prompt",
            "valid: true",
        ),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", "needs messages"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template", "valid: null"),
        ("/tokenize", {"prompt": "a", "promt": "x"}, "promt", "did you mean 'prompt'"),
        ("/tokenize", {"prompt": "a", "model": "b"}, "model", "valid: 'toy'"),
        ("/detokenize", {}, "tokens", "required"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "holds -1"),
        ("/detokenize", {"tokens": [10**6]}, "tokens", "valid: token ids 0.."),
    ],
)
async def test_refusals_of_tokens(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], field: str, words: str
) -> None:
    async with http.post(path, json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (404 if field == "model" else 400, field)
    assert words in error["message"]


@pytest.mark.parametrize("depth", [100, 400, 900, 5000])
async def test_deep_nests_are_no_fault_of_the_server(
    http: aiohttp.ClientSession, fake: Any, depth: int
) -> None:
    say(fake, "ok")
    nest = '{"a":' * depth + "1" + "}" * depth
    head, user = '{"model": "toy", "max_tokens": 5, ', '{"role": "user", "content": "x"}'
    function = '"name": "f", "arguments": ' + json.dumps(nest)
    calls = '{"role": "assistant", "tool_calls": [{"id": "c", "function": {' + function + "}}]}"
    item = '{"type": "function_call", "call_id": "c", ' + function + "}"
    tool = '"tools": [{"type": "function", "name": "f", "parameters": ' + nest + "}]"
    bodies = [
        ("/v1/messages", f'"messages": [{user}], "tools": [{{"name": "f", "input_schema": {nest}}}]}}'),
        ("/v1/responses", f'"input": [{item}]}}'),
        ("/v1/responses", f'"input": "x", {tool}}}'),
        ("/v1/chat/completions", f'"messages": [{user}, {calls}]}}'),
    ]
    for path, body in bodies:
        async with http.post(
            path, data=head + body, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status in ((200,) if depth <= 100 else (200, 400)), await response.text()
            assert "internal" not in await response.text()
    assert fake.held == 0
