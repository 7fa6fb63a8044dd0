"""Tiny drafters: the trainer's network and loss against formulas, the judge's law, calibration, the table."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bien.core.speculation.options import SpeculationSpec
from bien.replay.bench.drafters import __main__ as command
from bien.replay.bench.drafters import training
from bien.replay.bench.drafters.acceptance import Proposal, Rounds, _follow, _judge, drafted, speculate
from bien.replay.bench.drafters.calibration import calibration_error, fit_temperatures, scaled
from bien.replay.bench.drafters.network import Drafter
from bien.replay.bench.drafters.served import selection, serve
from bien.replay.bench.drafters.study import CONTEXT, MATCH, Budget, Study, save, study
from bien.replay.bench.drafters.target import (
    Progress,
    Target,
    encoded,
    standard_library,
    train_target,
    windows,
)
from bien.replay.bench.drafters.training import CE_ONLY, SPARK, Recipe, block_loss, train_drafter
from tests.plugins.speculators.block_oracle import Oracle


@pytest.fixture(scope="module")
def text() -> Tensor:
    return standard_library(200_000)[0]


@pytest.fixture(scope="module")
def pair(text: Tensor) -> tuple[Target, Drafter]:
    """With weights that matter, not those of a start."""
    target = Target(seed=1)
    drafter = Drafter(target, rank=16, seed=2)
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for module in (target, drafter):
            for weight in module.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=noise)
    return target, drafter


@pytest.fixture(scope="module")
def oracle(pair: tuple[Target, Drafter], tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("tiny")
    return Oracle(pair[1].save(folder / "drafter"), pair[0].save(folder / "target"))


def test_the_network_equals_the_formulas(pair: tuple[Target, Drafter], oracle: Oracle, text: Tensor) -> None:
    """Blocks that are computed together see what they see alone."""
    target, drafter = pair
    tokens = text[None, 500:530]
    with torch.no_grad():
        hidden = drafter(target(tokens)[1], tokens, torch.tensor([[3, 17, 5]]))
    for i, anchor in enumerate((3, 17, 5)):
        expected = oracle.block(tokens[0, : anchor + 1].tolist())
        assert (hidden[0, i] - expected).abs().max() < 1e-4


def expected_loss(oracle: Oracle, tokens: list[int], anchor: int, recipe: Recipe) -> float:
    block = oracle.own["block_size"]
    after = tokens[anchor + 1 : anchor + 1 + block]
    laws, chances = oracle.walk(tokens[: anchor + 1], oracle.block(tokens[: anchor + 1]), after)
    last = oracle.states(tokens)[-1]
    loss = total = 0.0
    for k, (law, label) in enumerate(zip(laws, after, strict=True)):
        own = torch.softmax(torch.tensor(list(law.values()), dtype=torch.float64), 0)
        normed = oracle.norm(last[anchor + k], oracle.theirs["model.norm.weight"])
        theirs = torch.softmax(oracle.theirs["lm_head.weight"] @ normed, 0)
        apart = 0.5 * float((own - theirs).abs().sum())
        taken = 1 - apart
        blame = -taken * math.log(chances[k]) - (1 - taken) * math.log(1 - chances[k])
        each = -recipe.entropy * math.log(own[label]) + recipe.distance * apart + recipe.confidence * blame
        weight = math.exp(-k / recipe.decay)
        loss, total = loss + weight * each, total + weight
    return loss / total


def check_loss(pair: tuple[Target, Drafter], oracle: Oracle, text: Tensor) -> None:
    target, drafter = pair
    recipe = Recipe(entropy=0.3, distance=0.9, confidence=1.1, anchors=1)
    tokens = text[None, 900:930]
    loss = block_loss(drafter, target, tokens, recipe, torch.Generator().manual_seed(6))
    chances = torch.rand(1, 30 - drafter.block - 1, generator=torch.Generator().manual_seed(6))
    anchor = int(chances.argmax()) + 1
    assert abs(float(loss.detach()) - expected_loss(oracle, tokens[0].tolist(), anchor, recipe)) < 1e-4


def test_the_loss_equals_the_formulas(pair: tuple[Target, Drafter], oracle: Oracle, text: Tensor) -> None:
    check_loss(pair, oracle, text)


def _label(drafter: Drafter, hidden: Tensor, previous: Tensor) -> Tensor:
    """The Markov bias by the token that is predicted."""
    return Drafter.logits(drafter, hidden, torch.roll(previous, -1, -1))


def _sees(drafter: Drafter, hidden: Tensor, previous: Tensor) -> Tensor:
    """A confidence that sees its own token."""
    return Drafter.confidence(drafter, hidden, torch.roll(previous, -1, -1))


@pytest.mark.parametrize(("name", "fault"), [("logits", _label), ("confidence", _sees)])
def test_planted_faults_of_the_loss(
    name: str,
    fault: Callable[..., Tensor],
    pair: tuple[Target, Drafter],
    oracle: Oracle,
    text: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = pair[1]
    monkeypatch.setattr(drafter, name, lambda hidden, previous: fault(drafter, hidden, previous))
    with pytest.raises(AssertionError):
        check_loss(pair, oracle, text)


def test_losses_fall(text: Tensor) -> None:
    target = Target(seed=3)
    losses = train_target(target, text, 8, 3, batch=4, length=32)
    assert sum(losses[-2:]) < sum(losses[:2]) - 0.5
    target.requires_grad_(False)
    for rank, recipe in ((0, CE_ONLY), (16, SPARK)):
        small = training.Recipe(**{**recipe.__dict__, "batch": 2, "length": 32, "anchors": 4})
        drafter = Drafter(target, rank=rank, seed=4)
        losses = train_drafter(drafter, target, text, small, 10, 5)
        assert sum(losses[-3:]) < 0.95 * sum(losses[:3]), losses


def test_bytes_have_the_tokenizers_ids(pair: tuple[Target, Drafter], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = pair[0].save(tmp_path)
    known = "def f(x):\n\treturn 'ä€' + x\r\n\x00\x7f"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(known, add_special_tokens=False).ids
    assert encoded(known.encode()).tolist() == ids


# -- the judge


def law_of(judge: Callable[..., Any], certain: bool) -> tuple[Tensor, Tensor]:
    """What many texts get as their next two tokens, and what the target's law says."""
    count, vocab = 60_000, 3
    p = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]])
    q = torch.tensor([[0.2, 0.2, 0.6], [0.5, 0.4, 0.1]])
    noise = torch.Generator().manual_seed(8)
    drafts = torch.stack([torch.multinomial(row, count, True, generator=noise) for row in q], 1)
    if certain:
        drafts[:] = torch.tensor([2, 0])
    law = p.expand(count, -1, -1)
    proposal = Proposal(drafts, torch.full((count,), 2), None if certain else q.expand(count, -1, -1))
    taken, own = judge(law, proposal, noise)
    first = torch.where(taken > 0, drafts[:, 0], own)
    second = torch.where(taken > 1, drafts[:, 1], own)[taken > 0]
    found = torch.stack([torch.bincount(t, minlength=vocab) / len(t) for t in (first, second)])
    return found, p[:2]


@pytest.mark.parametrize("certain", [False, True])
def test_judged_texts_follow_the_target(certain: bool) -> None:
    found, law = law_of(_judge, certain)
    assert (found - law).abs().max() < 0.015


def test_a_wrong_residual_is_seen() -> None:
    """Behind a refused draft a token of the target's whole law, as if nothing had been tested."""

    def wrong(law: Tensor, drafts: Proposal, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        taken, _ = _judge(law, drafts, noise)
        behind = law[torch.arange(len(taken)), taken]
        return taken, torch.multinomial(behind, 1, generator=noise)[:, 0]

    found, law = law_of(wrong, False)
    assert (found - law).abs().max() > 0.05


def test_a_drafter_that_is_the_target_is_always_right(text: Tensor) -> None:
    target = Target(seed=5)
    contexts = windows(text, 5, 20, torch.Generator().manual_seed(0))

    def told(states: Any, tokens: Tensor, lengths: Tensor, noise: torch.Generator) -> Proposal:
        tokens, drafts = tokens.clone(), []
        row = torch.arange(len(tokens))
        for k in range(3):
            logits = target(tokens)[0][row, lengths - 1 + k]
            drafts.append(logits.argmax(-1))
            tokens[row, lengths + k] = drafts[-1]
        return Proposal(torch.stack(drafts, 1), torch.full((len(tokens),), 3))

    found = speculate(target, told, contexts, 3, 0, most=3, temperature=0.0)
    assert found.length == 4
    assert found.by_position() == [1, 1, 1]
    worse = speculate(target, drafted(Drafter(target, seed=1), 0.0), contexts, 3, 0, temperature=0.0)
    assert 1 <= worse.length < 4


def test_positions_count_what_was_reached() -> None:
    rounds = Rounds([torch.tensor([2, 0, 1])], [torch.tensor([2, 2, 1])])
    assert rounds.length == 2
    assert rounds.by_position() == [pytest.approx(2 / 3), 1.0]


@pytest.mark.parametrize(
    ("known", "expected"),
    [([1, 2, 3, 9, 1, 2, 3], [9, 1]), ([1, 2, 7, 2, 5, 1, 2], [7, 2]), ([1, 2, 3], []), ([4, 4, 4], [4])],
)
def test_the_longest_match(known: list[int], expected: list[int]) -> None:
    assert _follow(known, 2) == expected


# -- calibration


def test_calibration_finds_the_temperatures() -> None:
    """Chances whose logits are twice too large at the first draft, and half of what they should be then."""
    rng = np.random.default_rng(0)
    true = rng.uniform(0.2, 0.97, (20_000, 3))
    taken = (rng.uniform(size=true.shape) < true).cumprod(1).sum(1)
    said = np.stack([scaled(true[:, 0], 0.5), scaled(true[:, 1], 2.0), true[:, 2]], 1)
    assert calibration_error(true, taken) < 0.01
    before = calibration_error(said, taken)
    temperatures = fit_temperatures(said[:10_000], taken[:10_000])
    assert np.allclose(temperatures, [2.0, 0.5, 1.0], rtol=0.25)
    after = calibration_error(scaled(said[10_000:], np.array(temperatures)), taken[10_000:])
    assert after < 0.012 < 0.04 < before


# -- the table


def test_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = ["--seeds", "1", "--target-steps", "1", "--steps", "1", "--contexts", "4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["drafters", *few, "--keep", str(tmp_path)])
    command.main()
    out = capsys.readouterr()
    for name in ("DFlash, cross-entropy", "DFlash, 0.1 CE + 0.9 TV", "DSpark", "longest match"):
        lines = [line for line in out.out.splitlines() if line.startswith(name)]
        assert len(lines) == 2, out.out
        assert float(lines[0].split(" ")[-1] != "") >= 1  # positions are there
    assert "seed 0, DSpark: step 0, loss" in out.err
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")}
    assert {"seed-0/target/config.json", "seed-0/dspark/calibration.json"} <= written


# -- trained ones


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    budget = Budget(contexts=240, rounds=6)
    found = study(0, budget, standard_library(), ("DFlash, cross-entropy", "DSpark", MATCH), told)
    folder = tmp_path_factory.mktemp("trained")
    save(found, folder)
    return found, folder


def told(name: str) -> Progress:
    def tell(step: int, loss: float) -> None:
        if step % 25 == 0:
            print(f"{name}: step {step}, loss {loss:.3f}", flush=True)

    return tell


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_dspark_is_taken_more_often_than_dflash(trained: tuple[Study, Path]) -> None:
    flash, spark, match = trained[0].rows
    assert flash.warm > 1.5
    assert spark.warm > flash.warm + 0.3
    assert match.warm < flash.warm
    # DFlash's later drafts do not know what came before them.
    assert sum(spark.positions[2:5]) > sum(flash.positions[2:5])
    assert spark.error is not None and max(spark.error) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["DFlash, cross-entropy", "DSpark"])
def test_trained_drafters_in_the_engine(name: str, trained: tuple[Study, Path]) -> None:
    """Loaded by their plugins: taken as often as in the trainer's own loop, within what chance allows."""
    found, folder = trained
    contexts = windows(standard_library()[1], 96, CONTEXT, torch.Generator().manual_seed(1000)).tolist()
    chosen = selection(found, name, folder)
    counts = serve(folder / "target", chosen, SpeculationSpec(verification="standard"), contexts, 20).counts
    (row,) = [row for row in found.rows if row.name == name]
    reached = counts.rounds
    for k in range(3):
        tried = min(reached, counts.drafted_at[k])
        share = counts.accepted_at[k] / tried
        assert abs(share - row.positions[k]) < 4 * math.sqrt(0.25 / tried) + 0.02, f"draft {k}"
        reached = counts.accepted_at[k]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("noise", ["quantile", "gumbel"])
def test_texts_are_those_without_a_drafter(noise: Any, trained: tuple[Study, Path]) -> None:
    found, folder = trained
    contexts = windows(standard_library()[1], 24, CONTEXT, torch.Generator().manual_seed(7)).tolist()
    spec = SpeculationSpec(noise=noise)
    alone = serve(folder / "target", None, spec, contexts, 24, dtype="float64")
    for name in found.drafters:
        drafted = serve(
            folder / "target", selection(found, name, folder), spec, contexts, 24, dtype="float64"
        )
        assert drafted.texts == alone.texts
        assert drafted.counts.accepted > 20
