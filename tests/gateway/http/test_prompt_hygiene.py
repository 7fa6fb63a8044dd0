"""Lines that clients write anew are taken out where they write them; templates that rewrite are told."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from bien.core.text.model import TextModel
from bien.core.text.template import ChatTemplate
from bien.gateway.http.server import Server
from bien.gateway.notes import REMOVED, REWRITTEN

LINE = "x-anthropic-billing-header: cc_version=2.1.36; cc_entrypoint=cli; cch={:05x};"
FORGETFUL = (  # marks the last turn, and forgets the mark
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if loop.last %} (now){% endif %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def prompt(fake: Any, at: int = -1) -> str:
    text: str = fake.tokenizer.decode(list(fake.requests[at].prompt.ids()))
    return text


async def ask(server: Server, path: str = "/v1/messages", **fields: Any) -> tuple[Any, dict[str, str]]:
    """The answer, and those of its headers that are ours."""
    body = {"model": "toy", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}], **fields}
    async with aiohttp.ClientSession(server.url) as http, http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        answer = await response.text() if body.get("stream") else await response.json()
        return answer, {k.lower(): v for k, v in response.headers.items() if k.lower().startswith("x-bien")}


async def counted(server: Server, name: str) -> float:
    async with aiohttp.ClientSession(server.url) as http, http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_line_that_changes_with_each_request_is_taken_out(
    server: Server, fake: Any, stream: bool
) -> None:
    for n in range(2):
        system = [block(LINE.format(n)), block("be kind"), block("be brief")]
        _, headers = await ask(server, system=system, stream=stream)
        assert headers[REMOVED] == "1"
    assert fake.requests[0].prompt == fake.requests[1].prompt
    assert prompt(fake) == "system\nbe kind\nbe brief\nuser\nhello\nassistant\n"
    assert await counted(server, "bien_prompt_lines_removed_total") == 2


@pytest.mark.parametrize(
    "system", [[block(LINE.format(1))], LINE.format(1), LINE.format(1) + "\n" + LINE.format(2)]
)
async def test_a_system_prompt_of_such_lines_alone_is_none(server: Server, fake: Any, system: Any) -> None:
    await ask(server, system=system)
    assert prompt(fake) == "user\nhello\nassistant\n"


async def test_it_is_counted_as_it_is_generated(server: Server, fake: Any) -> None:
    fields: dict[str, Any] = {"system": [block(LINE.format(1)), block("be kind")], "max_tokens": None}
    answer, _ = await ask(server, "/v1/messages/count_tokens", **fields)
    await ask(server, **{**fields, "max_tokens": 9})
    assert answer["input_tokens"] == fake.requests[-1].prompt_tokens


LOOKALIKES: list[dict[str, Any]] = [
    {"system": [block("be kind"), block(LINE.format(1))]},  # not where the client puts it
    {"system": [block(" " + LINE.format(1))]},
    {"system": "About x-anthropic-billing-header: cch=1;"},
    {"messages": [{"role": "user", "content": LINE.format(1)}]},
    {"messages": [{"role": "system", "content": LINE.format(1)}, {"role": "user", "content": "a"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": LINE.format(1)},
                  {"role": "user", "content": LINE.format(2)}]},
]  # fmt: skip


@pytest.mark.parametrize("fields", LOOKALIKES)
async def test_what_looks_like_it_elsewhere_stays(server: Server, fake: Any, fields: dict[str, Any]) -> None:
    _, headers = await ask(server, **fields)
    assert "x-anthropic-billing-header" in prompt(fake) and REMOVED not in headers
    assert await counted(server, "bien_prompt_lines_removed_total") == 0


async def test_other_apis_have_no_such_place(server: Server, fake: Any) -> None:
    messages = [{"role": "system", "content": LINE.format(1)}, {"role": "user", "content": "a"}]
    await ask(server, "/v1/chat/completions", messages=messages)
    assert LINE.format(1) in prompt(fake)


async def test_the_rule_is_the_deployments(start: Any, fake: Any) -> None:
    off = await start(volatile_lines=())
    await ask(off, system=LINE.format(1))
    assert LINE.format(1) in prompt(fake)
    own = await start(volatile_lines=("date: .*", "x-.*"))
    _, headers = await ask(own, system=f"date: now\n{LINE.format(1)}\nbe kind\ndate: then")
    assert prompt(fake) == "system\nbe kind\ndate: then\nuser\nhello\nassistant\n"
    assert headers[REMOVED] == "2"


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_a_conversation_that_goes_on_is_no_rewriting(
    server: Server, fake: Any, path: str, stream: bool
) -> None:
    fake.script, fake.finish = ["hello", " world", [1]], "stop"
    said = ["a"]
    for _ in range(3):
        _, headers = await ask(server, path, messages=turns(*said), stream=stream)
        assert REWRITTEN not in headers
        said += ["hello world", "more"]
    # another one, and the same with other words before the end
    await ask(server, path, messages=turns("b", "hello world", "more"), stream=stream)
    assert await counted(server, "bien_prompts_rewritten_total") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_that_rewrites_is_told_with_its_first_difference(
    start: Any, fake: Any, stream: bool
) -> None:
    server = await start(text=TextModel(fake.tokenizer, ChatTemplate(FORGETFUL)))
    fake.script, fake.finish = ["hello", [1]], "stop"
    await ask(server, messages=turns("a"), stream=stream)
    _, headers = await ask(server, messages=turns("a", "hello", "more"), stream=stream)
    before, now = (list(request.prompt.ids()) for request in fake.requests)
    at = next(n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b)
    assert headers[REWRITTEN] == str(at)
    assert await counted(server, 'bien_prompts_rewritten_total{part="prompt"}') == 1


async def test_an_answer_that_comes_back_as_another_is_told(server: Server, fake: Any) -> None:
    fake.script, fake.finish = ["he", "llo", [1]], "stop"  # two tokens; as text it is one
    await ask(server, messages=turns("a"))
    _, headers = await ask(server, messages=turns("a", "hello", "more"))
    assert fake.text("he") + fake.text("llo") != fake.text("hello")
    assert headers[REWRITTEN] == str(fake.requests[0].prompt_tokens)
    assert await counted(server, 'bien_prompts_rewritten_total{part="answer"}') == 1


async def test_other_tenants_have_other_conversations(start: Any, fake: Any) -> None:
    server = await start(text=TextModel(fake.tokenizer, ChatTemplate(FORGETFUL)))
    for n, key in enumerate(("one", "two", "one")):
        messages = turns("a") if n < 1 else turns("a", "hello world", "more")
        async with aiohttp.ClientSession(server.url, headers={"x-api-key": key}) as http:
            body = {"model": "toy", "max_tokens": 9, "messages": messages}
            async with http.post("/v1/messages", json=body) as response:
                assert (REWRITTEN in response.headers) == (n == 2)


async def test_metrics_say_what_the_tokenizer_was_spared(server: Server, fake: Any) -> None:
    long = "the quick brown fox " * 100
    await ask(server, "/v1/messages/count_tokens", messages=turns(long), max_tokens=None)
    assert await counted(server, 'bien_prompt_text_tokens_total{source="kept"}') == 0
    await ask(server, "/v1/messages/count_tokens", messages=turns(long, long, "more"), max_tokens=None)
    assert await counted(server, 'bien_prompt_text_tokens_total{source="kept"}') > 1000
    assert await counted(server, "bien_prompt_text_kept_bytes") > 4000


async def test_no_key_and_no_salt_finds_what_another_has_sent(server: Server) -> None:
    long, kept = turns("the quick brown fox " * 100), 'bien_prompt_text_tokens_total{source="kept"}'
    found = []
    for key, salt in (("one", "a"), ("two", "a"), ("one", "b"), ("one", "a")):
        body = {"model": "toy", "max_tokens": 9, "messages": long, "cache_salt": salt}
        async with aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {key}"}) as http:
            await (await http.post("/v1/chat/completions", json=body)).read()
        found.append(await counted(server, kept) > 0)
    assert found == [False, False, False, True]
