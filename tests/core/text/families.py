"""Small tokenizers as the families ship theirs: the file's kind, the pre-tokenizer and the special tokens are
the family's, the merges are learnt from a few lines. Templates are written in each family's manner."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bien.core.text.byte_pairs import byte_alphabet
from bien.core.text.gguf_vocab import CONTROL, USER_DEFINED, gguf_tokenizer

_CORPUS = (
    "def hello(world): return 'it's 12345' # don't we'll THEY'RE Hello World HelloWorld",
    "the of and to in is you that it he for was on are as with his they at be this from 你好 世界 你好世界",
    "im_start im_end user assistant system tool think call  \n\n\t\tif x == y:\n        return None  ",
    "naïve café Zürich Ñandú привет мир こんにちは 안녕하세요 मानक हिन्दी 😀👩‍🚀",
    '{"name": "a", "arguments": {"b": [1, 2]}}',
)
VOCABULARY = 420


class Family(NamedTuple):
    kind: str  # "tokenizer.json", "tiktoken" or "gguf"
    pre: str  # tokenizer_class of a tiktoken file, pre-tokenizer of a GGUF
    special: tuple[str, ...]
    marks: tuple[str, ...]  # added tokens that are not special
    template: str


_TURNS = "{% for m in messages %}"
_END = "{% endfor %}"


def _calls(begin: str, middle: str, end: str) -> str:
    arguments = "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson"
    name = "{{ c.function.name }}"
    return f"{{% for c in m.tool_calls or [] %}}{begin}{name}{middle}{{{{ {arguments} }}}}{end}{{% endfor %}}"


FAMILIES: dict[str, Family] = {
    "kimi": Family(
        "tiktoken",
        "TikTokenTokenizer",
        ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_system|>",
         "<|open|>", "<|close|>", "<|sep|>"),
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>"),
        "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}"
        "<|im_end|>{% endif %}" + _TURNS +
        "{% set name = m.name or m.role %}"
        "{% if m.role == 'assistant' %}<|im_assistant|>{% elif m.role == 'user' %}<|im_user|>"
        "{% else %}<|im_system|>{% endif %}{{ name }}<|im_middle|>"
        "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
        "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
        + _calls("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
        + "<|im_end|>" + _END
        + "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
        "{% if thinking is not defined or thinking %}<think>{% endif %}{% endif %}",
    ),
    "qwen": Family(
        "tiktoken",
        "Qwen2Tokenizer",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}"
        "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
        "{%- set ns = namespace(last=messages|length - 1) %}"
        "{%- for m in messages[::-1] %}{%- if m.role == 'user' %}"
        "{%- set ns.last = messages|length - 1 - loop.index0 %}{%- break %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set text = m.content %}{%- set thought = m.reasoning_content or '' %}"
        "{%- if m.role == 'assistant' and not thought and '</think>' in text %}"
        "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
        "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{%- if m.role == 'tool' %}"
        "{{- '<|im_start|>user\\n<tool_response>\\n' + text + '\\n</tool_response>' }}"
        "{%- else %}{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.role == 'assistant' and thought and loop.index0 > ns.last %}"
        "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}{{- text }}{%- endif %}"
        + _calls("\n<tool_call>\n", "\n", "\n</tool_call>")
        + "{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
    ),
    "glm": Family(
        "gguf",
        "glm4",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
         "</arg_value>", "<tool_response>", "</tool_response>"),
        "[gMASK]<sop>{% if tools %}<|system|>\n{% for tool in tools %}"
        "{{ tool | tojson(ensure_ascii=False) }}\n{% endfor %}{% endif %}{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}" + _TURNS +
        "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
        "<|observation|>{% endif %}<tool_response>{{ m.content }}</tool_response>"
        "{% elif m.role == 'assistant' %}<|assistant|>"
        "{% set kept = clear_thinking is defined and not clear_thinking or loop.index0 > ns.last %}"
        "{% if m.reasoning_content and kept %}<think>{{ m.reasoning_content.strip() }}</think>"
        "{% else %}</think>{% endif %}"
        "{% if m.content.strip() %}{{ m.content.strip() }}{% endif %}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
        "{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}</tool_call>"
        "{% endfor %}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}" + _END
        + "{% if add_generation_prompt %}<|assistant|>"
        "{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}{% endif %}",
    ),
    "deepseek": Family(
        "gguf",
        "deepseek-v3",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
         "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>",
         "<｜tool▁output▁end｜>"),
        ("<think>", "</think>"),
        "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}\n\n{% endfor %}" + _TURNS
        + "{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        "{% else %}<｜Assistant｜></think>{{ m.content.split('</think>')[-1] }}"
        + _calls("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
        + "<｜end▁of▁sentence｜>{% endif %}" + _END
        + "{% if add_generation_prompt %}<｜Assistant｜>"
        "{{ '<think>' if thinking else '</think>' }}{% endif %}",
    ),
    "gpt-oss": Family(
        "tokenizer.json",
        "gpt-4o",
        ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
         "<|end|>", "<|message|>", "<|call|>"),
        (),
        "{%- macro turn(role, channel) -%}<|start|>{{ role }}"
        "{% if channel %}<|channel|>{{ channel }}{% endif %}<|message|>{%- endmacro -%}"
        "{{- turn('system', none) }}Current date: {{ strftime_now('%Y-%m-%d') }}\n\n"
        "Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
        "{%- if m.thinking -%}{{- turn('assistant', 'analysis') }}{{ m.thinking }}<|end|>{%- endif -%}"
        "{%- for c in m.tool_calls or [] -%}<|start|>assistant to=functions.{{ c.function.name }}"
        "<|channel|>commentary <|constrain|>json<|message|>{{ c.function.arguments | tojson }}<|call|>"
        "{%- else -%}{{- turn('assistant', 'final') }}{{ m.content }}<|end|>{%- endfor -%}"
        "{%- elif m.role == 'tool' -%}{{- turn('functions.' ~ (m.name or 'tool'), 'commentary') }}"
        "{{ m.content | tojson }}<|end|>"
        "{%- else -%}{{- turn(m.role, none) }}{{ m.content }}<|end|>{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}",
    ),
    "llama": Family(
        "gguf",
        "llama-bpe",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
         "<|python_tag|>"),
        (),
        "{{ bos_token }}" + _TURNS + "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
        "{{ raise_exception('Unknown role: ' + m.role) }}{% endif %}"
        "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        "{\"name\": \"{{ m.tool_calls[0].function.name }}\", \"parameters\": "
        "{{ m.tool_calls[0].function.arguments | tojson }}}"
        "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>" + _END
        + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
}  # fmt: skip


@cache
def learnt() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary whose ids are the ranks of its merges, and the merges."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=sorted(byte_alphabet()), show_progress=False
    )
    library.train_from_iterator(_CORPUS * 3, trainer)
    model = json.loads(library.to_str())["model"]
    return model["vocab"], [(a, b) for a, b in model["merges"]]


def write_family(folder: Path, name: str) -> Path:
    """The text files of a small model of a family."""
    family, (vocab, _) = FAMILIES[name], learnt()
    named = {len(vocab) + i: t for i, t in enumerate((*family.special, *family.marks))}
    config: dict[str, Any] = {"chat_template": family.template, "bos_token": family.special[0]}
    if family.kind == "tiktoken":
        alphabet = byte_alphabet()
        lines = [
            base64.b64encode(bytes(alphabet[c] for c in token)) + b" %d" % rank
            for token, rank in sorted(vocab.items(), key=lambda item: item[1])
        ]
        (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
        config["tokenizer_class"] = family.pre
        config["added_tokens_decoder"] = {
            str(i): {"content": t, "special": t in family.special} for i, t in named.items()
        }
    else:
        library = gguf_tokenizer(gguf_fields(name), name)
        library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def gguf_fields(name: str) -> dict[str, Any]:
    """The tokenizer's fields of a GGUF of a family."""
    family, (vocab, merges) = FAMILIES[name], learnt()
    kinds = {**dict.fromkeys(family.special, CONTROL), **dict.fromkeys(family.marks, USER_DEFINED)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": family.pre,
        "tokenizer.ggml.tokens": [*sorted(vocab, key=vocab.__getitem__), *kinds],
        "tokenizer.ggml.token_type": [*[1] * len(vocab), *kinds.values()],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": len(vocab),
    }
