"""What clients ask for and get, over HTTP, and what they should have got."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

import aiohttp

from bien.core.request import TokenIds
from bien.core.testing.hash_executor import VOCAB, oracle
from bien.core.testing.text import CHATML, byte_level
from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.core.text.tokenizer import Tokenizer
from tests.replay.kill.worker import GROUPS

TEXT = TextModel(Tokenizer(byte_level()), ChatTemplate(CHATML))


@dataclass(frozen=True)
class Question:
    prompt: tuple[int, ...] | str  # ids for /v1/completions, a message for /v1/chat/completions
    tokens: int
    stream: bool
    seed: int | None = None  # None: greedy
    session: str = ""

    @cached_property
    def ids(self) -> list[int]:
        if isinstance(self.prompt, str):
            return list(TEXT.encode_chat([{"role": "user", "content": self.prompt}]).ids())
        return list(self.prompt)

    @cached_property
    def expected(self) -> list[int]:
        """The tokens of an undisturbed run."""
        return oracle(self.ids, self.tokens, GROUPS, self.seed or 0)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if isinstance(self.prompt, str) else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "toy", "max_tokens": self.tokens, "ignore_eos": True, "return_token_ids": True,
            "stream": self.stream, "temperature": 0 if self.seed is None else 1, "seed": self.seed,
        }  # fmt: skip
        if isinstance(self.prompt, str):
            return body | {"messages": [{"role": "user", "content": self.prompt}]}
        packed = TokenIds.of(self.prompt).packed
        return body | {"prompt_token_ids_b64": base64.b64encode(packed).decode()}


@dataclass
class Answer:
    status: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    worker: str = ""  # where a stream began
    ended: bool = False  # a stream: by [DONE], or by an error event that was the last thing
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # content has come, or the end


def draw(rng: Random, *, tokens: tuple[int, int] = (8, 60), most: int = 400, **fixed: Any) -> Question:
    """Any kind of question: chat or not, streamed or not, greedy or drawn."""
    length = rng.randint(5, most)
    text = "".join(rng.choices("abcdefgh ", k=length))
    ids = tuple(rng.choices(range(3, VOCAB), k=length))
    fields: dict[str, Any] = {
        "prompt": text if rng.random() < 0.5 else ids,
        "tokens": rng.randint(*tokens),
        "stream": rng.random() < 0.5,
        "seed": rng.choice([None, rng.randrange(1, 1 << 32)]),
    }
    return Question(**(fields | fixed))


async def ask(http: aiohttp.ClientSession, question: Question, answer: Answer) -> Answer:
    """Fill `answer` as things come."""
    headers = {"X-Session-ID": question.session} if question.session else {}
    try:
        async with http.post(question.path, json=question.body, headers=headers) as response:
            answer.status = response.status
            answer.worker = response.headers.get("x-bien-worker", "")
            if question.stream and response.status == 200:
                async for line in response.content:
                    _event(answer, line.decode().strip())
            else:
                _whole(answer, await response.json())
    finally:
        answer.begun.set()
    return answer


def _whole(answer: Answer, body: dict[str, Any]) -> None:
    answer.ended = True
    if "error" in body:
        answer.error = body["error"]
        return
    (choice,) = body["choices"]
    answer.ids = choice["token_ids"]
    answer.text = choice["text"] if "text" in choice else choice["message"]["content"]
    answer.finish = choice["finish_reason"]
    answer.usage = body["usage"]


def _event(answer: Answer, line: str) -> None:
    if not line:
        return
    assert not answer.ended, f"an event after the last one: {line}"
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        answer.ended = True
        return
    event = json.loads(data)
    if "error" in event:
        answer.error, answer.ended = event["error"], True
        return
    (choice,) = event["choices"]
    answer.ids += choice.get("token_ids", [])
    answer.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    answer.finish = choice["finish_reason"] or answer.finish
    if answer.ids:
        answer.begun.set()


def check(question: Question, answer: Answer, died: set[str]) -> bool:
    """Whether it is complete. Only a stream that had begun on a worker that died may be cut short, and then
    by the error event and after nothing but right tokens."""
    about = f"{question.path} stream={question.stream} {answer}"
    assert answer.status == 200 and answer.ended, about
    expected = question.expected
    if answer.error is not None:
        assert question.stream and answer.ids and answer.worker in died, about
        assert answer.error["code"] == "worker_died" and answer.error["type"] == "server_error", about
        assert answer.finish is None and len(answer.ids) < len(expected) + 1, about
        expected = expected[: len(answer.ids)]
    else:
        assert answer.finish == "length", about
        if not question.stream:
            counts = (answer.usage["prompt_tokens"], answer.usage["completion_tokens"])
            assert counts == (len(question.ids), question.tokens), about
    assert answer.ids == expected, f"{about} instead of {expected}"
    output = TEXT.output(question.ids[-16:])
    text = output.push(memoryview(TokenIds.of(expected).packed).cast("I"), silent_last=False)[0]
    if answer.error is None:
        text += output.flush()
    assert answer.text == text, about
    return answer.error is None
