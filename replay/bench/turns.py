"""What a session's second turn costs the gateway until its prompt's ids are there: CPU time.

python -m bien.replay.bench.turns [--tokens 200000] [--new 200] [--rounds 7] [--model smollm2-135m] [--json F]

A coding agent's conversation of /v1/messages (sources of the standard library as what its tools read) gets
one more answer and one more result, of `--new` tokens together. Measured from the body on: decoding,
guarding, rendering, cutting, encoding, comparing with the turn before. `full` is the same without anything
kept; `encoding` the tokenizer alone, of the whole text. All three take turns, with a conversation of its own
per round; medians of the CPU time of the process, the library's threads included. ids are compared each time.
The tokenizer is the model's, with the control tokens of the template: ChatML, or one in GLM's manner, which
forgets thoughts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from bien.core.models.fetch import resolve_model
from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.core.text.tokenizer import Tokenizer
from bien.gateway.prompt import Prompts
from bien.gateway.protocols import messages

_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}"
)
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    "glm": "[gMASK]<sop>{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|><tool_response>{{ m.content }}</tool_response>"
    "{% elif m.role == 'assistant' %}<|assistant|>{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content.strip() }}</think>{% else %}</think>{% endif %}{{ m.content.strip() }}"
    + _CALLS
    + "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}<|assistant|><think>",
}
SPECIAL = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "glm": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
RESULT = 6000  # characters of what a tool read
WAYS = ("second_turn", "full", "encoding")


def text_model(folder: Path, name: str) -> TextModel:
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL[name]])
    library.add_tokens([AddedToken(t, normalized=False) for t in MARKS])
    return TextModel(Tokenizer(library), ChatTemplate(TEMPLATES[name]))


def code() -> Iterator[str]:
    """Results without end."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    while True:
        for path in paths:
            text = path.read_text("utf-8", "replace")
            yield from (text[at : at + RESULT] for at in range(0, len(text), RESULT))


def step(n: int, result: str) -> list[dict[str, Any]]:
    thought = {"type": "thinking", "thinking": f"I should read part {n}.", "signature": ""}
    call = {"type": "tool_use", "id": f"c{n}", "name": "read", "input": {"part": n}}
    answer = {"type": "tool_result", "tool_use_id": f"c{n}", "content": result}
    said = {"type": "text", "text": f"Part {n}."}
    return [{"role": "assistant", "content": [thought, said, call]}, {"role": "user", "content": [answer]}]


def bodies(text: TextModel, tokens: int, new: int, seed: int) -> tuple[bytes, bytes]:
    """A session of about so many tokens, and the same one turn on."""
    first: list[dict[str, Any]] = [{"role": "user", "content": f"Task {seed}: read all of it."}]
    held, n, results = 0, 0, code()
    while held < tokens:
        result = f"{seed}.{n}\n{next(results)}"
        first += step(n, result)
        held += len(text.tokenizer.encode_plain(result))
        n += 1
    ids = list(text.tokenizer.encode_plain(next(results)).ids())[: max(1, new - 30)]
    second = [*first, *step(n, text.tokenizer.decode(ids))]
    bodies = ({"model": "m", "max_tokens": 1000, "messages": found} for found in (first, second))
    one, two = (json.dumps(body).encode() for body in bodies)
    return one, two


async def cost(prompts: Prompts, body: bytes) -> tuple[float, bytes]:
    """Milliseconds of CPU time, and the ids."""
    begin = time.process_time()
    ids = await prompts.encode(messages.read(body), tenant="t", answered=True)
    return 1000 * (time.process_time() - begin), ids.packed


async def measure(folder: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    text, bare = text_model(folder, name), text_model(folder, name)
    prompts = Prompts(text, max_context=1 << 30)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    sizes = []
    for seed in range(args.rounds + 1):  # the first one warms up
        one, two = bodies(text, args.tokens, args.new, seed)
        ask = messages.read(one)
        before = len(await prompts.encode(ask, tenant="t", answered=True))
        prompts.answered(ask, b"")
        second, ids = await cost(prompts, two)
        full, whole = await cost(Prompts(bare, max_context=1 << 30), two)
        rendered = text.spelled(list(memoryview(ids).cast("I")))
        begin = time.process_time()
        text.tokenizer.encode(rendered)
        alone = 1000 * (time.process_time() - begin)
        if ids != whole:
            raise SystemExit(f"{name}: ids differ from those of the whole text")
        if seed:
            for way, found in zip(WAYS, (second, full, alone), strict=True):
                taken[way].append(found)
            sizes.append((before, len(ids) // 4))
        bare = text_model(folder, name)
    medians = {f"{way}_ms": round(statistics.median(found), 2) for way, found in taken.items()}
    worst = round(max(taken["second_turn"]), 2)
    return {"template": name, "tokens": sizes[-1][0], "second": sizes[-1][1], **medians, "worst_ms": worst}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bien.replay.bench.turns", description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    folder = resolve_model(args.model)
    rows = [asyncio.run(measure(folder, name, args)) for name in TEMPLATES]
    for row in rows:
        print(
            f"{row['template']:7} {row['tokens']} -> {row['second']} tokens: second turn "
            f"{row['second_turn_ms']} ms (worst {row['worst_ms']}), full {row['full_ms']} ms, "
            f"encoding alone {row['encoding_ms']} ms"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
