"""How an executor verifies drafts: the law of its texts, and what must not depend on drafts at all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from bien.core.request import SamplingParams
from bien.core.speculation.options import SpeculationSpec
from bien.core.speculation.speculator import DeviceDraft, Drawer
from bien.core.testing.toy import write_toy
from bien.plugins.speculators.early_exit import EarlyExit, EarlyExitConfig
from tests.core.executors.bushy import Bushy
from tests.core.executors.driver import Driver

PROMPT = [9, 4, 7, 7, 1, 30, 22, 5, 90, 41, 3]
LAYERS = 2
WARM = SamplingParams(temperature=1.0)
LIVELY = SamplingParams(temperature=0.8)
RULES = [("standard", "quantile"), ("block", "quantile"), ("block", "gumbel")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), num_hidden_layers=LAYERS)


def spec(rule: Any = "invariant", noise: Any = "quantile", **other: Any) -> SpeculationSpec:
    return SpeculationSpec(verification=rule, noise=noise, **other)


class Sparse(EarlyExit):
    """Samples among the four likeliest tokens, in no order, with other chances than they have."""

    dense = False

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        return super().propose(rows, last, limit, _Few(drawer, self.dense))


class Dense(Sparse):
    """The same with all other tokens beside them, at no chance."""

    dense = True


class _Few:
    def __init__(self, inner: Drawer, dense: bool) -> None:
        self.inner, self.dense = inner, dense

    def draw(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        best = logits.topk(4, dim=-1, sorted=False)
        values = best.values * torch.tensor([1.6, 0.4, 1.2, 0.9]).to(logits)
        if self.dense:
            whole = torch.full_like(logits, float("-inf"))
            return self.inner.draw(whole.scatter(1, best.indices, values))
        return self.inner.draw(values, best.indices)


def drafter(layers: int = LAYERS, kind: type[EarlyExit] = EarlyExit, **fields: Any) -> EarlyExit:
    return kind(EarlyExitConfig(layers=layers, **{"max_drafts": 3, "sampled": True} | fields))


def rounds(driver: Driver, slots: list[int], least: int, cut: int = 99) -> None:
    """Until every slot has `least` tokens of output; of device drafts the first `cut` in turn."""
    turn = 0
    while left := [s for s in slots if len(driver.content[s]) < len(PROMPT) + least]:
        work = {s: len(driver.content[s]) - driver.computed[s] for s in left}
        turn += 1
        most = cut if turn % 2 else 99
        drafts = {s: [0] * min(most, driver.proposed.get(s, 0)) for s in left}
        driver.step(work, drafts, device=True)


def law(folder: Path, sampling: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The target's joint law of the first tokens, from the logits of every text there may be."""
    driver = Driver(folder, dtype="float64", slots=64, blocks=600)
    found = {(): 1.0}
    for _ in range(length):
        slots = {driver.add([*PROMPT, *text], prompt=len(PROMPT)): text for text in found}
        driver.step({s: len(driver.content[s]) for s in slots})
        further = {}
        for slot, text in slots.items():
            logits = driver.logits[slot][0].copy()
            for token in set(text):
                logits[token] -= sampling.presence_penalty
            kept = np.argsort(-logits)[: sampling.top_k]
            weights = np.exp((logits[kept] - logits[kept].max()) / sampling.temperature)
            for token, share in zip(kept.tolist(), weights / weights.sum(), strict=True):
                further[*text, token] = found[text] * share
            driver.release(slot)
        found = further
    return found


@pytest.mark.parametrize(
    ("rule", "noise", "kind", "total"),
    [
        ("block", "quantile", "penalties", 300),
        ("standard", "quantile", "sparse", 300),
        *(
            pytest.param(*how, kind, 1200, marks=pytest.mark.slow)
            for how in RULES
            for kind in ("dense", "sparse", "penalties")
        ),
    ],
)
def test_the_law_of_texts_is_the_targets(folder: Path, rule: str, noise: str, kind: str, total: int) -> None:
    """Many seeds over several rounds, of which every second one verifies a part of what was drafted."""
    sampling = SamplingParams(temperature=4.0, top_k=3)
    if kind == "penalties":
        sampling = msgspec.structs.replace(sampling, presence_penalty=2.0)
    exact = law(folder, sampling, 3)
    counts: Counter[tuple[int, ...]] = Counter()
    many = min(total, 150)
    speculator = drafter(LAYERS, Sparse if kind == "sparse" else Dense)
    driver = Driver(
        folder,
        dtype="float32",
        slots=many,
        blocks=many * 3,
        speculation=spec(rule, noise),
        speculator=speculator,
    )
    for first in range(0, total, many):
        driver.free = [list(range(many * 3, 0, -1)) for _ in driver.groups]
        slots = [driver.add(PROMPT, sampling=sampling, seed=first + i, max_drafts=3) for i in range(many)]
        rounds(driver, slots, 3, cut=1)
        for slot in slots:
            counts[tuple(driver.release(slot)[len(PROMPT) :][:3])] += 1
    assert set(counts) <= set(exact)
    # Texts that are hardly to be expected count as one.
    often = [text for text, p in exact.items() if total * p > 5]
    pairs = [(counts[text], total * exact[text]) for text in often]
    pairs.append((total - sum(n for n, _ in pairs), total - sum(e for _, e in pairs)))
    distance = sum((n - e) ** 2 / e for n, e in pairs)
    freedom = len(pairs) - 1
    assert distance < freedom + 3 * (2 * freedom) ** 0.5, f"chi-square {distance:.1f} of {freedom}"
    assert 0.3 < driver.taken / driver.drafted < 0.9


@pytest.mark.parametrize(("rule", "noise"), RULES)
def test_drafts_of_the_targets_law_are_all_taken(folder: Path, rule: str, noise: str) -> None:
    driver = Driver(folder, dtype="float64", speculation=spec(rule, noise), speculator=drafter())
    slots = [driver.add(PROMPT, sampling=WARM, seed=i, max_drafts=3) for i in range(6)]
    rounds(driver, slots, 12)
    assert driver.drafted > 40 and driver.taken == driver.drafted


@pytest.mark.parametrize(("rule", "noise"), [("standard", "quantile"), ("block", "gumbel")])
def test_greedy_text_is_greedy(folder: Path, rule: str, noise: str) -> None:
    plain = Driver(folder, dtype="float64")
    want = plain.generate(plain.add(PROMPT), 20)
    driver = Driver(folder, dtype="float64", speculation=spec(rule, noise), speculator=drafter(1))
    slots = [driver.add(PROMPT, max_drafts=3), driver.add(PROMPT, sampling=WARM, seed=3, max_drafts=3)]
    rounds(driver, slots, 12)
    text = driver.content[slots[0]][len(PROMPT) :]
    assert text == want[: len(text)]


@pytest.mark.parametrize("noise", ["quantile", "gumbel"])
@pytest.mark.parametrize("kind", [EarlyExit, Sparse])
def test_invariant_text_does_not_depend_on_drafts(folder: Path, noise: str, kind: type[EarlyExit]) -> None:
    """Whoever drafts, and as many as they like; and the shared noise makes drafts better than greedy ones."""
    texts, shares = [], {}
    makers = {
        "none": None,
        "greedy": drafter(1, sampled=False),
        "sampled": drafter(1, kind),
        "all layers": drafter(LAYERS, max_drafts=5),
    }
    for name, speculator in makers.items():
        parts = {} if speculator is None else {"speculator": speculator}
        driver = Driver(folder, dtype="float64", speculation=spec("invariant", noise), **parts)
        slots = [driver.add(PROMPT, sampling=LIVELY, seed=i, max_drafts=5) for i in range(8)]
        rounds(driver, slots, 12, cut=2)
        texts.append([driver.content[s][len(PROMPT) : len(PROMPT) + 12] for s in slots])
        shares[name] = driver.taken / driver.drafted if driver.drafted else 0.0
    assert all(other == texts[0] for other in texts[1:])
    assert len({tuple(t) for t in texts[0]}) > 4
    assert shares["all layers"] == 1.0
    if kind is EarlyExit:
        assert shares["sampled"] > shares["greedy"]


@pytest.mark.parametrize(("rule", "noise"), [("invariant", "quantile"), *RULES])
def test_recorded_text_is_what_comes(folder: Path, rule: str, noise: str) -> None:
    """Sampled drafts are taken where they are the recorded token, and nowhere else."""
    forced = [200, 3, 77, 5, 90, 41, 22, 9]
    driver = Driver(folder, dtype="float64", speculation=spec(rule, noise), speculator=drafter())
    slot = driver.add(PROMPT, sampling=LIVELY, seed=3, forced=forced, max_drafts=3)
    rounds(driver, [slot], len(forced))
    assert driver.content[slot][len(PROMPT) :][: len(forced)] == forced


@pytest.mark.parametrize(("rule", "noise"), RULES)
def test_masks_hold_for_sampled_drafts(folder: Path, rule: str, noise: str) -> None:
    driver = Driver(folder, dtype="float64", speculation=spec(rule, noise), speculator=drafter())
    slots = [driver.add(PROMPT, sampling=WARM, seed=i, max_drafts=3) for i in range(6)]
    driver.step({s: len(PROMPT) for s in slots})
    drafts = {s: [0] * driver.proposed[s] for s in slots}
    rows = sum(1 + len(d) for d in drafts.values())
    masks = torch.zeros(rows, 288, dtype=torch.bool)
    masks[:, 100:140] = True
    gained = driver.step(dict.fromkeys(slots, 1), drafts, device=True, masks=masks)
    assert all(100 <= t < 140 for tokens in gained.values() for t in tokens)


def test_host_drafts_beside_a_device_drafter(folder: Path) -> None:
    """A row may carry the client's drafts where others carry the drafter's; laws of drafts that were not
    verified are forgotten."""
    plain = Driver(folder, dtype="float64")
    truth = plain.generate(plain.add(PROMPT), 20)
    for rule in ("invariant", "block"):
        driver = Driver(folder, dtype="float64", speculation=spec(rule), speculator=drafter())
        mine, theirs = driver.add(PROMPT, max_drafts=3), driver.add(PROMPT, max_drafts=3)
        warm = driver.add(PROMPT, sampling=WARM, seed=2, max_drafts=3)
        driver.step({mine: 11, theirs: 11, warm: 11})
        drafts = {mine: truth[1:6], theirs: [0] * driver.proposed[theirs], warm: [8, 9]}
        gained = driver.step({mine: 1, theirs: 1, warm: 1}, drafts, device=True, hosted=(mine, warm))
        assert gained[mine] == truth[1:7]
        assert gained[theirs] == truth[1 : 2 + len(drafts[theirs])]
        assert driver.proposed[mine] > 0 and driver.proposed[warm] > 0
        rounds(driver, [mine, theirs, warm], 12)
        for slot in (mine, theirs):
            text = driver.content[slot][len(PROMPT) :]
            assert text == truth[: len(text)]


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_clients_drafts_are_no_drawn_ones(folder: Path, rule: str) -> None:
    """Beside rows that are tested against what their drafter drew from, they are taken where the target draws
    them, and nowhere else: whatever was drawn in their place, and never verified, is no law of theirs."""
    plain = Driver(folder, dtype="float64")
    slots = [plain.add(PROMPT, sampling=LIVELY, seed=i) for i in range(7)]
    truth = [plain.generate(slot, 6) for slot in slots]
    driver = Driver(folder, dtype="float64", speculation=spec(rule), speculator=drafter(1))
    *mine, other = [driver.add(PROMPT, sampling=LIVELY, seed=i, max_drafts=3) for i in range(7)]
    driver.step({s: len(PROMPT) for s in [*mine, other]})
    wrong = [(text[3] + 1) % 288 for text in truth]
    drafts = {s: [*text[1:3], odd] for s, text, odd in zip(mine, truth, wrong, strict=False)}
    drafts[other] = [0] * driver.proposed[other]
    assert len(drafts[other]) == 3
    gained = driver.step(dict.fromkeys([*mine, other], 1), drafts, device=True, hosted=tuple(mine))
    assert [gained[s] for s in mine] == [text[1:4] for text in truth[:6]]
    again = driver.step(dict.fromkeys(mine, 1), {s: [8, 9] for s in mine}, device=True, hosted=tuple(mine))
    assert [again[s] for s in mine] == [text[4:5] for text in truth[:6]]


class Confident(EarlyExit):
    def __init__(self, config: EarlyExitConfig) -> None:
        super().__init__(config)
        self.caps = msgspec.structs.replace(self.caps, confidence="prior")

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        draft = super().propose(rows, last, limit, drawer)
        chances = torch.arange(draft.tokens.shape[1]) * 0.25 + last[:, None] / 1000
        return DeviceDraft(draft.tokens, chances)


def test_confidences_are_reported(folder: Path) -> None:
    """Of each row's proposed drafts, one row after the other."""
    driver = Driver(folder, speculator=drafter(1, Confident, sampled=False))
    slots = [driver.add(PROMPT, max_drafts=n) for n in (3, 0, 1)]
    driver.step(dict.fromkeys(slots, 11))
    last = driver.content[slots[0]][-1]
    assert [driver.proposed[s] for s in slots] == [3, 0, 1]
    want = [last / 1000, 0.25 + last / 1000, 0.5 + last / 1000, last / 1000]
    assert driver.result.confidence.dtype == np.float32
    np.testing.assert_allclose(driver.result.confidence, want, rtol=1e-6)
    assert driver.result.parents is None
    other = Driver(folder, speculator=drafter(1))
    other.step({other.add(PROMPT, max_drafts=3): 11})
    assert other.result.confidence is None


WRONG: dict[str, Callable[[Tensor], DeviceDraft]] = {
    "float drafts": lambda t: DeviceDraft(t.double() + 0.5),
    "drafts that are no number": lambda t: DeviceDraft(t.double() * float("nan")),
    "yes or no": lambda t: DeviceDraft(t > 0),
    "float parents": lambda t: DeviceDraft(t, None, torch.full(t.shape, -0.5)),
    "parents that are no number": lambda t: DeviceDraft(t, None, torch.full(t.shape, float("nan"))),
    "no tensors": lambda t: DeviceDraft(t.tolist()),  # type: ignore[arg-type]
    "drafts that were not drawn": lambda t: DeviceDraft((t + 1) % 288),
    "more drafts than were drawn": lambda t: DeviceDraft(t.repeat(1, 2)),
}


class Odd(EarlyExit):
    """Changes what was drawn."""

    def __init__(self, change: Callable[[Tensor], DeviceDraft], parents: bool) -> None:
        super().__init__(EarlyExitConfig(layers=1, max_drafts=4, sampled=True))
        self.caps = msgspec.structs.replace(self.caps, topology="tree" if parents else "chain")
        self.change = change

    def propose(self, rows: Any, last: Tensor, limit: int, drawer: Drawer) -> DeviceDraft:
        return self.change(super().propose(rows, last, limit // 2, drawer).tokens)


@pytest.mark.parametrize("name", WRONG)
def test_a_device_drafter_that_breaks_its_contract_is_left_out(folder: Path, name: str) -> None:
    """And the texts go on without it."""
    speculator = Odd(WRONG[name], "parents" in name)
    driver = Driver(folder, dtype="float64", speculation=spec("standard"), speculator=speculator)
    plain = Driver(folder, dtype="float64")
    want = plain.generate(plain.add(PROMPT, sampling=WARM, seed=3), 4)
    slot = driver.add(PROMPT, sampling=WARM, seed=3, max_drafts=4)
    driver.step({slot: 11})
    assert driver.proposed[slot] == 0
    assert driver.generate(slot, 3) == want[1:]


def test_drafts_as_they_were_drawn_are_proposed(folder: Path) -> None:
    """The same drafter, without its fault."""
    driver = Driver(folder, speculation=spec("standard"), speculator=Odd(DeviceDraft, False))
    slot = driver.add(PROMPT, sampling=WARM, seed=3, max_drafts=4)
    driver.step({slot: 11})
    assert driver.proposed[slot] == 2


def test_a_device_drafter_of_trees(folder: Path) -> None:
    """The drafter absorbs the path that was taken: where it has all layers, the next tree is right again."""
    plain = Driver(folder, dtype="float64")
    truth = plain.generate(plain.add(PROMPT), 24)
    driver = Driver(
        folder, dtype="float64", block_tokens=16, speculator=drafter(LAYERS, Bushy, sampled=False)
    )
    slots = [driver.add(PROMPT, max_drafts=n) for n in (6, 5)]
    driver.step(dict.fromkeys(slots, 11))
    for _ in range(3):
        counts = {s: driver.proposed[s] for s in slots}
        parents, at = {}, 0
        for s, n in counts.items():
            parents[s] = driver.result.parents[at : at + n].tolist()
            at += n
        assert at == len(driver.result.parents)
        drafts = {s: [0] * n for s, n in counts.items()}
        gained = driver.step(dict.fromkeys(slots, 1), drafts, device=True, parents=parents)
        for s, n in counts.items():
            assert len(gained[s]) == 1 + n // 2
            text = driver.content[s][len(PROMPT) :]
            assert text == truth[: len(text)]


# -- forced acceptance


@pytest.mark.parametrize("chances", [(1.0, 1.0), (1.0, 0.0, 1.0), (0.5, 0.5, 0.5)])
def test_forced_acceptance_of_recorded_text(folder: Path, chances: tuple[float, ...]) -> None:
    """The text is the recorded one, the lengths are drawn, and what is computed is what the text says."""
    forced = [(7 * i) % 250 + 3 for i in range(60)]
    plain = Driver(folder, dtype="float64")
    other = plain.add(PROMPT, forced=forced)
    logits = []
    while len(logits) < 30:
        plain.step({other: len(plain.content[other]) - plain.computed[other]})
        logits.append(plain.logits[other][0])
    driver = Driver(
        folder, dtype="float64", speculation=spec(acceptance=chances), speculator=drafter(1, sampled=False)
    )
    slot = driver.add(PROMPT, forced=forced, seed=4, max_drafts=3)
    driver.step({slot: 11})
    lengths: set[int] = set()
    while len(driver.content[slot]) < len(PROMPT) + 24:
        at, n = len(driver.content[slot]) - len(PROMPT), driver.proposed[slot]
        gained = driver.step({slot: 1}, {slot: [0] * n}, device=True)[slot]
        lengths |= {len(gained) - 1} if n == 3 else set()
        for j in range(len(gained)):
            np.testing.assert_allclose(driver.logits[slot][j], logits[at + j], rtol=1e-9, atol=1e-9)
    assert driver.content[slot][len(PROMPT) :] == forced[: len(driver.content[slot]) - len(PROMPT)]
    assert lengths == {1.0: {2}, 0.0: {1}}.get(chances[1], lengths)
    assert chances[0] == 1 or len(lengths) > 1


def test_forced_acceptance_of_drafts(folder: Path) -> None:
    driver = Driver(folder, speculation=spec(acceptance=(1.0, 1.0, 0.0)))
    chain, tree = driver.add(PROMPT), driver.add(PROMPT)
    driver.step({chain: 11, tree: 11})
    drafts = {chain: [5, 6, 7, 8], tree: [50, 60, 70, 80]}
    gained = driver.step({chain: 1, tree: 1}, drafts, parents={tree: [-1, -1, 0, 1]})
    assert gained[chain][:2] == [5, 6] and len(gained[chain]) == 3
    assert gained[tree][:2] == [50, 70] and len(gained[tree]) == 3


def test_laws_leave_with_their_sequence(folder: Path) -> None:
    driver = Driver(folder, speculation=spec("block"), speculator=drafter())
    slot = driver.add(PROMPT, sampling=WARM, max_drafts=3)
    driver.step({slot: 11})
    drafting: Any = driver.executor._drafting  # type: ignore[attr-defined]
    assert set(drafting.laws) == {slot} and len(drafting.laws[slot]) == 3
    driver.release(slot)
    other = driver.add(PROMPT)
    driver.step({other: 11})
    assert not drafting.laws
    assert list(itertools.chain(*drafting.laws.values())) == []
