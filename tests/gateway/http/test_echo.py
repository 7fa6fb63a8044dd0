"""Echoed prompts and log-probabilities of prompts: a toy model in float64 against transformers, scripts."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError

from bien.core.logprobs import TokenLogprobs
from bien.core.request import TokenIds, pack_floats
from bien.core.testing.toy import write_toy
from bien.core.text.model import TextModel
from bien.core.worker.messages import Output
from tests.gateway.http.toy_server import PROMPT, serving

TEXT = "fig fig € fog fig fig € fog, fig"
USER: list[Any] = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


@cache
def model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def exact(folder: Path, ids: list[int]) -> Any:
    """[N - 1, V]"""
    import torch

    with torch.inference_mode():
        return model(folder)(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).numpy()


def own(folder: Path, ids: list[int]) -> Any:
    return exact(folder, ids)[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("drafts", [False, True])
async def test_values_are_the_models(folder: Path, drafts: bool) -> None:
    tokenizer = TextModel.load(folder).tokenizer
    async with serving(folder, drafts=drafts) as client:
        await client.ask(prompt=TEXT)  # the prompt lies in the cache now
        answer = await client.answer(prompt=TEXT, echo=True, logprobs=3, max_tokens=5)
        choice, usage = answer["choices"][0], answer["usage"]
        prompt = list(tokenizer.encode(TEXT).ids())
        ids = prompt + choice["token_ids"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 5)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        found = choice["logprobs"]
        assert found["tokens"] == [tokenizer.piece(t)[0] for t in ids]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        np.testing.assert_allclose(found["token_logprobs"][1:], own(folder, ids), atol=2e-5)
        law = exact(folder, ids)
        for row, top, token in zip(law, found["top_logprobs"][1:], ids[1:], strict=True):
            assert 3 <= len(top) <= 4 and tokenizer.piece(token)[0] in top
            np.testing.assert_allclose(sorted(top.values())[-3:], np.sort(row)[-3:], atol=2e-5)
        assert choice["text"].startswith(TEXT)
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert token.startswith("bytes:") or choice["text"].startswith(token, offset)
        totals = client.gateway.totals
        assert totals.overpredicted_tokens == totals.underpredicted_tokens == 0
        again = await client.answer(prompt=TEXT, max_tokens=5)
        assert again["choices"][0]["token_ids"] == choice["token_ids"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 8 * 8
        client.engine.check_integrity()


async def test_scoring_alone_makes_no_token(folder: Path) -> None:
    """As evaluation harnesses ask for the likelihood of a text; some ask for one token and drop it."""
    async with (
        serving(folder) as client,
        AsyncOpenAI(base_url=f"{client.url}/v1", api_key="k", max_retries=0) as sdk,
    ):
        want = own(folder, PROMPT)
        for most in (0, 1):
            for stream in (False, True):
                made: Any = await sdk.completions.create(
                    model="toy", prompt=[PROMPT], echo=True, logprobs=1, max_tokens=most, temperature=0,
                    stream=stream, seed=1234,
                )  # fmt: skip
                parts = [p async for p in made] if stream else [made]
                choices = [c for p in parts for c in p.choices]
                values = [v for c in choices if c.logprobs for v in c.logprobs.token_logprobs]
                tops = [v for c in choices if c.logprobs for v in c.logprobs.top_logprobs]
                assert len(values) == len(tops) == len(PROMPT) + most
                np.testing.assert_allclose(values[1 : len(PROMPT)], want, atol=2e-5)
                greedy = [v == max(t.values()) for v, t in zip(values[1:], tops[1:], strict=True)]
                best = exact(folder, PROMPT).argmax(-1)
                assert greedy[: len(want)] == (best == PROMPT[1:]).tolist()
                assert choices[-1].finish_reason == "length"
                if not stream:
                    assert made.usage.completion_tokens == most
        text = TextModel.load(folder).tokenizer.decode(PROMPT)
        alone = await client.answer(echo=True, max_tokens=0)
        assert alone["choices"][0]["text"] == text
        assert alone["choices"][0]["token_ids"] == [] and alone["choices"][0]["logprobs"] is None
        one = await client.choice(prompt=PROMPT[:1], echo=True, logprobs=2, max_tokens=0)
        assert one["logprobs"]["token_logprobs"] == [None]


async def test_echo_of_choices(folder: Path) -> None:
    async with serving(folder) as client, aiohttp.ClientSession(client.url) as http:
        fields = {"n": 3, "seed": 5, "temperature": 2, "max_tokens": 4}
        plain = (await client.answer(prompt=TEXT, **fields))["choices"]
        computed = client.engine.stats().computed_tokens
        echoed = (await client.answer(prompt=TEXT, echo=True, logprobs=0, **fields))["choices"]
        length = len(TextModel.load(folder).tokenizer.encode(TEXT))
        # Once whole; the others compute from their last block on.
        once = length + 2 * (length - (length - 1) // 8 * 8) + 3 * 3
        assert client.engine.stats().computed_tokens - computed == once
        assert [c["token_ids"] for c in echoed] == [c["token_ids"] for c in plain]
        assert [c["text"] for c in echoed] == [TEXT + c["text"] for c in plain]
        heads = [c["logprobs"]["token_logprobs"][:length] for c in echoed]
        assert heads[0] == heads[1] == heads[2]
        body = {"model": "toy", "prompt": TEXT, "echo": True, "logprobs": 0, "stream": True, **fields}
        async with http.post("/v1/completions", json=body | {"ignore_eos": True}) as response:
            lines = (await response.text()).split("\n\n")
        texts, values = ["", "", ""], [[], [], []]  # type: ignore[var-annotated]
        for line in lines:
            if line.startswith("data: {"):
                for c in json.loads(line[6:])["choices"]:
                    texts[c["index"]] += c["text"]
                    values[c["index"]] += (c["logprobs"] or {}).get("token_logprobs", [])
        assert texts == [c["text"] for c in echoed]
        for found, c in zip(values, echoed, strict=True):
            assert found[0] is None
            np.testing.assert_allclose(found[1:], c["logprobs"]["token_logprobs"][1:], atol=1e-5)


async def test_prompt_logprobs_as_vllm_has_them(folder: Path) -> None:
    async with serving(folder) as client, aiohttp.ClientSession(client.url) as http:
        law = exact(folder, PROMPT)
        for top in (0, 2):
            choice = await client.choice(prompt_logprobs=top, max_tokens=2)
            assert choice["logprobs"] is None
            first, *rest = choice["prompt_logprobs"]
            assert first is None and len(rest) == len(PROMPT) - 1
            for row, entry, token in zip(law, rest, PROMPT[1:], strict=True):
                assert next(iter(entry)) == str(token)
                assert {int(i) for i in entry} == {token, *np.argsort(-row)[:top].tolist()}
                for id, value in entry.items():
                    assert value["logprob"] == pytest.approx(row[int(id)], abs=2e-5)
                    assert value["rank"] == (row > row[int(id)]).sum() + 1
                    assert value["decoded_token"] == client_piece(folder, int(id))
        body = {"model": "toy", "messages": USER, "prompt_logprobs": 1, "max_tokens": 2, "n": 2}
        async with http.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
        assert answer["prompt_logprobs"][0] is None
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert len(answer["choices"]) == 2
        both = await client.choice(prompt_logprobs=4, echo=True, logprobs=1, max_tokens=0)
        assert all(1 <= len(t) <= 2 for t in both["logprobs"]["top_logprobs"][1:])
        assert all(4 <= len(t) <= 5 for t in both["prompt_logprobs"][1:])


def client_piece(folder: Path, id: int) -> str:
    return TextModel.load(folder).tokenizer.piece(id)[0]


async def test_bounds(start: Any, fake: Any) -> None:
    server = await start(max_context=20_000)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as sdk:
        for extra, name, most in (
            ({"echo": True, "logprobs": 0}, "echo", 8192),
            ({"extra_body": {"prompt_logprobs": 0}}, "prompt_logprobs", 8192),
            ({"echo": True, "logprobs": 2, "n": 3}, "echo", 2730),
        ):
            with pytest.raises(BadRequestError, match=f"at most {most} tokens") as caught:
                await sdk.completions.create(model="toy", prompt=[5] * (most + 1), **extra)
            assert caught.value.param == name
        assert fake.requests == []
        answer = await sdk.completions.create(model="toy", prompt=[5] * 9000, echo=True, n=2)
        assert len(answer.choices) == 2, "the text alone costs nothing"
        assert fake.requests[0].sampling.prompt_logprobs == -1


async def test_minus_infinity_and_control_tokens(sdk: AsyncOpenAI, fake: Any) -> None:
    text = "<|im_start|>a<|im_end|>"
    ids = list(fake.tokenizer.encode(text).ids())
    told = TokenLogprobs(pack_floats([-math.inf, -1.0]), ranks=np.array([9, 1], "<u4").tobytes())
    he = fake.text("he")
    own = TokenLogprobs(pack_floats([-0.5]))
    fake.script = [Output(1, 1, TokenIds.of(he).packed, logprobs=own, prompt_logprobs=told)]
    for prompt, shown, offsets in (
        (text, text, [0, 12, 13, len(text)]),
        (ids, "a", [0, 0, 1, 1]),
    ):
        answer = await sdk.completions.create(model="toy", prompt=prompt, echo=True, logprobs=0)
        assert answer.choices[0].text == shown + "he"
        found = answer.choices[0].logprobs
        assert found is not None
        assert found.token_logprobs == [None, -9999, -1, -0.5]
        assert found.text_offset == offsets
    assert fake.requests[0].sampling.prompt_logprobs == 0
    assert fake.requests[0].sampling.max_tokens == 16
