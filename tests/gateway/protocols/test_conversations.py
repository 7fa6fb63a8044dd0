"""What Messages and Responses say becomes one conversation for the template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bien.core.errors import UserError
from bien.gateway.protocols import messages, responses
from bien.gateway.protocols.ask import Chat
from bien.gateway.protocols.sealed import seal, unseal


def of_messages(**fields: Any) -> Chat:
    prompt = messages.read_count(json.dumps({"model": "m", **fields}).encode()).prompt
    assert isinstance(prompt, Chat)
    return prompt


def of_items(items: Any, **fields: Any) -> Chat:
    prompt = responses.read(json.dumps({"model": "m", "input": items, **fields}).encode()).prompt
    assert isinstance(prompt, Chat)
    return prompt


def call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATION = [
    {"role": "system", "content": "one\n\ntwo"},
    {"role": "user", "content": "list\nall"},
    {"role": "assistant", "reasoning_content": "hm", "content": "I look.",
     "tool_calls": [call("functions.ls:0", "ls", {"path": "."}), call("b", "now", {})]},
    {"role": "tool", "tool_call_id": "functions.ls:0", "name": "ls", "content": "a\nb"},
    {"role": "tool", "tool_call_id": "b", "name": "now", "content": "Error: no clock"},
    {"role": "user", "content": "and?"},
]  # fmt: skip


def test_a_conversation_of_blocks() -> None:
    chat = of_messages(
        system=[{"type": "text", "text": "one\n\ntwo", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "list"}, {"type": "text", "text": "all"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "functions.ls:0", "name": "ls", "input": {"path": "."}},
                {"type": "tool_use", "id": "b", "name": "now", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "functions.ls:0", "content": [
                    {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"type": "tool_result", "tool_use_id": "b", "content": "no clock", "is_error": True},
                {"type": "text", "text": "and?"},
            ]},
        ],
    )  # fmt: skip
    assert chat.messages == CONVERSATION


def test_the_same_conversation_of_items() -> None:
    chat = of_items(
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "two"}]},
            {"role": "user", "content": "list\nall"},
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": seal("hm")},
            {"type": "message", "role": "assistant", "status": "completed", "id": "m",
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "call_id": "functions.ls:0", "name": "ls", "arguments": '{"path":"."}'},
            {"type": "function_call", "call_id": "b", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "functions.ls:0", "output": "a\nb"},
            {"type": "function_call_output", "call_id": "b", "output": [
                {"type": "input_text", "text": "Error: no clock"}]},
            {"role": "user", "content": "and?"},
        ],
        instructions="one",
    )  # fmt: skip
    assert chat.messages == CONVERSATION


def test_a_system_message_on_the_way_stays_where_it_is() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    assert of_messages(messages=turns, system="s").messages == [{"role": "system", "content": "s"}, *turns]
    assert of_items(turns, instructions="s").messages == [{"role": "system", "content": "s"}, *turns]


@pytest.mark.parametrize(
    ("reasoning", "read"),
    [
        ({"content": [{"type": "reasoning_text", "text": "t"}], "encrypted_content": seal("s")}, "t"),
        ({"encrypted_content": seal("s"), "summary": [{"type": "summary_text", "text": "u"}]}, "s"),
        ({"encrypted_content": "gAAAA", "summary": [{"type": "summary_text", "text": "u"}]}, "u"),
        ({"encrypted_content": "gAAAA"}, ""),
    ],
)
def test_reasoning_comes_back_as_whole_as_it_may(reasoning: dict[str, Any], read: str) -> None:
    assert of_items([{"type": "reasoning", **reasoning}]).messages[0]["reasoning_content"] == read


def test_reasoning_that_was_kept_from_the_client_comes_back() -> None:
    thought = {"type": "thinking", "thinking": "", "signature": seal("hm ✓")}
    redacted = {"type": "redacted_thinking", "data": "EroBCkYIBxgCKkD"}
    chat = of_messages(messages=[{"role": "assistant", "content": [thought, redacted]}])
    assert chat.messages == [{"role": "assistant", "content": "", "reasoning_content": "hm ✓"}]
    assert unseal("bien1.%%") is unseal("bien1./w==") is None


def test_tools_are_functions_of_the_template() -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string"}}}
    expected = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}]
    tool = {"name": "f", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    assert of_messages(messages=[{"role": "user", "content": "a"}], tools=[tool]).tools == expected
    hosted = [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ]
    function = {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": False}
    assert of_items("a", tools=[*hosted, function]).tools == expected
    assert of_items("a", tools=hosted).tools is None


@pytest.mark.parametrize(
    "kind", ["image", "document", "search_result", "server_tool_use", "container_upload"]
)
def test_blocks_of_other_kinds_are_refused_by_name(kind: str) -> None:
    for content in (
        [{"type": kind, "source": {}}],
        [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": kind}]}],
    ):
        turns = [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": content},
        ]
        with pytest.raises(UserError, match=f"has type '{kind}'; valid: 'text'") as caught:
            of_messages(messages=turns)
        assert caught.value.field is not None and caught.value.field.startswith("messages[1].content[0]")


@pytest.mark.parametrize(
    ("item", "field", "words"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type", "'item_reference'; valid: custom_tool_call"),
        ({"type": "web_search_call", "id": "x"}, "input[0].type", "'web_search_call'"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type", "'input_image'"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].type", "'input_file'"),
        ({"role": "tool", "content": "x"}, "input[0].role", "role 'tool'"),
        ({"role": "user"}, "input[0].content", "no content"),
        ({"type": "function_call", "name": "f"}, "input[0].call_id", "no call_id"),
        (
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            "input[0].call_id",
            "'c' answers no",
        ),
    ],
)
def test_items_that_are_not_served_are_refused_by_name(item: Any, field: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        of_items([item])
    assert caught.value.field == field


def test_a_result_without_its_call_is_refused() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    with pytest.raises(UserError, match="'c' answers no call") as caught:
        of_messages(messages=[{"role": "user", "content": [result]}])
    assert caught.value.field == "messages[0].content[0].tool_use_id"
