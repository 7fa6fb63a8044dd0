"""Sampling parameters through HTTP: a toy model in float64, with and without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bien.core.testing.toy import write_toy
from tests.gateway.http.toy_server import serving

PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 1.0,
    "logit_bias": {"81": 0.5, "40": -100},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize("fields", [
    PENALTIES,
    PENALTIES | {"temperature": 2, "seed": 3, "min_p": 0.02},
    {"min_tokens": 20, "stop_token_ids": list(range(3, 130))},
], ids=["greedy", "sampled", "min_tokens"])  # fmt: skip
async def test_the_text_is_the_same_with_drafts(folder: Path, fields: dict[str, Any]) -> None:
    async with serving(folder) as alone, serving(folder, drafts=True) as drafting:
        want = await alone.ask(**fields)
        assert await drafting.ask(**fields) == want
        assert await drafting.ask(**fields) == want, "a second time, from the cache"
        stats = drafting.engine.stats()
        assert 0 < stats.accepted < stats.drafted
        assert want != await alone.ask(temperature=fields.get("temperature", 0), seed=3)


async def test_each_parameter_reaches_the_sampler(folder: Path) -> None:
    async with serving(folder) as client:
        plain = await client.ask()
        for name, value in PENALTIES.items():
            strong = {"81": 100} if name == "logit_bias" else 2.0
            assert await client.ask(**{name: strong}) != plain, (name, value)
        assert await client.ask(logit_bias={"81": 100}) == [81] * 24
        forbidden = {str(i): -100 for i in set(plain)}
        assert not set(await client.ask(logit_bias=forbidden)) & set(plain)
        assert await client.ask(temperature=2, seed=1) != plain
        assert await client.ask(temperature=2, seed=1, min_p=1) == plain


async def test_no_end_before_min_tokens(folder: Path) -> None:
    """EOS and stop tokens are not drawn, where they would only not have been obeyed."""
    eos = (*range(3, 200), *range(210, 288))
    async with serving(folder, eos=eos) as client:
        assert len(await client.ask(ignore_eos=False)) < 12
        choice = await client.choice(ignore_eos=False, min_tokens=12)
        assert not set(choice["token_ids"][:12]) & set(eos)
        assert choice["finish_reason"] == "stop" and choice["token_ids"][-1] in eos
        assert set(await client.ask(ignore_eos=True, min_tokens=12)) & set(eos), "ignored, it is no end"
        rest = list(range(203, 210))
        choice = await client.choice(ignore_eos=False, min_tokens=3, stop_token_ids=rest)
        assert not set(choice["token_ids"][:3]) & {*eos, *rest}
