"""The tiny hybrid against an oracle that knows nothing of batches, blocks or states kept: plain loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from bien.core.architectures.base import Architecture
from bien.core.architectures.registry import read_architecture
from bien.core.errors import ModelError
from bien.core.executors.pools import Pool
from bien.core.executors.rows import Rows
from bien.core.kernels.torch_kernels import TorchKernels
from bien.core.kv.groups import GroupKind
from bien.core.models.registry import ModelParts, load_model
from bien.core.plan import i32
from bien.core.speculation.draft import Draft
from bien.core.testing.torch_harness import TorchHarness
from bien.core.testing.toy_hybrid import hybrid_config, write_tiny_hybrid
from bien.plugins.parallel.single import Single
from bien.plugins.quantizers.none import NoQuantizer
from bien.plugins.schedulers.fcfs import Fcfs, FcfsConfig
from bien.plugins.speculators.prompt_lookup import PromptLookup, PromptLookupConfig

F64 = NDArray[np.float64]
BLOCK = 8


class Oracle:
    """Logits of every position of one text, recomputed from nothing in float64."""

    def __init__(self, folder: Path) -> None:
        self.w = {n: t.astype(np.float64) for n, t in load_file(folder / "model.safetensors").items()}
        self.c = msgspec.json.decode((folder / "config.json").read_bytes())

    def logits(self, tokens: list[int]) -> F64:
        x = self.w["model.embed_tokens.weight"][tokens]
        for i, kind in enumerate(self.c["layer_types"]):
            p = f"model.layers.{i}."
            normed = self.norm(x, p + "input_layernorm.weight")
            mixed = self.delta(normed, p) if kind == "linear_attention" else self.attention(normed, p, kind)
            x = x + mixed
            y = self.norm(x, p + "post_attention_layernorm.weight")
            gate, up = (y @ self.w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (gate * sigmoid(gate) * up) @ self.w[p + "mlp.down_proj.weight"].T
        head = "model.embed_tokens.weight" if self.c["tie_word_embeddings"] else "lm_head.weight"
        out: F64 = self.norm(x, "model.norm.weight") @ self.w[head].T
        return out

    def norm(self, x: F64, name: str) -> F64:
        scaled: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * self.w[name]
        return scaled

    def attention(self, x: F64, p: str, kind: str) -> F64:
        heads, kv_heads, d = (self.c[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (
            (x @ self.w[f"{p}self_attn.{n}_proj.weight"].T).reshape(len(x), -1, d) for n in ("q", "k", "v")
        )
        q, k = self.rotated(q), self.rotated(k)
        out = np.zeros((len(x), heads, d))
        for t in range(len(x)):
            first = max(0, t - self.c["sliding_window"] + 1) if kind == "sliding_attention" else 0
            for h in range(heads):
                g = h * kv_heads // heads
                scores = np.array([q[t, h] @ k[s, g] / math.sqrt(d) for s in range(first, t + 1)])
                share = np.exp(scores - scores.max())
                out[t, h] = (share / share.sum()) @ v[first : t + 1, g]
        mixed: F64 = out.reshape(len(x), -1) @ self.w[p + "self_attn.o_proj.weight"].T
        return mixed

    def rotated(self, x: F64) -> F64:
        d = x.shape[-1]
        # Frequencies and angles in float32: what checkpoints are trained with.
        frequency = 1 / (np.float32(self.c["rope_theta"]) ** (np.arange(0, d, 2).astype(np.float32) / d))
        angle = (np.arange(len(x), dtype=np.float32)[:, None] * frequency).astype(np.float64)[:, None]
        a, b = x[..., : d // 2], x[..., d // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def delta(self, x: F64, p: str) -> F64:
        p += "linear_attn."
        heads, d = self.c["linear_num_heads"], self.c["linear_head_dim"]
        q, k, v, gate = (
            (x @ self.w[f"{p}{n}_proj.weight"].T).reshape(len(x), heads, d) for n in ("q", "k", "v", "gate")
        )
        decay, beta = (
            x @ self.w[f"{p}{n}_proj.weight"].T + self.w[f"{p}{n}_proj.bias"] for n in ("decay", "beta")
        )
        out = np.zeros((len(x), heads, d))
        for h in range(heads):
            state = np.zeros((d, d))
            for t in range(len(x)):
                key = k[t, h] / np.linalg.norm(k[t, h])
                query = q[t, h] / np.linalg.norm(q[t, h])
                state = state / (1 + math.exp(decay[t, h]))  # exp(-softplus(x)) = 1 / (1 + e^x)
                state = state + sigmoid(beta[t, h]) * np.outer(v[t, h] - state @ key, key)
                out[t, h] = state @ query
        normed = self.norm(out, p + "norm.weight") * gate * sigmoid(gate)
        mixed: F64 = normed.reshape(len(x), -1) @ self.w[p + "o_proj.weight"].T
        return mixed


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


class Bench:
    """A model over pools of its own: slot s owns blocks of every group, in an order without pattern."""

    def __init__(self, folder: Path, dtype: str, slots: int = 4, length: int = 96) -> None:
        self.a: Architecture = read_architecture(folder, BLOCK, dtype)
        parts = parts_of(dtype)
        self.kernels, self.device = parts.kernels, parts.device
        self.model = load_model(self.a, folder, parts)
        rng = np.random.default_rng(7)
        pools, tables = [], []
        for group in self.a.groups:
            each = -(-length // BLOCK) if group.paged else 1
            pools.append(Pool.allocate(group, slots * each, self.device))
            tables.append((rng.permutation(slots * each) + 1).astype(np.int32).reshape(slots, each))
        self.pools, self.tables = tuple(pools), tuple(tables)

    def step(self, work: list[tuple[int, int, list[int], int]]) -> tuple[list[F64], Rows]:
        """(slot, start, tokens, drafts) per row -> logits of every token, per row."""
        slots, starts, tokens, drafts = zip(*work, strict=True)
        counts = [len(t) for t in tokens]
        rows = Rows(
            self.pools,
            self.tables,
            i32(list(slots)),
            i32(list(starts)),
            i32(counts),
            i32(list(drafts)),
            self.kernels,
            self.device,
        )
        with torch.inference_mode():
            hidden, _ = self.model.forward(torch.tensor([t for row in tokens for t in row]), rows)
            logits = self.model.head(hidden).double().numpy()
        return np.split(logits, np.cumsum(counts)[:-1]), rows


def parts_of(dtype: str) -> ModelParts:
    return ModelParts(NoQuantizer(), Single(), TorchKernels(), getattr(torch, dtype), torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def text(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 97, length)]


def near(found: F64, exact: F64, dtype: str) -> None:
    bound = {"float32": 1e-4, "float64": 1e-6}[dtype]
    assert np.abs(found - exact).max() <= bound * np.abs(exact).max()
    if dtype == "float64":
        np.testing.assert_array_equal(found.argmax(-1), exact.argmax(-1))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("chunks", [[70], [33, 37], [1] * 12 + [24, 34], [8, 16, 1, 45]], ids=str)
def test_prefill_and_chunks(folder: Path, oracle: Oracle, dtype: str, chunks: list[int]) -> None:
    bench, tokens = Bench(folder, dtype), text(1, 70)
    exact, at = oracle.logits(tokens), 0
    for n in chunks:
        (found,), _ = bench.step([(2, at, tokens[at : at + n], 0)])
        near(found, exact[at : at + n], dtype)
        at += n


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ragged_batch(folder: Path, oracle: Oracle, dtype: str) -> None:
    """Chunks and single tokens of four sequences side by side, in changing company."""
    bench = Bench(folder, dtype)
    texts = [text(i, 60) for i in range(4)]
    exact = [oracle.logits(t) for t in texts]
    done = [0, 0, 0, 0]
    for step in (
        [(0, 40), (2, 7)],
        [(0, 1), (1, 31), (2, 1), (3, 9)],
        [(3, 1), (1, 1)],
        [(2, 45), (0, 2), (3, 1)],
    ):
        found, _ = bench.step([(s, done[s], texts[s][done[s] : done[s] + n], 0) for s, n in step])
        for (s, n), logits in zip(step, found, strict=True):
            near(logits, exact[s][done[s] : done[s] + n], dtype)
            done[s] += n


def test_states_after_every_draft(folder: Path, oracle: Oracle) -> None:
    """Rows with drafts leave the state after each verified position: going on from the state after a
    accepted drafts equals never having drafted."""
    tokens, other = text(5, 40), text(6, 40)
    exact = oracle.logits(tokens)
    for accepted in range(4):
        bench = Bench(folder, "float64")
        bench.step([(1, 0, tokens[:20], 0), (0, 0, other[:9], 0)])
        wrong = [(t + 1) % 97 for t in tokens[21 + accepted : 24]]
        row = tokens[20 : 21 + accepted] + wrong  # last known token, then three drafts
        _, rows = bench.step([(0, 9, other[9:10], 0), (1, 20, row, 3)])
        state = next(g for g, pool in enumerate(bench.pools) if pool.group.kind is GroupKind.STATE)
        kept = rows.kept[state]
        assert kept.shape[1] == 1 + 4
        bench.pools[state].data[:, bench.tables[state][1, 0]] = kept[:, 1 + accepted]
        at = 21 + accepted
        (mine, company), _ = bench.step([(1, at, tokens[at:], 0), (0, 10, other[10:12], 0)])
        near(mine, exact[at:], "float64")
        near(company, oracle.logits(other[:12])[10:], "float64")


def test_groups(folder: Path) -> None:
    a = read_architecture(folder, BLOCK, "float32")
    assert [(g.name, g.kind, g.layers) for g in a.groups] == [
        ("full", GroupKind.FULL, (3,)),
        ("window", GroupKind.WINDOW, (1,)),
        ("state", GroupKind.STATE, (0, 2)),
    ]
    assert a.groups[1].window == 24
    assert a.groups[2].constant_bytes == 2 * 2 * 8 * 8 * 4
    assert not a.groups[2].croppable
    weights = load_file(folder / "model.safetensors")
    assert a.parameters == sum(t.size for t in weights.values())
    # 16-bit models keep their states in float32.
    half = read_architecture(folder, BLOCK, "bfloat16")
    assert (half.groups[0].dtype, half.groups[2].dtype) == ("bfloat16", "float32")
    assert half.groups[2].constant_bytes == a.groups[2].constant_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_heads": None}, "lacks 'linear_num_heads'"),
        ({"sliding_window": None}, "lacks 'sliding_window'"),
        (
            {"layer_types": ["full_attention", "mamba"]},
            "layer_types = 'mamba' is not supported; valid: 'full",
        ),
        ({"num_hidden_layers": 3}, "layer_types names 4 layers, num_hidden_layers says 3"),
        ({"linear_head_dim": 0}, "linear_head_dim = 0; needs a positive number"),
    ],
)
def test_strict_reading(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(hybrid_config(**changes)))
    with pytest.raises(ModelError, match=message):
        read_architecture(tmp_path, BLOCK, "float32")


def test_a_model_in_bfloat16_runs(folder: Path, oracle: Oracle) -> None:
    bench, tokens = Bench(folder, "bfloat16"), text(3, 30)
    (found,), _ = bench.step([(0, 0, tokens, 0)])
    exact = oracle.logits(tokens)
    assert np.abs(found - exact).max() <= 0.1 * np.abs(exact).max()


# -- through engine and executor: greedy identity in float64


def engine(folder: Path, budget: int = 512, speculator: Any = None, **options: Any) -> TorchHarness:
    parts = {"quantizer": NoQuantizer(), "parallel": Single(), "speculator": speculator}
    return TorchHarness(folder, Fcfs(FcfsConfig(token_budget=budget)), parts, **options)


def greedy(oracle: Oracle, prompt: list[int], produced: list[int]) -> None:
    """Every token is the oracle's choice after the ones before it."""
    logits = oracle.logits(prompt + produced[:-1])[len(prompt) - 1 :]
    assert produced == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("budget", "depth"), [(512, 1), (20, 1), (20, 2)])
def test_engine_batches_and_chunks(folder: Path, oracle: Oracle, budget: int, depth: int) -> None:
    h = engine(folder, budget, depth=depth)
    prompts = {f"r{i}": text(20 + i, n) for i, n in enumerate((50, 7, 33, 16, 1, 24))}
    for id, prompt in prompts.items():
        h.submit(id, prompt, max_tokens=14)
    h.run()
    for id, prompt in prompts.items():
        assert len(h.tokens[id]) == 14
        greedy(oracle, prompt, h.tokens[id])


def test_engine_goes_on_from_a_snapshot(folder: Path, oracle: Oracle) -> None:
    """The second turn finds the end of the first, a sub-agent the end of the shared prompt."""
    h = engine(folder)
    first = text(30, 43)
    h.submit("one", first, max_tokens=12)
    h.run()
    second = first + h.tokens["one"] + text(31, 9)
    h.submit("two", second, max_tokens=12)
    branch = first[:40] + text(32, 11)
    h.submit("branch", branch, max_tokens=12)
    h.run()
    assert (h.cached["one"], h.cached["two"], h.cached["branch"]) == (0, 48, 40)
    for id, prompt in (("one", first), ("two", second), ("branch", branch)):
        greedy(oracle, prompt, h.tokens[id])


def test_engine_preempts(folder: Path, oracle: Oracle) -> None:
    h = engine(folder, blocks=14)
    prompts = {f"r{i}": text(40 + i, 30) for i in range(3)}
    for id, prompt in prompts.items():
        h.submit(id, prompt, max_tokens=24)
    h.run()
    assert h.engine.stats().preemptions > 0
    for id, prompt in prompts.items():
        greedy(oracle, prompt, h.tokens[id])


class Script(PromptLookup):
    """Knows the text; drafts it with a mistake at a place that moves from round to round."""

    def __init__(self, texts: dict[str, list[int]]) -> None:
        super().__init__(PromptLookupConfig(max_drafts=3))
        self.texts, self.round = texts, 0

    def propose(self, id: str, limit: int) -> Draft:
        at = len(self._texts[id].tokens)
        drafts = self.texts[id][at : at + limit]
        self.round += 1
        wrong = self.round % 4
        return Draft([(t + 1) % 97 if i == wrong else t for i, t in enumerate(drafts)])


def test_engine_verifies_drafts(folder: Path, oracle: Oracle) -> None:
    """Rejected at every place and accepted, in batches of unequal drafts, and snapshots that rejected
    drafts must not reach: a second turn continues from them."""
    prompts = {"a": text(50, 21), "b": text(51, 38), "c": text(52, 6)}
    plain = engine(folder)
    for id, prompt in prompts.items():
        plain.submit(id, prompt, max_tokens=40)
    plain.run()
    script = Script({id: p + plain.tokens[id] for id, p in prompts.items()})
    h = engine(folder, speculator=script)
    for id, prompt in prompts.items():
        h.submit(id, prompt, max_tokens=40)
    h.run()
    assert h.tokens == plain.tokens
    stats = h.engine.stats()
    assert 0 < stats.accepted < stats.drafted
    assert h.steps < plain.steps
    for id, prompt in prompts.items():
        greedy(oracle, prompt, h.tokens[id])
        again = prompt + h.tokens[id] + text(53, 3)
        h.submit(id + "2", again, max_tokens=8)
        script.texts[id + "2"] = again
        h.run()
        assert h.cached[id + "2"] >= (len(prompt) + 39) // BLOCK * BLOCK
        greedy(oracle, again, h.tokens[id + "2"])


def test_engine_with_prompt_lookup_under_preemption(folder: Path, oracle: Oracle) -> None:
    phrase = text(60, 9)
    prompts = {f"r{i}": (phrase * 4)[i : 30 + i] for i in range(3)}
    h = engine(folder, 24, PromptLookup(PromptLookupConfig(min_ngram=1)), blocks=14)
    for id, prompt in prompts.items():
        h.submit(id, prompt, max_tokens=24)
    h.run()
    stats = h.engine.stats()
    assert stats.preemptions > 0
    assert stats.drafted > stats.accepted
    for id, prompt in prompts.items():
        greedy(oracle, prompt, h.tokens[id])
