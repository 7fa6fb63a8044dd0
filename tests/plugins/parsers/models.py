"""Small models' text sides: tokens and chat templates in each family's manner."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from tokenizers import AddedToken

from bien.core.providers import Context, NoParameters
from bien.core.testing.text import byte_level
from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.core.text.tokenizer import Tokenizer
from bien.gateway.parsing.dialects import Dialect, dialect_of
from bien.plugins.parsers import deepseek, glm, harmony, hermes, kimi_k2, kimi_k3, qwen3_coder


class Model(NamedTuple):
    module: Any
    name: str  # of its parser
    special: tuple[str, ...]  # tokens without text
    others: tuple[str, ...]  # tokens that have text
    tail: str  # what its template writes behind the assistant's head, always
    body: str  # the assistant's turn `m` behind that
    raw: bool = False  # whether strings stand as they are between tags


def _thought(before: str, after: str) -> str:
    return (
        f"{{% if m.reasoning_content %}}{{{{ '{before}' ~ m.reasoning_content ~ '{after}' }}}}{{% endif %}}"
    )


def _calls(head: str, tail: str, each: str = "") -> str:
    return f"{{% for c in m.tool_calls or [] %}}{head}{each}{tail}{{% endfor %}}"


_ITEMS = "{{% for k, v in c.function.arguments.items() %}}{}{{% endfor %}}"
_RAW = "(v if v is string else v | tojson)"
_JSON = "{{ c.function.arguments | tojson }}"

MODELS: dict[str, Model] = {
    "qwen3": Model(
        hermes,
        "hermes",
        (),
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        "",
        _thought("<think>\\n", "\\n</think>\\n\\n")
        + "{{ m.content }}"
        + _calls(
            "{{ '\\n<tool_call>\\n' }}",
            "{{ '\\n</tool_call>' }}",
            '{"name": {{ c.function.name | tojson }}, "arguments": ' + _JSON + "}",
        ),
    ),
    "glm-4.7": Model(
        glm,
        "glm",
        (),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
         "</arg_value>"),
        "<think>",
        "{{ m.reasoning_content or '' }}</think>{{ m.content }}"
        + _calls("<tool_call>{{ c.function.name }}", "</tool_call>",
                 _ITEMS.format("<arg_key>{{ k }}</arg_key><arg_value>{{ " + _RAW + " }}</arg_value>")),
        raw=True,
    ),
    "qwen3-coder": Model(
        qwen3_coder,
        "qwen3-coder",
        (),
        ("<tool_call>", "</tool_call>"),
        "",
        "{{ m.content }}"
        + _calls("{{ '\\n<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}",
                 "{{ '</function>\\n</tool_call>' }}",
                 _ITEMS.format("{{ '<parameter=' ~ k ~ '>\\n' ~ " + _RAW + " ~ '\\n</parameter>\\n' }}")),
        raw=True,
    ),
    "kimi-k2": Model(
        kimi_k2,
        "kimi-k2",
        (),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
         "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>"),
        "",
        _thought("<think>", "</think>")
        + "{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>"
        + _calls("<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>", "<|tool_call_end|>", _JSON)
        + "<|tool_calls_section_end|>{% endif %}",
    ),
    "kimi-k3": Model(
        kimi_k3,
        "kimi-k3",
        ("<|open|>", "<|close|>", "<|sep|>"),
        (),
        "<|open|>think<|sep|>",
        "{{ m.reasoning_content or '' }}<|close|>think<|sep|>"
        "<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>"
        "{% if m.tool_calls %}<|open|>tools<|sep|>"
        + _calls('<|open|>call tool="{{ c.function.name }}" index="{{ loop.index }}"<|sep|>',
                 "<|close|>call<|sep|>",
                 _ITEMS.format('<|open|>argument key="{{ k }}" type="{{ "string" if v is string else "other"'
                               ' }}"<|sep|>{{ ' + _RAW + " }}<|close|>argument<|sep|>"))
        + "<|close|>tools<|sep|>{% endif %}<|close|>message<|sep|>",
    ),
    "deepseek-v3.1": Model(
        deepseek,
        "deepseek",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
         "<｜tool▁sep｜>"),
        ("<think>", "</think>"),
        "",
        _thought("<think>", "</think>")
        + "{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + _calls("<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _JSON)
        + "<｜tool▁calls▁end｜>{% endif %}",
    ),
    "deepseek-v4": Model(
        deepseek,
        "deepseek",
        (),
        ("<think>", "</think>", "｜DSML｜"),
        "<think>",
        "{{ m.reasoning_content or '' }}</think>{{ m.content }}"
        "{% if m.tool_calls %}{{ '\\n\\n<｜DSML｜tool_calls>\\n' }}"
        + _calls("{{ '<｜DSML｜invoke name=\"' ~ c.function.name ~ '\">\\n' }}",
                 "{{ '</｜DSML｜invoke>\\n' }}",
                 _ITEMS.format("{{ '<｜DSML｜parameter name=\"' ~ k ~ '\" string=\"' ~ "
                               "('true' if v is string else 'false') ~ '\">' ~ " + _RAW +
                               " ~ '</｜DSML｜parameter>\\n' }}"))
        + "</｜DSML｜tool_calls>{% endif %}",
        raw=True,
    ),
    "gpt-oss": Model(
        harmony,
        "harmony",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        (),
        "<|start|>assistant",
        "{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
        "<|start|>assistant{% endif %}"
        "<|channel|>{{ 'commentary' if m.tool_calls else 'final' }}<|message|>{{ m.content }}<|end|>"
        + _calls("<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary "
                 "<|constrain|>json<|message|>", "<|call|>", _JSON),
    ),
}  # fmt: skip
END = "<|im_end|>"  # the stop token


@cache
def text_model(name: str) -> TextModel:
    model = MODELS[name]
    library = byte_level()
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in model.special])
    library.add_tokens([AddedToken(t, special=False, normalized=False) for t in model.others])
    template = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + model.tail + model.body + "{% else %}"
        "{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + model.tail + "{% endif %}"
    )
    return TextModel(Tokenizer(library), ChatTemplate(template))


@cache
def dialect(name: str) -> Dialect:
    """The one that the template is found to speak."""
    text = text_model(name)
    assert dialect_of(text.template) == MODELS[name].name
    provider = next(iter(MODELS[name].module.bien_providers()))
    assert provider.name == MODELS[name].name
    return Dialect(provider.factory(NoParameters(), Context()), text)
