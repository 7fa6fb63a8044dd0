"""What a chat template writes of an assistant's turn is read back from its tokens, any number at a time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bien.core.request import TokenIds
from bien.core.worker.messages import Output
from bien.gateway.http.progress import Progress
from bien.gateway.parsing.events import CallBegin, Event, merged
from bien.gateway.parsing.tools import Tools
from bien.gateway.testing.turns import TOOLS, TYPED, Call, Turn, arguments_of, begins_json, read_back
from tests.plugins.parsers.models import END, MODELS, dialect, text_model

USER = {"role": "user", "content": "hello"}
_MARKS = ["</tool_call>", "<tool_call>", "<|close|>argument<|sep|>", "</arg_value>", "</parameter>",
          "<|call|>", "<|tool_call_end|>", "<｜tool▁call▁end｜>", "</｜DSML｜parameter>",
          "</think>"]  # fmt: skip
models = pytest.mark.parametrize("name", MODELS)
quick = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def strings(name: str) -> st.SearchStrategy[str]:
    """What stands in strings: also marks, unless they end a raw one."""
    words = st.text(max_size=6) | st.sampled_from(['"', "\\", "\n", "\\n", "{", "<", "😀", "Zürich", " "])
    if not MODELS[name].raw:
        words |= st.sampled_from(_MARKS)
    return st.lists(words, max_size=5).map("".join)


@st.composite
def turns(draw: Any, name: str) -> Turn:
    text = strings(name)
    kinds: dict[str, Any] = {
        "s": text,
        "n": st.integers(),
        "x": st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(),
        "z": st.none(),
        "o": st.dictionaries(text, st.lists(text | st.none(), max_size=2), max_size=2),
        "a": st.lists(st.dictionaries(text, st.integers(), max_size=2), max_size=2),
        "u": st.none() | text.filter(lambda t: t != "null"),
    }
    assert kinds.keys() == TYPED.keys()
    calls = []
    for n in range(draw(st.integers(0, 3))):
        chosen = draw(st.sets(st.sampled_from(sorted(kinds)), max_size=4))
        arguments = {k: draw(kinds[k]) for k in sorted(chosen)}
        function = "do_it" if chosen else draw(st.sampled_from(["do_it", "look-up.now"]))
        calls.append(Call(function, arguments, f"functions.{function}:{n}"))
    plain = st.text(max_size=12).map(lambda t: t.strip().replace("<", "")) | st.just("Well, so.")
    reasoning = draw(plain) if name != "qwen3-coder" else ""
    return Turn(reasoning, draw(plain), calls)


def answer_of(name: str, turn: Turn) -> tuple[list[int], list[int]]:
    """Prompt, and the answer's tokens up to the stop token."""
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in turn.calls
    ]
    said = {"role": "assistant", "content": turn.text, "reasoning_content": turn.reasoning or None}
    text = text_model(name)
    prompt = list(text.encode_chat([USER], None, TOOLS).ids())
    whole = list(text.encode_chat([USER, said | ({"tool_calls": calls} if calls else {})], None, TOOLS).ids())
    assert whole[: len(prompt)] == prompt
    answer = whole[len(prompt) :]
    return prompt, answer[: answer.index(text.tokenizer.id_of(END)) + 1]


def progress(name: str, prompt: list[int], stops: tuple[str, ...] = (), tools: Any = TOOLS) -> Progress:
    made = dialect(name)
    output = text_model(name).output(prompt[-16:], stops, marks=made.marks)
    return Progress(output, reply=made.reply(prompt[-16:], Tools(tools)))


def events_of(reader: Progress, steps: list[list[int]], finish: str = "stop") -> list[Event]:
    out: list[Event] = []
    for n, ids in enumerate(steps):
        output = Output(1, len(ids), TokenIds.of(ids).packed)
        if n == len(steps) - 1:
            output.finish = finish
        out += reader.take(output).events
        if reader.finish is not None:
            break
    return merged(out)


def without_ids(events: list[Event]) -> list[Event]:
    return [CallBegin(e.index, e.name) if isinstance(e, CallBegin) else e for e in events]


@models
@quick
@given(data=st.data())
def test_a_turn_is_read_back(name: str, data: Any) -> None:
    turn = data.draw(turns(name))
    prompt, answer = answer_of(name, turn)
    one = progress(name, prompt)
    events = events_of(one, [answer])
    found = read_back(events)
    assert all(c.id for c in found.calls) and len({c.id for c in found.calls}) == len(found.calls)
    if name != "kimi-k2":  # the others have no ids in the text
        for call, sent in zip(found.calls, turn.calls, strict=True):
            call.id = sent.id
    assert found == turn
    assert one.finish == ("tool_calls" if turn.calls else "stop")
    cuts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    steps, at = [], 0
    while at < len(answer):
        steps.append(answer[at : at + cuts[len(steps) % len(cuts)]])
        at += len(steps[-1])
    many = progress(name, prompt)
    assert without_ids(events_of(many, steps)) == without_ids(events)
    assert (many.tokens, many.reasoning, many.finish) == (len(answer), one.reasoning, one.finish)
    assert (one.reasoning > 0) == bool(turn.reasoning) or MODELS[name].tail or name == "gpt-oss"


@models
@quick
@given(data=st.data())
def test_an_answer_that_is_cut(name: str, data: Any) -> None:
    prompt, answer = answer_of(name, data.draw(turns(name)))
    end = data.draw(st.integers(0, len(answer) - 1))
    reader = progress(name, prompt)
    events = events_of(reader, [answer[:end]], "length")
    assert reader.finish == "length"
    for arguments in arguments_of(events, cut=True):
        assert begins_json(arguments)


@models
@quick
@given(data=st.data())
def test_any_tokens_are_no_error(name: str, data: Any) -> None:
    """Also bytes that are no text, marks anywhere, and whatever the vocabulary has."""
    prompt, answer = answer_of(name, data.draw(turns(name)))
    some = st.lists(st.integers(0, text_model(name).tokenizer.vocab_size - 1), max_size=20)
    at = data.draw(st.integers(0, len(answer)))
    ids = [*answer[:at], *data.draw(some), *answer[at:]]
    whole, single = progress(name, prompt), progress(name, prompt)
    events = events_of(whole, [ids])
    assert without_ids(events) == without_ids(events_of(single, [[i] for i in ids]))
    assert (whole.reasoning, whole.finish) == (single.reasoning, single.finish)
    for arguments in arguments_of(events, cut=True):
        assert begins_json(arguments)


@models
@quick
@given(data=st.data())
def test_stop_strings(name: str, data: Any) -> None:
    """They end the answer where the model writes them, in calls too, in any number of tokens per step."""
    prompt, answer = answer_of(name, data.draw(turns(name)))
    stops = tuple(
        data.draw(st.sets(st.sampled_from(["o", "Z", "do_it", '"', "so.", "ll"]), min_size=1, max_size=2))
    )
    whole, single = progress(name, prompt, stops), progress(name, prompt, stops)
    events = events_of(whole, [answer])
    assert without_ids(events) == without_ids(events_of(single, [[i] for i in answer]))
    assert (whole.stop, whole.finish, whole.tokens) == (single.stop, single.finish, single.tokens)
    assert whole.stop is not None or whole.tokens == len(answer)
    for arguments in arguments_of(events, cut=True):
        assert begins_json(arguments)


@pytest.mark.parametrize("name", ["kimi-k3", "gpt-oss"])
def test_only_tokens_are_marks_where_they_are_exact(name: str) -> None:
    """A model that writes about its own format, in ordinary tokens, writes text."""
    text = "Write <|close|>argument<|sep|> or <|end|><|start|> here."
    turn = Turn("So <|close|>think<|sep|>", text, [Call("do_it", {"s": text}, "id")])
    found = read_back(events_of(progress(name, answer_of(name, turn)[0]), [answer_of(name, turn)[1]]))
    found.calls[0].id = "id"
    assert found == turn


def test_the_others_know_marks_however_they_are_spelled() -> None:
    """As vLLM and SGLang do."""
    ids = list(text_model("qwen3").tokenizer.encode_plain('<tool_call>{"name": "do_it"}</tool_call>').ids())
    events = events_of(progress("qwen3", [3]), [[*ids, 1]])
    assert [type(e).__name__ for e in events] == ["CallBegin", "CallArguments", "CallEnd"]
