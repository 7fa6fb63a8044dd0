"""Turns as each family's chat template writes them: formats of their published templates, in our words."""

from __future__ import annotations

import json
from typing import Any

from bien.gateway.testing.turns import Turn


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def think(turn: Turn, form: str = "<think>\n{}\n</think>\n\n") -> str:
    return form.format(turn.reasoning) if turn.reasoning else ""


def hermes(turn: Turn) -> str:
    calls = [
        f'<tool_call>\n{{"name": {dumps(c.name)}, "arguments": {dumps(c.arguments)}}}\n</tool_call>'
        for c in turn.calls
    ]
    return think(turn) + "\n".join([turn.text, *calls] if turn.text else calls)


def glm47(turn: Turn) -> str:
    """Behind "<think>"."""
    out = f"{turn.reasoning}</think>{turn.text}"
    for call in turn.calls:
        pairs = (f"<arg_key>{k}</arg_key><arg_value>{raw(v)}</arg_value>" for k, v in call.arguments.items())
        out += f"<tool_call>{call.name}{''.join(pairs)}</tool_call>"
    return out


def glm45(turn: Turn) -> str:
    out = f"\n<think>{turn.reasoning}</think>\n{turn.text}"
    for call in turn.calls:
        pairs = (
            f"<arg_key>{k}</arg_key>\n<arg_value>{raw(v)}</arg_value>\n" for k, v in call.arguments.items()
        )
        out += f"\n<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"
    return out


def qwen3_coder(turn: Turn) -> str:
    out = think(turn) + turn.text
    for call in turn.calls:
        pairs = (f"<parameter={k}>\n{raw(v)}\n</parameter>\n" for k, v in call.arguments.items())
        out += f"\n<tool_call>\n<function={call.name}>\n{''.join(pairs)}</function>\n</tool_call>"
    return out


def kimi_k2(turn: Turn) -> str:
    out = think(turn, "<think>{}</think>") + turn.text
    calls = "".join(
        f"<|tool_call_begin|>{c.id}<|tool_call_argument_begin|>{dumps(c.arguments)}<|tool_call_end|>"
        for c in turn.calls
    )
    return out + (f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else "")


def kimi_k3(turn: Turn) -> str:
    """Behind "<|open|>think<|sep|>"."""
    out = f"{turn.reasoning}<|close|>think<|sep|><|open|>response<|sep|>{turn.text}<|close|>response<|sep|>"
    if turn.calls:
        out += "<|open|>tools<|sep|>"
    for n, call in enumerate(turn.calls):
        out += f'<|open|>call tool="{call.name}" index="{n + 1}"<|sep|>'
        for key, value in call.arguments.items():
            kind = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
            said = kind.get(type(value), "number")
            out += f'<|open|>argument key="{key}" type="{said}"<|sep|>{raw(value)}<|close|>argument<|sep|>'
        out += "<|close|>call<|sep|>"
    return out + ("<|close|>tools<|sep|>" if turn.calls else "") + "<|close|>message<|sep|>"


def deepseek_v3(turn: Turn) -> str:
    out = think(turn) + turn.text
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{dumps(c.arguments)}\n```<｜tool▁call▁end｜>"
        for c in turn.calls
    )
    return out + (f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else "")


def deepseek_v31(turn: Turn) -> str:
    out = think(turn, "<think>{}</think>") + turn.text
    calls = "".join(
        f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{dumps(c.arguments)}<｜tool▁call▁end｜>"
        for c in turn.calls
    )
    return out + (f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else "")


def deepseek_v4(turn: Turn) -> str:
    """Behind "<think>"."""
    out = f"{turn.reasoning}</think>{turn.text}"
    if turn.calls:
        out += "\n\n<｜DSML｜tool_calls>\n"
    for call in turn.calls:
        out += f'<｜DSML｜invoke name="{call.name}">\n'
        for key, value in call.arguments.items():
            string = "true" if isinstance(value, str) else "false"
            out += f'<｜DSML｜parameter name="{key}" string="{string}">{raw(value)}</｜DSML｜parameter>\n'
        out += "</｜DSML｜invoke>\n"
    return out + ("</｜DSML｜tool_calls>" if turn.calls else "")


def harmony(turn: Turn) -> str:
    """Behind "<|start|>assistant"."""
    parts = [f"<|channel|>analysis<|message|>{turn.reasoning}<|end|>"] if turn.reasoning else []
    channel = "commentary" if turn.calls else "final"
    if turn.text:
        parts.append(f"<|channel|>{channel}<|message|>{turn.text}<|end|>")
    parts += [
        f"<|channel|>commentary to=functions.{c.name} <|constrain|>json<|message|>"
        f"{dumps(c.arguments)}<|call|>"
        for c in turn.calls
    ]
    return "<|start|>assistant".join(parts)
