"""Every parameter of Messages and Responses: served, accepted without effect, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bien.core.errors import UserError
from bien.gateway.parsing.calling import Calling
from bien.gateway.protocols import messages, responses
from bien.gateway.protocols.ask import Ask, Chat
from bien.gateway.protocols.thinking import Thinking

TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f"}
READ = {"messages": messages.read, "responses": responses.read}
BODIES: dict[str, dict[str, Any]] = {
    "messages": {"model": "m", "max_tokens": 5000, "messages": [{"role": "user", "content": "hi"}]},
    "responses": {"model": "m", "input": "hi"},
}


def read(api: str, extra: dict[str, Any]) -> Ask:
    return READ[api](json.dumps({**BODIES[api], **extra}).encode())


SERVED: list[tuple[str, dict[str, Any], str, Any]] = [
    ("messages", {}, "max_tokens", 5000),
    ("messages", {"stream": True}, "stream", True),
    ("messages", {"temperature": 0.25}, "temperature", 0.25),
    ("messages", {"top_p": 0.5}, "top_p", 0.5),
    ("messages", {"top_k": 40}, "top_k", 40),
    ("messages", {"stop_sequences": ["a", "b"]}, "stops", ("a", "b")),
    ("messages", {"metadata": {"user_id": "user_1_account__session_0a-b"}}, "session", "0a-b"),
    ("messages", {"metadata": {"user_id": '{"device_id":"d","session_id":"s1"}'}}, "session", "s1"),
    ("messages", {"metadata": {"user_id": "somebody"}}, "session", ""),
    ("messages", {"metadata": {"user_id": "{["}}, "session", ""),
    ("messages", {}, "thinking", Thinking(on=False)),
    ("messages", {"thinking": {"type": "disabled"}}, "thinking", Thinking(on=False)),
    ("messages", {"thinking": {"type": "adaptive"}}, "thinking", Thinking(on=True)),
    ("messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
     "thinking", Thinking(on=True, effort="max")),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 2048}},
     "thinking", Thinking(on=True, budget=2048)),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "auto"}}, "calling", Calling()),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "any"}}, "calling", Calling("required")),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "none"}}, "calling", Calling("none")),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
     "calling", Calling("required", "f")),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
     "calling", Calling(parallel=False)),
    ("responses", {}, "max_tokens", None),
    ("responses", {"max_output_tokens": 7}, "max_tokens", 7),
    ("responses", {"temperature": 1.5}, "temperature", 1.5),
    ("responses", {"top_p": 0.5}, "top_p", 0.5),
    ("responses", {"prompt_cache_key": "c1"}, "session", "c1"),
    ("responses", {}, "thinking", Thinking()),
    ("responses", {"reasoning": {"effort": "none"}}, "thinking", Thinking(on=False)),
    ("responses", {"reasoning": {"effort": "high", "summary": "auto"}}, "thinking", Thinking(True, "high")),
    ("responses", {"tools": [FUNCTION], "tool_choice": "required"}, "calling", Calling("required")),
    ("responses", {"tools": [FUNCTION], "tool_choice": "none"}, "calling", Calling("none")),
    ("responses", {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}},
     "calling", Calling("required", "f")),
    ("responses", {"tools": [FUNCTION], "parallel_tool_calls": False}, "calling", Calling(parallel=False)),
]  # fmt: skip

NEUTRAL: dict[str, dict[str, Any]] = {
    "messages": {
        "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "inference_geo": "eu",
        "speed": "fast", "container": None, "mcp_servers": [], "context_management": {"edits": []},
        "fallbacks": "default",
        "diagnostics": {}, "of_the_future": 1, "tool_choice": {"type": "none"}, "top_k": 0,
        "stop_sequences": [], "tools": [], "output_config": {"effort": "low"}, "system": [],
    },
    "responses": {
        "store": False, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "user": "u",
        "safety_identifier": "s", "service_tier": "auto", "truncation": "disabled", "background": False,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "stream_options": {"include_obfuscation": False},
        "max_tool_calls": 3, "top_logprobs": 0, "previous_response_id": None, "prompt_cache_retention": "24h",
        "client_metadata": {"x": "y"}, "tools": [{"type": "web_search"}], "parallel_tool_calls": True,
        "tool_choice": "auto", "reasoning": None, "context_management": None, "of_the_future": 1,
    },
}  # fmt: skip

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("messages", {"model": None}, "model", "Expected `str`"),
    ("messages", {"max_tokens": None}, "max_tokens", "required and missing"),
    ("messages", {"max_tokens": 0}, "max_tokens", "valid: 1 to"),
    ("messages", {"messages": []}, "messages", "empty"),
    ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool"),
    ("messages", {"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text", "no text"),
    ("messages", {"messages": [{"role": "assistant", "content": "{"}]}, "messages[0].role", "assistant's"),
    ("messages", {"system": [{"type": "image"}]}, "system[0].type", "'image'"),
    ("messages", {"temperature": 1.1}, "temperature", "from 0 to 1"),
    ("messages", {"top_p": 0}, "top_p", "above 0 to 1"),
    ("messages", {"top_k": -1}, "top_k", "valid: 0 to"),
    ("messages", {"stop_sequences": [""]}, "stop_sequences", "0 characters"),
    ("messages", {"stop_sequences": ["a"] * 17}, "stop_sequences", "at most 16"),
    ("messages", {"service_tier": "gold"}, "service_tier", "gold"),
    ("messages", {"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "without budget_tokens"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens", "1024"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 5000}}, "thinking.budget_tokens", "5000"),
    ("messages", {"output_config": {"effort": "huge"}}, "output_config.effort", "valid: none, minimal"),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}},
     "output_config.format", "not served"),
    ("messages", {"container": "c"}, "container", "valid: null"),
    ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers", "valid: []"),
    ("messages", {"thread": {"type": "create"}}, "thread", "valid: null"),
    ("messages", {"compaction": {}}, "compaction", "valid: null"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     "tools[0].type", "web_s"),
    ("messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema", "no input_schema"),
    ("messages", {"tools": [{"input_schema": {}}]}, "tools[0].name", "valid: 1 to 128"),
    ("messages", {"tools": [TOOL, TOOL]}, "tools", "second 'f'"),
    ("messages", {"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "'a b'"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice.type", "without tools"),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
     "tool_choice.name", "valid: f"),
    ("responses", {"input": []}, "input", "empty"),
    ("responses", {"input": 5}, "input", "Expected"),
    ("responses", {"max_output_tokens": 0}, "max_output_tokens", "valid: 1 to"),
    ("responses", {"temperature": 2.1}, "temperature", "from 0 to 2"),
    ("responses", {"top_p": 2}, "top_p", "above 0 to 1"),
    ("responses", {"store": True}, "store", "valid: false, null"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id", "valid: null"),
    ("responses", {"conversation": "conv_1"}, "conversation", "valid: null"),
    ("responses", {"prompt": {"id": "p"}}, "prompt", "valid: null"),
    ("responses", {"background": True}, "background", "valid: false"),
    ("responses", {"truncation": "auto"}, "truncation", '"disabled"'),
    ("responses", {"top_logprobs": 2}, "top_logprobs", "valid: 0"),
    ("responses", {"include": ["message.output_text.logprobs"]}, "include", "not served"),
    ("responses", {"context_management": [{"type": "compaction"}]}, "context_management", "valid: []"),
    ("responses", {"moderation": {"model": "x"}}, "moderation", "valid: null"),
    ("responses", {"text": {"format": {"type": "json_schema", "schema": {}}}},
     "text.format", "'json_schema'"),
    ("responses", {"reasoning": {"effort": "huge"}}, "reasoning.effort", "valid: none"),
    ("responses", {"tools": [{"type": "function"}]}, "tools[0].name", "valid: 1 to 128"),
    ("responses", {"tools": [FUNCTION, FUNCTION]}, "tools", "second 'f'"),
    ("responses", {"tool_choice": "required"}, "tool_choice", "without functions"),
    ("responses", {"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'"),
    ("responses", {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
     "tool_choice.name", "valid: f"),
]  # fmt: skip


@pytest.mark.parametrize(("api", "extra", "name", "value"), SERVED)
def test_served(api: str, extra: dict[str, Any], name: str, value: Any) -> None:
    ask = read(api, extra)
    assert isinstance(ask.prompt, Chat)
    assert getattr(ask.prompt if name in ("thinking", "calling") else ask, name) == value


@pytest.mark.parametrize("api", BODIES)
def test_what_has_no_effect_is_accepted(api: str) -> None:
    plain, more = read(api, {}), read(api, NEUTRAL[api])
    plain.style = more.style = None
    assert more == plain


@pytest.mark.parametrize(("api", "extra", "field", "words"), REFUSED)
def test_refused(api: str, extra: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read(api, extra)
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("said", "known", "variables"),
    [
        (Thinking(), {"enable_thinking"}, {}),
        (Thinking(on=False), {"enable_thinking", "tools"}, {"enable_thinking": False}),
        (Thinking(on=True), {"thinking"}, {"thinking": True}),
        (Thinking(on=True, effort="high"), {"reasoning_effort"}, {"reasoning_effort": "high"}),
        (Thinking(on=True, budget=2048), {"thinking_budget", "thinking"},
         {"thinking": True, "thinking_budget": 2048}),
        (Thinking(on=True, effort="low", budget=9), set(), {}),
    ],
)  # fmt: skip
def test_thinking_is_said_in_the_templates_words(
    said: Thinking, known: set[str], variables: dict[str, Any]
) -> None:
    assert said.variables(known) == variables
