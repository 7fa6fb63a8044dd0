"""Drafts as a client sees them: opting out, caps, predictions, and what is said of them. The text never
changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from bien.core.speculation.counts import DraftCounts
from bien.core.testing.toy import write_toy
from bien.gateway.protocols.acceptance import Acceptance
from tests.gateway.http.toy_server import PROMPT, Client, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


async def refusal(client: Client, **fields: Any) -> dict[str, Any]:
    async with aiohttp.ClientSession(client.url) as http:
        body = {"model": "toy", "prompt": PROMPT, "max_tokens": 4} | fields
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 400
            error: dict[str, Any] = (await response.json())["error"]
            return error


async def test_a_request_may_do_without_drafts_or_with_few(folder: Path) -> None:
    async with serving(folder, drafts=True) as client:
        text = await client.ask(speculate=False)
        assert await client.ask(max_draft_tokens=0) == text
        assert client.engine.stats().drafted == 0
        assert await client.ask(max_draft_tokens=1) == text
        drafts = client.engine.stats().drafts
        assert drafts is not None
        assert len(drafts.total.drafted_at) == 1
        answer = await client.answer(speculate=True)
        assert answer["choices"][0]["token_ids"] == text
        assert len(answer["bien"]["drafted_at"]) > 1
        assert (await refusal(client, max_draft_tokens=-1))["param"] == "max_draft_tokens"
        assert (await refusal(client, prediction="x"))["param"] == "prediction"
        assert (await refusal(client, prediction={"type": "content"}))["param"] == "prediction.content"


async def test_a_prediction_that_comes_true_is_counted(folder: Path) -> None:
    """Also where the pool has no drafter, and where a stop string cuts the answer."""
    async with serving(folder) as client:
        prompt = "some text"
        plain = await client.answer(prompt=prompt)
        text = plain["choices"][0]["text"]
        parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]
        for content in (text, parts):
            found = await client.answer(prompt=prompt, prediction={"type": "content", "content": content})
            assert found["choices"] == plain["choices"]
            details = found["usage"]["completion_tokens_details"]
            counts = found["bien"]["sources"]["prediction"]
            assert details["accepted_prediction_tokens"] == counts["accepted"] > 0
            assert details["rejected_prediction_tokens"] == counts["drafted"] - counts["accepted"]
            assert found["usage"]["completion_tokens"] == 24
        before = client.engine.stats().rounds
        unasked = await client.answer(
            prompt=prompt, prediction={"type": "content", "content": text}, speculate=False
        )
        assert client.engine.stats().rounds == before
        assert unasked["choices"] == plain["choices"]
        stop = text[12:15]
        cut = await client.answer(prompt=prompt, prediction={"type": "content", "content": text}, stop=stop)
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert cut["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


async def test_a_prediction_through_the_sdk(folder: Path) -> None:
    async with serving(folder) as client:
        plain = await client.answer(prompt="some text")
        async with AsyncOpenAI(base_url=f"{client.url}/v1", api_key="k", max_retries=0) as sdk:
            stream = await sdk.completions.create(
                model="toy",
                prompt="some text",
                max_tokens=24,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={
                    "prediction": {"type": "content", "content": plain["choices"][0]["text"]},
                    "ignore_eos": True,
                },
            )
            usage = [chunk.usage async for chunk in stream][-1]
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert (usage.completion_tokens_details.accepted_prediction_tokens or 0) > 0


async def test_acceptance_in_vllms_form_where_asked_for(folder: Path) -> None:
    async with serving(folder, drafts=True) as client:
        answer = await client.answer(speculation_metrics=True)
        found, bien = answer["metrics"]["speculative_decoding"], answer["bien"]
        assert found["num_spec_steps"] == sum(found["acceptance_histogram"]) == bien["rounds"] > 0
        assert found["num_draft_tokens"] == bien["drafted"]
        accepted = sum(n * rounds for n, rounds in enumerate(found["acceptance_histogram"]))
        assert found["num_accepted_draft_tokens"] == accepted == bien["accepted"]
        assert found["mean_acceptance_length"] == 1 + accepted / bien["rounds"]
        assert len(found["acceptance_histogram"]) == found["num_spec_tokens"] + 1
        assert "metrics" not in await client.answer()
        assert (await client.answer(speculation_metrics=True, n=2))["metrics"] == {
            "speculative_decoding": None
        }
        for options in ({}, {"stream_options": {"include_usage": True}}):
            events = await streamed(client, speculation_metrics=True, **options)
            assert events[-1]["metrics"]["speculative_decoding"] == found
            assert events[-1]["choices"] == []
            assert sum("metrics" in event for event in events) == 1


async def streamed(client: Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession(client.url) as http:
        async with http.post("/v1/completions", json=body | {"stream": True} | fields) as response:
            lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_histogram_of_what_was_accepted() -> None:
    counts = DraftCounts()
    for accepted in (0, 0, 1, 3, 3, 3):
        counts.add("a", 3, 3, accepted)
    counts.add("b", 1, 1, 1)
    found = Acceptance.of(counts)
    assert found.acceptance_histogram == [2, 2, 0, 3]
    assert (found.num_spec_steps, found.num_draft_tokens, found.num_spec_tokens) == (7, 19, 3)
    assert found.draft_acceptance_rate == 11 / 19
    assert Acceptance.of(DraftCounts()) == Acceptance(1.0, 0.0, [0], 0, 0, 0, 0)
