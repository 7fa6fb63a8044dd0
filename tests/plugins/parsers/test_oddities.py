"""What models write that their templates do not: marks left out, text where none should be, nearly JSON."""

from __future__ import annotations

from typing import Any

import pytest

from bien.gateway.parsing.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text, merged
from bien.gateway.parsing.parser import Opening
from bien.gateway.parsing.reader import Reader
from bien.gateway.parsing.tools import Tools
from bien.gateway.testing.turns import TOOLS
from tests.plugins.parsers.test_suite import CASES, suite


def read(name: str, text: str, *, ended: bool = True, tools: Any = TOOLS) -> list[Any]:
    """Events, in short: reasoning as ("think", text), a call as (name, arguments, complete)."""
    results = []
    for pieces in ([text], [*text]):
        parser = suite(name)().build().begin(Opening(CASES[name][2], Tools(tools)))
        events = [event for piece in pieces for event in parser.push(piece)]
        results.append(merged([*events, *parser.finish(ended)]))
    assert results[0] == results[1]
    return short(results[0])


def short(events: list[Event]) -> list[Any]:
    out: list[Any] = []
    for event in events:
        if isinstance(event, Text):
            out.append(event.text)
        elif isinstance(event, Reasoning):
            out.append(("think", event.text))
        elif isinstance(event, CallBegin):
            out.append((event.name, "", None))
        elif isinstance(event, CallArguments):
            out[-1] = (out[-1][0], event.text, None)
        else:
            assert isinstance(event, CallEnd)
            out[-1] = (*out[-1][:2], event.complete)
    return out


EMPTY = ("look-up.now", "{}", True)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        # Hermes
        ("hermes", 'a <tool_call>{"name": "do_it", "parameters": {"n": 1}}</tool_call> b',
         ["a", ("do_it", '{"n": 1}', True), "b"]),
        ("hermes", '<tool_call>{"id": [1], "arguments": {"n": 1}, "name": "do_it"}',
         [("do_it", '{"n": 1}', True)]),
        ("hermes", '<tool_call>{"name": "do_it", "arguments": "{\\"n\\": 1}"}</tool_call>',
         [("do_it", '{"n": 1}', True)]),
        ("hermes", '<tool_call>{"name": "do_it", "arguments": null}</tool_call>', [("do_it", "{}", True)]),
        ("hermes", '<tool_call>{"name": "do_it", "arguments": {"n": 1}</tool_call>x',
         [("do_it", '{"n": 1}', True), "x"]),
        ("hermes", '<tool_call>{"name": "do_it", "arguments": {"n": 1}', [("do_it", '{"n": 1}', True)]),
        ("hermes", '<tool_call>{"name": "do_it", "arguments": {"n": nope}}</tool_call>',
         [("do_it", '{"n": ', False), "nope}}</tool_call>"]),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
        ("hermes", "<tool_call>none</tool_call>", ["<tool_call>none</tool_call>"]),
        ("hermes", "<tool_call><tool_call>{}</tool_call>", ["<tool_call><tool_call>{}</tool_call>"]),
        ("hermes", "Say <think> aloud.", ["Say <think> aloud."]),
        ("hermes", "<think>a<tool_call>b</think>c", [("think", "a<tool_call>b"), "c"]),
        ("hermes", "<think>\n\n</think>\n\nc", ["c"]),
        ("hermes", "</think>\n\nc", ["c"]),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>',
         ['<tool_call>{"name": "\\ud800"}</tool_call>']),
        ("hermes", '<tool_call>{"name": "do_it", "arguments": "{\\"s\\": \\"\\ud800\\"}"}',
         [("do_it", '"{\\"s\\": \\"\\ud800\\"}"', True)]),
        ("hermes", '<think>a\n<tool_call>{"name": "do_it", "arguments": {}}</tool_call> b</think>c',
         [("think", "a"), ("do_it", "{}", True), "b</think>c"]),
        ("deepseek-v4", 'a<｜DSML｜tool_calls><｜DSML｜invoke name="look-up.now"></｜DSML｜invoke>',
         [("think", "a"), EMPTY]),
        ("kimi-k2", "<think>a <|tool_calls_section_begin|> b</think>c", [("think", "ab"), "c"]),
        # GLM
        ("glm-4.7", "why<tool_call>look-up.now</tool_call>", [("think", "why"), EMPTY]),
        ("glm-4.7", "</think><tool_call>look-up.now", ["<tool_call>look-up.now"]),
        ("glm-4.7", "</think><tool_call>do_it<arg_key>n</arg_key><arg_value>1</arg_value>",
         [("do_it", '{"n": 1}', True)]),
        ("glm-4.7", "</think><tool_call>do_it<arg_key>n</arg_key></tool_call>", [("do_it", "{}", True)]),
        ("glm-4.7", "</think><tool_call>do_it<arg_key>n</arg_key><arg_value>1</arg_value>?</tool_call>!",
         [("do_it", '{"n": 1}', True), "?!"]),
        ("glm-4.7", "</think>use <tool_call> tags", ["use <tool_call> tags"]),
        ("glm-4.5", "<think></think>\n<tool_call>look-up.now\n</tool_call>", [EMPTY]),
        # Qwen3-Coder
        ("qwen3-coder", "a\n<function=look-up.now>\n</function>\n</tool_call>", ["a", EMPTY]),
        ("qwen3-coder", "<tool_call>\n<function=do_it>\n<parameter=n>\n1\n</parameter>\n</tool_call>b",
         [("do_it", '{"n": 1}', True), "b"]),
        ("qwen3-coder", "<tool_call>\nplease\n", ["<tool_call>\nplease\n"]),
        ("qwen3-coder", "<tool_call><function=do_it><parameter=s>a</parameter></function></tool_call>",
         [("do_it", '{"s": "a"}', True)]),
        # Kimi
        ("kimi-k2", "<think>a<|tool_calls_section_begin|><|tool_call_begin|>functions.do_it:3"
         '<|tool_call_argument_begin|>{"n": 1}', [("think", "a"), ("do_it", '{"n": 1}', True)]),
        ("kimi-k2", "<|tool_call_begin|>look-up.now<|tool_call_argument_begin|><|tool_call_end|>x",
         [EMPTY, "x"]),
        ("kimi-k3", '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="look-up.now"<|sep|>',
         [EMPTY]),
        ("kimi-k3", '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="a&quot;&amp;"<|sep|>'
         '<|open|>argument key="k"<|sep|> v <|close|>argument<|sep|><|close|>tools<|sep|>',
         [('a"&', '{"k": " v "}', True)]),
        ("kimi-k2", "<|tool_call_begin|>functions.<|tool_call_argument_begin|>{}",
         ["<|tool_call_begin|>functions.<|tool_call_argument_begin|>{}"]),
        ("kimi-k3", "<|close|>think<|sep|>bare text", ["bare text"]),
        # DeepSeek
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
         [("function", "{}", True)]),
        ("deepseek-v4", '</think><｜DSML｜tool_calls><｜DSML｜invoke name="do_it">{"n": 1}</｜DSML｜invoke>',
         [("do_it", '{"n": 1}', True)]),
        ("deepseek-v4", '</think><｜DSML｜function_calls><｜DSML｜invoke name="do_it">'
         '<｜DSML｜parameter name="s">1</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
         [("do_it", '{"s": "1"}', True)]),
        # harmony
        ("harmony", "No channel at all.", ["No channel at all."]),
        ("harmony", ' to=functions.do_it<|channel|>commentary<|message|>{"n": 1}',
         [("do_it", '{"n": 1}', True)]),
        ("harmony", "<|channel|>commentary to=functions.<|message|>{}", ["{}"]),
        ("harmony", "<|channel|>analysis to=python<|message|>1+1<|call|>", [("think", "1+1")]),
        ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
         "<|end|><|start|>assistant<|channel|>final<|message|>c<|return|>", [("think", "a\nb"), "c"]),
        ("harmony", "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final",
         ["First."]),
    ],
)  # fmt: skip
def test_it_is_read_as(name: str, text: str, found: list[Any]) -> None:
    assert read(name, text) == found


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("hermes", 'a\n<tool_call>{"name": "do', ["a"]),
        ("hermes", 'a\n<tool_call>{"name": "do_it", "arguments": {"n": 12',
         ["a", ("do_it", '{"n": ', False)]),
        ("hermes", "a <tool", ["a <tool"]),
        ("glm-4.7", "why ", [("think", "why ")]),
        ("glm-4.7", "</think><tool_call>do_it<arg_key>s</arg_key><arg_value>a</arg",
         [("do_it", '{"s": "a</arg', False)]),
        ("glm-4.7", "</think><tool_call>do_it<arg_key>n</arg_key><arg_value>1</arg_value>",
         [("do_it", '{"n": 1', False)]),
        ("kimi-k3", '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="look-up.now"<|sep|>',
         [("look-up.now", "", False)]),
        ("harmony", "<|channel|>commentary to=functions.do_it<|message|>", [("do_it", "", False)]),
    ],
)  # fmt: skip
def test_what_is_sent_of_an_answer_that_is_cut(name: str, text: str, found: list[Any]) -> None:
    assert read(name, text, ended=False) == found


def test_between_calls_there_may_be_text() -> None:
    call = '<tool_call>{"name": "look-up.now", "arguments": {}}</tool_call>'
    assert read("hermes", f"a\n{call}\nb\n{call}{call} c ") == ["a", EMPTY, "b", EMPTY, EMPTY, "c "]


def test_a_row_of_pieces_is_read_in_time_that_grows_with_it() -> None:
    """By counting: what is held when an argument is long must not be looked at again with each piece."""
    looked = 0
    load = Reader._load

    def counted(self: Reader) -> None:
        nonlocal looked
        load(self)
        looked += len(self._text) - self._at

    texts = {
        "hermes": '<tool_call>{"name": "do_it", "arguments": {"s": "',
        "glm-4.7": "</think><tool_call>do_it<arg_key>s</arg_key><arg_value>",
        "kimi-k3": '<|open|>call tool="do_it"<|sep|><|open|>argument key="s" type="object"<|sep|>{"',
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "_load", counted)
        for name, text in texts.items():
            parser = suite(name)().build().begin(Opening("", Tools(TOOLS)))
            parser.push(text)
            looked = 0
            for _ in range(2000):
                parser.push("word < ")
            assert looked < 4 * 2000 * len("word < ")
