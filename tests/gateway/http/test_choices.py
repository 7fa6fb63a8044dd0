"""Several choices of one request: a toy model in float64, and scripts."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError

from bien.core.errors import WorkerDiedError
from bien.core.request import TokenIds
from bien.core.testing.toy import write_toy
from bien.core.worker.messages import Output
from tests.gateway.http.toy_server import PROMPT, Client, serving

LONG = [*range(40, 76), *PROMPT]  # six blocks of eight
SAMPLED: dict[str, Any] = {"temperature": 2, "seed": 9, "prompt": LONG}
USER: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


async def texts(client: Client, **fields: Any) -> list[list[int]]:
    choices = (await client.answer(**SAMPLED | fields))["choices"]
    assert [c["index"] for c in choices] == list(range(len(choices)))
    return [c["token_ids"] for c in choices]


async def test_greedy_choices_are_equal(folder: Path) -> None:
    async with serving(folder) as client:
        one, other = await texts(client, n=2, temperature=0)
        assert one == other == await client.ask(prompt=LONG)


async def test_choices_of_a_seed_depend_on_their_number_only(folder: Path) -> None:
    """Not on how many there are (more than slots, even), on who else is served, or on drafts."""
    async with serving(folder) as client, serving(folder, drafts=True) as drafting:
        six = await texts(client, n=6)
        assert len({tuple(t) for t in six}) == 6
        assert await texts(client) == six[:1]
        assert await texts(client, n=2, best_of=2) == six[:2]
        crowded, *_ = await asyncio.gather(
            texts(client, n=3), *(client.ask(prompt=[i, *PROMPT]) for i in range(40, 44))
        )
        assert crowded == six[:3]
        assert await texts(drafting, n=6) == six
        assert (await texts(client, n=2, seed=10))[0] not in six
        drawn = await texts(client, n=2, seed=None)
        assert drawn[0] != drawn[1]


async def test_the_prompt_is_computed_once_and_counted_once(folder: Path) -> None:
    async with serving(folder) as client:
        answer = await client.answer(n=4, max_tokens=3, **SAMPLED)
        stats = client.engine.stats()
        # Whole blocks before the last token are found again; its own block each computes for itself.
        assert stats.cached_tokens == 3 * 40
        assert stats.computed_tokens == 48 + 3 * 8 + 4 * 2
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (48, 12)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        totals = client.gateway.totals
        assert totals.predicted_cached_tokens == totals.cached_tokens == 120
        assert totals.overpredicted_tokens == totals.underpredicted_tokens == 0
        again = await client.answer(n=2, max_tokens=3, **SAMPLED)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 40
        client.engine.check_integrity()


async def test_each_choice_stops_for_itself(folder: Path) -> None:
    async with serving(folder) as client:
        free = await texts(client, n=3)
        stop = free[1][4]
        assert any(stop not in other[:20] for other in (free[0], free[2]))
        answer = await client.answer(**SAMPLED, n=3, stop_token_ids=[stop])
        for choice, want in zip(answer["choices"], free, strict=True):
            end = want.index(stop) + 1 if stop in want else len(want)
            assert choice["token_ids"] == want[:end]
            assert choice["finish_reason"] == ("stop" if stop in want else "length")
        assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])
        whole = await client.answer(**SAMPLED, n=3)
        text = whole["choices"][0]["text"]
        cut = await client.answer(**SAMPLED, n=3, stop=text[3:5])
        assert cut["choices"][0]["text"] == text[: text.index(text[3:5])]
        for choice, full in zip(cut["choices"], whole["choices"], strict=True):
            assert choice["text"] == full["text"].split(text[3:5])[0]


async def test_choices_through_the_sdk(folder: Path) -> None:
    async with (
        serving(folder, drafts=True) as client,
        AsyncOpenAI(base_url=f"{client.url}/v1", api_key="k", max_retries=0) as sdk,
    ):
        asked: dict[str, Any] = {"model": "toy", "messages": USER, "n": 3, "seed": 4, "max_tokens": 12}
        asked |= {"logprobs": True, "temperature": 1.2}
        whole = await sdk.chat.completions.create(**asked)
        assert whole.usage is not None
        stream = await sdk.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        pieces: dict[int, list[Any]] = defaultdict(list)
        order, usage = [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces[choice.index].append(choice)
                order.append(choice.index)
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )
        assert order != sorted(order), "none waits for another"
        assert len(whole.choices) == len(pieces) == 3
        for index, choice in enumerate(whole.choices):
            made = pieces[index]
            assert made[0].delta.role == "assistant"
            assert [c.finish_reason for c in made].count(choice.finish_reason) == 1
            assert made[-1].finish_reason == choice.finish_reason
            assert "".join(c.delta.content or "" for c in made) == choice.message.content
            assert choice.logprobs is not None
            found = [e.logprob for c in made if c.logprobs for e in c.logprobs.content]
            assert found == pytest.approx([e.logprob for e in choice.logprobs.content or []], abs=1e-6)
        texts = await sdk.completions.create(model="toy", prompt=LONG, n=2, seed=4, max_tokens=9)
        parts = await sdk.completions.create(model="toy", prompt=LONG, n=2, seed=4, max_tokens=9, stream=True)
        streamed = ["", ""]
        async for part in parts:
            for text in part.choices:
                streamed[text.index] += text.text
        assert streamed == [c.text for c in texts.choices]


async def test_places_are_taken_for_all_choices(folder: Path) -> None:
    async with serving(folder, max_inflight=3) as client, aiohttp.ClientSession(client.url) as http:
        body = {"model": "toy", "prompt": PROMPT, "max_tokens": 2}
        async with http.post("/v1/completions", json=body | {"n": 4}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "n"
        with client.gateway.admit():
            async with http.post("/v1/completions", json=body | {"n": 3}) as response:
                assert response.status == 429 or response.status == 503
                assert "Retry-After" in response.headers
            async with http.post("/v1/completions", json=body | {"n": 2}) as response:
                assert response.status == 200
        async with http.post("/v1/completions", json=body | {"n": 3}) as response:
            assert response.status == 200
        assert client.gateway.inflight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_aborts_them_all(folder: Path, stream: bool) -> None:
    async with serving(folder) as client, aiohttp.ClientSession(client.url) as http:
        body = {"model": "toy", "prompt": PROMPT, "max_tokens": 200, "n": 6, "stream": stream}
        body |= {"ignore_eos": True}
        async with asyncio.TaskGroup() as group:

            async def ask() -> None:
                async with http.post("/v1/completions", json=body) as response:
                    await response.read()

            task = group.create_task(ask())
            while client.engine.stats().output_tokens < 8:
                await asyncio.sleep(0.002)
            task.cancel()
        while client.engine.busy or client.gateway.inflight:
            await asyncio.sleep(0.002)
        assert client.gateway.totals.finished.get("abort") == 6
        assert client.gateway.totals.finished.get("length") is None


class Scripts(dict[int, list[Any]]):
    """One script per choice, for a `FakeGateway`."""

    def of(self, fake: Any) -> Any:
        plain = fake.generate

        def generate(request: Any, slot: Any = None, restart: Any = None) -> Any:
            fake.script = self[request.sampling.choice]
            generation = plain(request, slot, restart)
            steps = fake.script

            async def outputs() -> Any:
                for n, step in enumerate(steps):
                    if isinstance(step, asyncio.Event):
                        await step.wait()
                    elif callable(step):  # its worker dies, another one begins again
                        restart()
                    elif isinstance(step, Exception):
                        generation.done = True
                        raise step
                    else:
                        ids = TokenIds.of(fake.text(step))
                        generation.done = n == len(steps) - 1
                        yield Output(1, len(ids), ids.packed, "length" if generation.done else None)

            generation._outputs = outputs
            return generation

        fake.generate = generate
        return fake


async def test_an_error_in_one_ends_them_all(fake: Any, http: aiohttp.ClientSession) -> None:
    never, shown = asyncio.Event(), asyncio.Event()
    scripts = Scripts({0: ["he", never], 1: ["l", shown, WorkerDiedError("it is gone")], 2: ["o", never]})
    scripts.of(fake)
    body = {"model": "toy", "prompt": "a", "n": 3, "stream": True}
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200
        seen = b""
        while not all(t in seen for t in (b'"he"', b'"l"', b'"o"')):
            seen += await response.content.readany()
        shown.set()
        rest = await response.content.read()
    assert b"it is gone" in rest and b"[DONE]" not in rest and rest.count(b"data: ") == 1
    ids = [r.id for r in fake.requests]
    assert len(set(ids)) == 3
    assert sorted(fake.aborted) == sorted([ids[0], ids[2]])
    assert fake.held == 0


async def test_an_error_before_the_first_byte_is_a_status(fake: Any, sdk: AsyncOpenAI) -> None:
    Scripts({0: [WorkerDiedError("it is gone")], 1: ["a"]}).of(fake)
    for stream in (False, True):
        with pytest.raises(InternalServerError, match="it is gone"):
            await sdk.completions.create(model="toy", prompt="a", n=2, stream=stream)
    assert len(fake.requests) == 2, "the others wait for the first one's first token"


@pytest.mark.parametrize("echo", [False, True])
async def test_a_choice_that_begins_again_forgets_what_it_had(
    fake: Any, sdk: AsyncOpenAI, echo: bool
) -> None:
    Scripts({0: ["xy", list, "he", "llo"], 1: ["a", "b", list, "c"], 2: ["o"]}).of(fake)
    answer = await sdk.completions.create(model="toy", prompt="say ", n=3, echo=echo)
    head = "say " if echo else ""
    assert [c.text for c in answer.choices] == [head + "hello", head + "c", head + "o"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(fake.text(t)) for t in ("he", "llo", "c", "o"))


async def test_the_others_wait_for_the_first_token(fake: Any, sdk: AsyncOpenAI) -> None:
    prompt, end = asyncio.Event(), asyncio.Event()
    Scripts({0: [prompt, "he", end, "llo"], 1: ["a"], 2: ["b"]}).of(fake)
    answer = asyncio.ensure_future(sdk.completions.create(model="toy", prompt="a", n=3, seed=7))
    while not fake.requests:
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.02)
    assert len(fake.requests) == 1
    prompt.set()
    while len(fake.ended) < 2:
        await asyncio.sleep(0.002)
    assert not answer.done()
    end.set()
    assert [c.text for c in (await answer).choices] == ["hello", "a", "b"]
    assert [r.sampling.choice for r in fake.requests] == [0, 1, 2]
    assert {r.sampling.seed for r in fake.requests} == {7}


async def test_a_stop_string_in_the_first_output_lets_the_others_go_on(fake: Any, sdk: AsyncOpenAI) -> None:
    Scripts({0: ["xhe", "llo"], 1: ["a", "b"]}).of(fake)
    answer = await sdk.completions.create(model="toy", prompt="a", n=2, stop="x")
    assert [(c.text, c.finish_reason) for c in answer.choices] == [("", "stop"), ("ab", "length")]


async def test_more_choices_than_are_allowed(sdk: AsyncOpenAI, fake: Any) -> None:
    with pytest.raises(BadRequestError, match="n=200; valid: 1 to 128"):
        await sdk.completions.create(model="toy", prompt="a", n=200)
    assert fake.requests == []
