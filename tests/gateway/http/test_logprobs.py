"""Log-probabilities in OpenAI's shapes, from a script and from a toy model."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from bien.core.logprobs import TokenLogprobs
from bien.core.request import TokenIds, pack_floats
from bien.core.testing.toy import write_toy
from bien.core.worker.messages import Output
from tests.gateway.http.toy_server import PROMPT, serving

USER: list[Any] = [{"role": "user", "content": "hello"}]


def output(ids: list[int], others: list[list[int]] | None = None, **fields: Any) -> Output:
    """Token i has -i/8; its alternatives have -1, -2, ..."""
    top = len(others[0]) if others else 0
    flat = TokenIds.of([t for row in others or [] for t in row]).packed
    values = pack_floats([-1.0 - n for _ in others or [] for n in range(top)])
    logprobs = TokenLogprobs(pack_floats([-i / 8 for i in ids]), top, flat, values)
    return Output(1, len(ids), TokenIds.of(ids).packed, logprobs=logprobs, **fields)


async def test_chat(sdk: AsyncOpenAI, fake: Any) -> None:
    he, euro = fake.text("he"), fake.text("€")
    fake.script = [output(he, [[5, 6]]), output(euro[:1], [[7, 8]]), output(euro[1:], [[9, 10], [11, 12]])]
    answer = await sdk.chat.completions.create(model="toy", messages=USER, logprobs=True, top_logprobs=2)
    assert fake.requests[0].sampling.logprobs == 2
    assert answer.choices[0].message.content == "he€"
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [c.token for c in content] == ["he", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert b"".join(bytes(c.bytes or []) for c in content).decode() == "he€"
    assert [c.logprob for c in content] == [-i / 8 for i in [*he, *euro]]
    assert [[t.logprob for t in c.top_logprobs] for c in content] == [[-1, -2]] * 4
    assert [t.token for t in content[0].top_logprobs] == [fake.tokenizer.piece(i)[0] for i in (5, 6)]
    assert answer.choices[0].logprobs.refusal is None


async def test_chat_stream_has_the_same_entries(sdk: AsyncOpenAI, fake: Any) -> None:
    he, euro = fake.text("he"), fake.text("€")
    fake.script = [output(he), output(euro[:2]), output(euro[2:]), output([1])]
    fake.finish = "stop"
    whole = await sdk.chat.completions.create(model="toy", messages=USER, logprobs=True)
    stream = await sdk.chat.completions.create(model="toy", messages=USER, logprobs=True, stream=True)
    chunks = [c async for c in stream]
    entries = [e for c in chunks if (lp := c.choices[0].logprobs) for e in lp.content or []]
    assert whole.choices[0].logprobs is not None
    assert [e.model_dump() for e in entries] == [
        e.model_dump() for e in whole.choices[0].logprobs.content or []
    ]
    assert entries[-1].token == "<|im_end|>", "what ends an answer counts, so it is listed"
    assert all(e.top_logprobs == [] for e in entries)
    assert [c.choices[0].delta.content for c in chunks[1:-1]] == ["he", "", "€", ""]
    assert chunks[0].choices[0].logprobs is None and chunks[-1].choices[0].logprobs is None


async def test_completion(sdk: AsyncOpenAI, fake: Any) -> None:
    ids = [*fake.text("he"), *fake.text("é"), *fake.text(" w")]
    fake.script = [output(ids[:2], [[ids[0], 7], [8, 9]]), output(ids[2:], [[5, 6], [7, ids[3]]])]
    answer = await sdk.completions.create(model="toy", prompt="hello", logprobs=2)
    assert answer.choices[0].text == "heé w"
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["he", "bytes:\\xc3", "bytes:\\xa9", " w"]
    assert found.token_logprobs == [-i / 8 for i in ids]
    assert found.text_offset == [0, 2, 2, 3]
    assert found.top_logprobs is not None
    assert [len(t) for t in found.top_logprobs] == [2, 3, 3, 2], "and the token itself"
    assert found.top_logprobs[3][" w"] == -2


async def test_completion_stream(sdk: AsyncOpenAI, fake: Any) -> None:
    fake.script = [output(fake.text("he")), output(fake.text("llo w"))]
    stream = await sdk.completions.create(model="toy", prompt="hello", logprobs=0, stream=True)
    found = [c.choices[0].logprobs async for c in stream]
    assert found[-1] is None
    tokens = [t for lp in found if lp for t in lp.tokens or []]
    assert "".join(tokens) == "hello w"
    assert [o for lp in found if lp for o in lp.text_offset or []][:3] == [0, 2, 4]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2], [1, 2, 3], [3]])
@pytest.mark.parametrize(
    ("text", "stop", "kept", "shown"),
    [
        ("axbc", ["x"], 1, "a"),
        ("axbc", ["xb"], 1, "a"),
        ("axbc", ["ax"], 0, ""),
        ("axbc", ["xq", "bc"], 2, "ax"),
        ("axbc", ["cd"], 4, "axbc"),  # held back until the end
        ("a€b", ["€"], 1, "a"),
    ],
)
async def test_tokens_of_a_stop_string_have_none(
    sdk: AsyncOpenAI,
    fake: Any,
    text: str,
    stop: list[str],
    kept: int,
    shown: str,
    cuts: list[int],
    stream: bool,
) -> None:
    """They go where the text goes, however the stream is cut."""
    ids = [i for c in text for i in fake.text(c)]
    fake.script = [output(ids[a:b]) for a, b in pairwise([0, *cuts, len(ids)])]
    made: Any = await sdk.completions.create(
        model="toy", prompt="hello", logprobs=0, stop=stop, stream=stream
    )
    answers = [c async for c in made] if stream else [made]
    assert "".join(c.choices[0].text for c in answers) == shown
    found = [lp for c in answers if (lp := c.choices[0].logprobs)]
    assert [t for lp in found for t in lp.token_logprobs] == [-i / 8 for i in ids[:kept]]
    assert [o for lp in found for o in lp.text_offset] == list(range(kept))
    made = await sdk.chat.completions.create(
        model="toy", messages=USER, logprobs=True, stop=stop, stream=stream
    )
    answers = [c async for c in made] if stream else [made]
    entries = [e for c in answers if (lp := c.choices[0].logprobs) for e in lp.content]
    assert [e.logprob for e in entries] == [-i / 8 for i in ids[:kept]]


async def test_a_token_that_a_stop_string_cuts_in_two_is_listed(sdk: AsyncOpenAI, fake: Any) -> None:
    assert len(fake.text("hello")) < 5
    fake.script = [output([*fake.text("hello"), *fake.text("x")])]
    made = await sdk.completions.create(model="toy", prompt="hello", logprobs=0, stop="ello")
    found = made.choices[0].logprobs
    assert made.choices[0].text == "h" and found is not None
    assert found.tokens == [fake.tokenizer.piece(fake.text("hello")[0])[0]] and found.text_offset == [0]


async def test_a_stop_token_is_listed_beside_stop_strings(sdk: AsyncOpenAI, fake: Any) -> None:
    fake.script, fake.finish = [output([*fake.text("a"), *fake.text("x"), 1])], "stop"
    made = await sdk.completions.create(model="toy", prompt="hello", logprobs=0, stop="xy")
    assert made.choices[0].text == "ax"
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.tokens == ["a", "x", "<|im_end|>"]


@pytest.mark.parametrize("asked", [None, False])
async def test_who_does_not_ask_gets_null(sdk: AsyncOpenAI, fake: Any, asked: bool | None) -> None:
    answer = await sdk.completions.create(model="toy", prompt="hello", extra_body={"logprobs": asked})
    assert answer.choices[0].logprobs is None
    assert fake.requests[0].sampling.logprobs == -1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


async def test_of_a_model_whatever_samples_and_drafts(folder: Path) -> None:
    """They are the model's own: the same for the same text, however it was drawn."""
    async with serving(folder) as plain, serving(folder, drafts=True) as drafting:
        base = await plain.choice(logprobs=5)
        ids, found = base["token_ids"], base["logprobs"]
        assert len(found["token_logprobs"]) == len(ids)
        for token, value, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert top[token] == value == max(top.values()), "greedy"
            assert sum(map(math.exp, top.values())) <= 1 + 1e-6
        again = await drafting.choice(logprobs=5)
        assert drafting.engine.stats().accepted > 0
        assert again["token_ids"] == ids
        np.testing.assert_allclose(again["logprobs"]["token_logprobs"], found["token_logprobs"], atol=1e-6)
        forced = await plain.choice(
            logprobs=0, trace_decode_token_ids=ids, temperature=2, seed=1, repetition_penalty=2, min_p=0.5
        )
        np.testing.assert_allclose(forced["logprobs"]["token_logprobs"], found["token_logprobs"], atol=1e-6)
        drawn = await plain.choice(logprobs=0, temperature=2, seed=1)
        replayed = await plain.choice(logprobs=0, trace_decode_token_ids=drawn["token_ids"])
        assert drawn["token_ids"] != ids
        np.testing.assert_allclose(
            drawn["logprobs"]["token_logprobs"], replayed["logprobs"]["token_logprobs"], atol=1e-6
        )


async def test_of_a_model_through_the_sdk(folder: Path) -> None:
    async with serving(folder, drafts=True) as client:
        stop = (await client.ask())[5:6]
        async with AsyncOpenAI(base_url=f"{client.url}/v1", api_key="k", max_retries=0) as sdk:
            answer = await sdk.chat.completions.create(
                model="toy", messages=USER, logprobs=True, top_logprobs=20, max_tokens=9, temperature=0
            )
            assert answer.choices[0].logprobs is not None
            content = answer.choices[0].logprobs.content or []
            assert answer.usage is not None
            assert len(content) == answer.usage.completion_tokens
            assert all(len(c.top_logprobs) == 20 for c in content)
            text = await sdk.completions.create(
                model="toy", prompt=PROMPT, logprobs=1, temperature=0, extra_body={"stop_token_ids": stop}
            )
            assert text.choices[0].finish_reason == "stop"
            assert text.choices[0].logprobs is not None and text.usage is not None
            assert len(text.choices[0].logprobs.tokens or []) == text.usage.completion_tokens
