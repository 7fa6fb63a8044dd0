"""The executor contract: tokens, seeds, forced text, drafts, states, block access, refusals."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from bien.core.architectures.registry import read_architecture
from bien.core.errors import PluginFault, ResourceError, UserError
from bien.core.executors.make import make_executor
from bien.core.kv.groups import GroupKind
from bien.core.plan import ExecutorPlan, NewSequence, StateCopy, i32
from bien.core.providers import Context
from bien.core.request import BlockRuns, SamplingParams
from bien.core.testing.toy import write_toy
from bien.core.testing.toy_hybrid import write_tiny_hybrid
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.none import NoQuantizer
from bien.plugins.speculators.early_exit import EarlyExit, EarlyExitConfig
from tests.core.executors.driver import Driver

PROMPT = [9, 4, 7, 7, 1, 30, 22, 5, 90, 41, 3]
WARM = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid"))


def exact(folder: Path, **parts: object) -> Driver:
    return Driver(folder, dtype="float64", **parts)  # type: ignore[arg-type]


def text(folder: Path, count: int, **options: object) -> list[int]:
    driver = exact(folder)
    return driver.generate(driver.add(PROMPT, **options), count)  # type: ignore[arg-type]


def test_greedy_takes_the_largest_logit(folder: Path) -> None:
    driver = exact(folder)
    slot = driver.add(PROMPT)
    for _ in range(5):
        (token,) = driver.step({slot: len(driver.content[slot]) - driver.computed[slot]})[slot]
        assert token == int(driver.logits[slot][0].argmax())


def test_seeds_decide_and_nothing_else(folder: Path) -> None:
    """Sampled text depends on the seed only: not on company, chunks or a preemption."""
    alone = text(folder, 12, sampling=WARM, seed=7)
    assert alone == text(folder, 12, sampling=WARM, seed=7)
    assert alone != text(folder, 12, sampling=WARM, seed=8)
    driver = exact(folder, shuffle=1)
    slot, other = driver.add(PROMPT, sampling=WARM, seed=7), driver.add(PROMPT[::-1], sampling=WARM, seed=7)
    driver.step({other: 4, slot: 3})
    driver.step({slot: 8, other: 7})
    for _ in range(4):
        driver.step({other: 1, slot: 1})
    known = driver.release(slot)
    again = driver.add(known, prompt=len(PROMPT), sampling=WARM, seed=7)
    assert (known + driver.generate(again, 12 - len(known) + len(PROMPT)))[len(PROMPT) :] == alone


PENAL = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    logit_bias=((5, 0.5), (8, -100.0)),
)


def penalised(logits: np.ndarray, known: list[int], prompt: int) -> int:
    """The greedy choice under PENAL, in plain loops."""
    row, output = logits.tolist(), known[prompt:]
    for token in set(known):
        row[token] = row[token] / 1.3 if row[token] > 0 else row[token] * 1.3
    for token in set(output):
        row[token] -= 0.4 * output.count(token) + 0.3
    row[5] += 0.5
    row[8] -= 100.0
    return max(range(len(row)), key=lambda i: (row[i], -i))


def test_penalties_follow_the_text(folder: Path) -> None:
    driver = exact(folder)
    slot, plain = driver.add(PROMPT, sampling=PENAL), driver.add(PROMPT)
    for _ in range(12):
        known = list(driver.content[slot])
        work = {s: len(driver.content[s]) - driver.computed[s] for s in (slot, plain)}
        (token,) = driver.step(work)[slot]
        assert token == penalised(driver.logits[slot][0], known, len(PROMPT))
    assert driver.content[plain] == PROMPT + text(folder, 12)
    assert driver.content[slot] != driver.content[plain]
    driver.release(slot)
    again = driver.add(PROMPT)  # takes the slot over, and none of its penalties
    assert again == slot
    assert driver.generate(again, 12) == driver.content[plain][len(PROMPT) :]


@pytest.mark.parametrize("right", range(5))
def test_penalties_of_a_draft_count_the_drafts_before_it(folder: Path, right: int) -> None:
    """Each draft row is drawn as if the drafts before it were the text; the text is that without drafts."""
    want = text(folder, 12, sampling=PENAL)
    driver = exact(folder)
    slot = driver.add(PROMPT, sampling=PENAL)
    driver.step({slot: len(PROMPT)})
    drafts = want[1 : 1 + right] + [(t + 1) % 90 for t in want[1 + right : 5]]
    known = list(driver.content[slot])
    gained = driver.step({slot: 1}, {slot: drafts})[slot]
    assert gained == want[1 : 2 + right]
    drawn = [penalised(row, known + drafts[:i], len(PROMPT)) for i, row in enumerate(driver.logits[slot])]
    assert gained == drawn[: 1 + right]
    assert (known + gained + driver.generate(slot, 6))[len(PROMPT) :] == want[: 8 + right]


def test_logprobs_are_the_models_and_of_those_who_ask(folder: Path) -> None:
    driver = exact(folder)
    asks = [
        SamplingParams(temperature=0.0, logprobs=2),
        msgspec.structs.replace(PENAL, temperature=2.0, logprobs=0),
    ]
    slots = [driver.add(PROMPT, sampling=s, seed=3) for s in asks]
    mute = driver.add(PROMPT)
    driver.step({slots[0]: 4, slots[1]: len(PROMPT), mute: 4})
    assert driver.logprobs.keys() == {slots[1]}, "a chunk has none"
    gained = driver.step({slots[0]: len(PROMPT) - 4, mute: len(PROMPT) - 4, slots[1]: 1})
    assert driver.logprobs.keys() == set(slots)
    for slot, top in zip(slots, (2, 0), strict=True):
        law = log_softmax(driver.logits[slot])[0]
        found = driver.logprobs[slot]
        assert memoryview(found.chosen).cast("f").tolist() == [np.float32(law[gained[slot][0]])]
        assert memoryview(found.ids).cast("I").tolist() == np.argsort(-law)[:top].tolist()
    driver.release(slots[1])
    again = driver.add(PROMPT)
    driver.step({again: len(PROMPT)})
    assert not driver.logprobs


@pytest.mark.parametrize("right", range(4))
def test_logprobs_behind_drafts_are_those_without(folder: Path, right: int) -> None:
    sampling = SamplingParams(temperature=1.0, logprobs=3)
    plain = exact(folder)
    slot = plain.add(PROMPT, sampling=sampling, seed=1)
    want: list[int] = []
    values: list[list[float]] = []
    while len(want) < 6:
        want += plain.step({slot: len(plain.content[slot]) - plain.computed[slot]})[slot]
        found = plain.logprobs[slot]
        values.append([*memoryview(found.chosen).cast("f"), *memoryview(found.values).cast("f")])
    driver = exact(folder)
    other, slot = driver.add(PROMPT[::-1]), driver.add(PROMPT, sampling=sampling, seed=1)
    driver.step({other: len(PROMPT), slot: len(PROMPT)})
    drafts = want[1 : 1 + right] + [(t + 1) % 90 for t in want[1 + right : 4]]
    gained = driver.step({other: 1, slot: 1}, {slot: drafts, other: [3, 4]})[slot]
    assert gained == want[1 : 2 + right]
    found = driver.logprobs[slot]
    chosen = np.frombuffer(found.chosen, "<f4").reshape(-1, 1)
    rows = np.hstack([chosen, np.frombuffer(found.values, "<f4").reshape(-1, 3)])
    np.testing.assert_allclose(rows, values[1 : 2 + right], atol=1e-6)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_an_end_comes_only_behind_min_tokens(folder: Path) -> None:
    ends = tuple(set(text(folder, 12)))
    driver = exact(folder)
    sampling = SamplingParams(temperature=0.0, min_tokens=5)
    slot = driver.add(PROMPT, sampling=sampling, ends=ends)
    for made in range(8):
        (token,) = driver.step({slot: len(driver.content[slot]) - driver.computed[slot]})[slot]
        row = driver.logits[slot][0].copy()
        if made < 5:
            row[list(ends)] = -np.inf
        assert token == int(row.argmax())


def test_forced_tokens_replace_what_is_drawn(folder: Path) -> None:
    forced = [200, 3, 77]
    found = text(folder, 6, forced=forced)
    assert found[:3] == forced
    driver = exact(folder)
    assert found[3:] == driver.generate(driver.add(PROMPT + forced, prompt=len(PROMPT)), 3)


def test_forced_tokens_count_from_the_prompt(folder: Path) -> None:
    """After a preemption the recorded text goes on where it was."""
    driver = exact(folder)
    slot = driver.add([*PROMPT, 200, 3], prompt=len(PROMPT), forced=[200, 3, 77, 5])
    assert driver.generate(slot, 2) == [77, 5]


def test_masks_forbid_tokens(folder: Path) -> None:
    driver = exact(folder)
    a, b = driver.add(PROMPT), driver.add(PROMPT[:5])
    masks = torch.zeros(2, 288, dtype=torch.bool)
    masks[0, 17] = masks[1, 33] = True
    assert driver.step({a: 11, b: 5}, masks=masks) == {a: [17], b: [33]}


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), WARM])
@pytest.mark.parametrize("kind", ["toy", "hybrid"])
def test_host_drafts_change_nothing(kind: str, sampling: SamplingParams, folder: Path, hybrid: Path) -> None:
    model = folder if kind == "toy" else hybrid
    truth = text(model, 16, sampling=sampling, seed=3)
    vocab = 288 if kind == "toy" else 97
    for wrong_at in range(4):
        driver = exact(model)
        slot = driver.add(PROMPT, sampling=sampling, seed=3)
        out = driver.step({slot: len(PROMPT)})[slot]
        while len(out) < 13:
            drafts = truth[len(out) : len(out) + 3]
            if wrong_at < 3:
                drafts[wrong_at] = (drafts[wrong_at] + 1) % vocab
            gained = driver.step({slot: 1}, {slot: drafts})[slot]
            assert len(gained) == wrong_at + 1
            out += gained
        assert out == truth[: len(out)]


def test_device_drafts(tmp_path: Path) -> None:
    """A drafter as deep as the target proposes the target's own text, as far as it has blocks to write in."""
    folder = write_toy(tmp_path, num_hidden_layers=2)
    truth = text(folder, 20)
    drafter = EarlyExit(EarlyExitConfig(layers=2, max_drafts=3))
    driver = exact(folder, speculator=drafter)
    assert [g.kind for g in driver.groups] == [GroupKind.FULL, GroupKind.DRAFT]
    slot, plain = driver.add(PROMPT, max_drafts=3), driver.add(PROMPT)
    out = driver.step({slot: 11, plain: 11})[slot]
    rounds = 0
    while len(out) < 16:
        # The last known token sits at position p; blocks of 8 reach up to the next multiple of 8.
        room = -len(driver.content[slot]) % 8
        assert driver.proposed == {slot: min(3, room + 1) if driver.computed[slot] % 8 else 0, plain: 0}
        n = driver.proposed[slot]
        proposed = truth[len(out) : len(out) + n]
        gained = driver.step({slot: 1, plain: 1}, {slot: [0] * n}, device=True)[slot]
        assert gained[:-1] == proposed
        out += gained
        rounds += 1
    assert out == truth[: len(out)] and rounds < 12


def test_states_restore_and_snapshot(hybrid: Path) -> None:
    """A snapshot taken at a block boundary starts another sequence there."""
    driver = exact(hybrid)
    state = next(i for i, g in enumerate(driver.groups) if g.kind is GroupKind.STATE)
    prompt = (PROMPT * 3)[:24]
    a = driver.add([*prompt, 5, 6, 7])
    block = driver.free[state].pop()
    live = driver.tables[a][state][0]
    driver.step({a: 24}, snapshots=[StateCopy(state, a, 24, live, block)])
    b = driver.add([*prompt, 50, 60], like=(a, 3), states={state: block})
    fresh = exact(hybrid)
    c = fresh.add([*prompt, 50, 60])
    assert driver.generate(b, 6) == fresh.generate(c, 6)


def test_snapshot_among_drafts(hybrid: Path) -> None:
    """A snapshot at a position among drafts happens only when they were accepted."""
    truth = text(hybrid, 16)
    for right in (True, False):
        driver = exact(hybrid)
        state = next(i for i, g in enumerate(driver.groups) if g.kind is GroupKind.STATE)
        slot = driver.add(PROMPT)
        driver.generate(slot, 4)
        block, live = driver.free[state].pop(), driver.tables[slot][state][0]
        before = driver.executor.pools[state].data[:, block].clone()
        drafts = [truth[4], truth[5] if right else (truth[5] + 1) % 97, truth[6]]
        driver.step({slot: 1}, {slot: drafts}, snapshots=[StateCopy(state, slot, 17, live, block)])
        after = driver.executor.pools[state].data[:, block]
        assert torch.equal(before, after) is not right
        if right:
            plain = exact(hybrid)
            other = plain.add([*PROMPT, *truth[:6]])
            plain.step({other: 17})
            expected = plain.executor.pools[state].data[:, plain.tables[other][state][0]]
            assert torch.allclose(after, expected, rtol=1e-9, atol=1e-9)


def test_snapshot_of_a_state_that_was_not_kept(hybrid: Path) -> None:
    driver = exact(hybrid)
    state = next(i for i, g in enumerate(driver.groups) if g.kind is GroupKind.STATE)
    slot = driver.add(PROMPT)
    live = driver.tables[slot][state][0]
    with pytest.raises(PluginFault, match="snapshot of slot .* at 8"):
        driver.step({slot: 11}, snapshots=[StateCopy(state, slot, 8, live, 40)])


def test_blocks_can_be_read_and_put_back(folder: Path) -> None:
    driver = exact(folder)
    slot = driver.add(PROMPT * 3)
    driver.step({slot: 33})
    used = driver.tables[slot][0]
    data = driver.executor.io.read(0, used[:4])
    assert data.nbytes == 4 * driver.groups[0].block_bytes
    other = [driver.free[0].pop() for _ in range(4)]
    driver.executor.io.write(0, other, data)
    twin = driver.add([*PROMPT * 3, 5], blocks={0: other})
    driver.computed[twin] = 32
    fresh = exact(folder)
    assert driver.generate(twin, 5) == fresh.generate(fresh.add([*PROMPT * 3, 5]), 5)
    with pytest.raises(ValueError, match="write of 3 blocks"):
        driver.executor.io.write(0, other[:3], data)


def test_more_memory_than_there_is(folder: Path) -> None:
    executor = Driver(folder).executor
    with pytest.raises(ResourceError, match=r"KV pools need .* bytes \(full: .* blocks .* available on cpu"):
        executor.allocate((10**12,), 4, 256)


def test_opaque_prompts_are_refused(folder: Path) -> None:
    driver = Driver(folder)
    new = NewSequence(0, BlockRuns.of([(5, 3)]), 3, SamplingParams(), 0)
    with pytest.raises(PluginFault, match="needs token ids"):
        driver.executor.forward(ExecutorPlan(0, i32([0]), i32([0]), i32([3]), i32([0]), i32([1]), new=[new]))


def test_a_text_longer_than_a_slot_is_refused(folder: Path) -> None:
    with pytest.raises(PluginFault, match="do not fit"):
        driver = Driver(folder, max_context=32)
        driver.step({driver.add(list(range(200))): 8})


@pytest.mark.parametrize("device", ["cuda:7", "quantum"])
def test_devices_that_are_not_there(device: str, folder: Path) -> None:
    architecture = read_architecture(folder, 16, "float32")
    parts = {"quantizer": NoQuantizer(), "parallel": Single()}
    with pytest.raises(UserError, match=f"device '{device}' cannot be used"):
        make_executor(Context(architecture=architecture, device=device, parts=parts))


def test_close_frees_the_pools(folder: Path) -> None:
    executor = Driver(folder).executor
    executor.close()
    assert executor.pools == ()


def test_result_is_ready(folder: Path) -> None:
    driver = Driver(folder)
    slot = driver.add(PROMPT)
    driver.step({slot: 11})
    plan = ExecutorPlan(1, i32([slot]), i32([11]), i32([1]), i32([0]), i32([1]))
    done = driver.executor.sample(driver.executor.forward(plan))
    assert done.done()
    result = done.result()
    assert result.step == 1 and result.seconds > 0 and result.proposed is None
    assert result.accepted.dtype == result.tokens.dtype == np.int32
