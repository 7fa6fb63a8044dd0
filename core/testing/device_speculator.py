"""Conformance of device speculators. Subclass `DeviceSpeculatorSuite` with `build()`.

The suite plays the executor: a toy model of the Llama shape (or the folder that `target` names), pools
whose unwritten entries hold garbage, ragged batches, chunks, rejected drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from bien.core.kv.groups import GroupKind
from bien.core.speculation.speculator import DeviceDraft, DeviceSpeculator
from bien.core.testing.device_bench import BLOCK, Bench
from bien.core.testing.speculator import check_caps
from bien.core.testing.toy import write_toy


class DeviceSpeculatorSuite:
    """Drafts are compared token for token, in float64. Sampled ones too: the core's `Drawer` gives the same
    numbers again."""

    layers = 4  # of the toy target
    temperature = 0.8  # at which drafts are drawn

    def build(self) -> DeviceSpeculator:
        """A fresh drafter, not loaded."""
        raise NotImplementedError

    def target(self, folder: Path) -> Path:
        """A model folder that the drafter can use, written into `folder`. Its attention is loud, so that
        drafts tell what was in the KV blocks."""
        write_toy(folder, num_hidden_layers=self.layers, tie_word_embeddings=False)
        tensors = load_file(folder / "model.safetensors")
        for name in tensors:
            if name.endswith("o_proj.weight"):
                tensors[name] *= 8
        save_file(tensors, folder / "model.safetensors")
        return folder

    def test_caps(self) -> None:
        caps = self.build().caps
        check_caps(caps, "device")
        for layer, side in caps.taps:
            assert 0 <= layer < self.layers, f"tap of layer {layer}; the target has {self.layers}"
            assert side in ("in", "out"), f"tap side {side!r}; valid: in, out"

    def test_groups_are_drafters_groups(self) -> None:
        with self._bench() as bench:
            own = bench.drafter.groups(bench.architecture, BLOCK)
            taken = {g.name for g in bench.architecture.groups}
            for group in own:
                assert group.kind is GroupKind.DRAFT, f"group {group.name!r} is {group.kind.value}, not draft"
                assert group.block_tokens == BLOCK, (
                    f"blocks of {group.block_tokens} tokens, {BLOCK} were asked for"
                )
                assert group.name not in taken, f"two groups are called {group.name!r}"
                assert group.bytes_per_token > 0 and group.layers, f"group {group.name!r} holds nothing"
                taken.add(group.name)
            assert own == self.build().groups(bench.architecture, BLOCK), "another instance has other groups"

    def test_shape_and_range(self) -> None:
        with self._bench() as bench:
            most = bench.drafter.caps.max_drafts
            for limit in range(1, most + 1):
                bench.clear()
                for slot in (2, 0):
                    bench.absorb([(slot, 0, _text(slot, 9))])
                draft = bench.propose([(2, 9, 5), (0, 9, 7)], limit)
                assert isinstance(draft, DeviceDraft), f"proposed a {type(draft).__name__}"
                drafts, shape = draft.tokens, tuple(draft.tokens.shape)
                valid = len(shape) == 2 and shape[0] == 2 and 1 <= shape[1] <= limit
                assert valid, f"limit {limit}: shape {shape}"
                assert not drafts.is_floating_point(), f"drafts are {drafts.dtype}"
                size = bench.architecture.vocab_size
                assert bool(((drafts >= 0) & (drafts < size)).all()), f"drafts outside 0..{size - 1}"
                self._check_confidence(bench, draft)
                self._check_tree(bench, draft)

    def _check_confidence(self, bench: Bench, draft: DeviceDraft) -> None:
        kind, found = bench.drafter.caps.confidence, draft.confidence
        assert (found is not None) is (kind != "none"), f"caps.confidence is {kind!r}, reported: {found}"
        if found is not None:
            assert found.shape == draft.tokens.shape, f"confidences have shape {tuple(found.shape)}"
            assert bool(((found >= 0) & (found <= 1)).all()), "confidences lie outside 0..1"

    def _check_tree(self, bench: Bench, draft: DeviceDraft) -> None:
        parents = draft.parents
        if parents is None:
            return
        assert bench.drafter.caps.topology == "tree", "parents, but caps.topology is 'chain'"
        assert parents.shape == draft.tokens.shape, f"parents have shape {tuple(parents.shape)}"
        order = torch.arange(parents.shape[1])
        assert bool(((parents >= -1) & (parents < order)).all()), "a node comes before its parent"
        for row, above in zip(draft.tokens.tolist(), parents.tolist(), strict=True):
            pairs = list(zip(above, row, strict=True))
            assert len(set(pairs)) == len(pairs), "siblings have the same token"

    def test_drafts_are_what_was_drawn(self) -> None:
        """The law of sampled drafts is known through the Drawer only."""
        with self._bench() as bench:
            if bench.drafter.caps.deterministic:
                return
            bench.absorb([(1, 0, _text(1, 20)), (3, 0, _text(2, 9))])
            draft = bench.propose([(1, 20, 3), (3, 9, 8)])
            drawn = [d.tokens for d in bench.drawer.draws]
            assert len(drawn) >= draft.tokens.shape[1], "drafts were made without `Drawer.draw`"
            for j in range(draft.tokens.shape[1]):
                assert torch.equal(draft.tokens[:, j], drawn[j]), f"draft {j} is not what was drawn"

    def test_prior_confidences_do_not_know_their_token(self) -> None:
        """That of a node may depend on the tokens before it; the node's own changes nothing."""
        if self.build().caps.confidence != "prior":
            return
        with self._bench() as bench:
            bench.absorb([(1, 0, _text(1, 20))])
            known = bench.propose([(1, 20, 3)]).confidence
            assert known is not None
            for j in range(known.shape[1]):
                found = bench.propose([(1, 20, 3)], wrong=j).confidence
                assert found is not None and torch.equal(found[:, : j + 1], known[:, : j + 1]), (
                    f"the confidence of draft {j} depends on what was drawn there"
                )

    def test_deterministic_as_declared(self) -> None:
        found = []
        for _ in range(2):
            with self._bench() as bench:
                bench.absorb([(1, 0, _text(1, 20))])
                found.append([bench.drafts(1, 20, 3) for _ in range(2)])
        assert found[0][0] == found[0][1], "proposing again gives other drafts"
        assert found[0] == found[1], "another instance gives other drafts"

    def test_chunks_do_not_matter(self) -> None:
        def chunked(bench: Bench, sizes: list[int]) -> list[int]:
            at, text = 0, _text(3, 23)
            for n in sizes:
                bench.absorb([(1, at, text[at : at + n])])
                at += n
            return bench.drafts(1, 23, 9)

        self._same([lambda b, s=s: chunked(b, s) for s in ([23], [7, 16], [1] * 23, [20, 2, 1])])

    def test_company_does_not_matter(self) -> None:
        texts = {0: _text(10, 17), 1: _text(11, 5), 3: _text(12, 30)}

        def alone(bench: Bench) -> list[list[int]]:
            for slot, text in texts.items():
                bench.absorb([(slot, 0, text)])
            return [bench.drafts(slot, len(text), slot + 4) for slot, text in texts.items()]

        def together(bench: Bench) -> list[list[int]]:
            bench.absorb([(3, 0, texts[3][:8]), (1, 0, texts[1])])
            bench.absorb([(0, 0, texts[0]), (3, 8, texts[3][8:])])
            out = bench.propose([(slot, len(text), slot + 4) for slot, text in reversed(texts.items())])
            return out.tokens.tolist()[::-1]

        self._same([alone, together])

    def test_rejected_drafts_leave_nothing(self) -> None:
        """A round proposes, its drafts are rejected: the row's later positions come again, with others."""
        text = _text(20, 30)

        def straight(bench: Bench) -> list[int]:
            bench.absorb([(2, 0, text)])
            return bench.drafts(2, 30, 8)

        def rejected(bench: Bench) -> list[int]:
            bench.absorb([(2, 0, text[:12])])
            at = 12
            while at < 30:
                bench.drafts(2, at, text[at])
                wrong = [(t + 1) % 288 for t in text[at + 1 : at + 4]]
                bench.absorb([(2, at, [text[at], *wrong])], confirmed=[1])
                at += 1
            return bench.drafts(2, 30, 8)

        def accepted(bench: Bench) -> list[int]:
            bench.absorb([(2, 0, text[:12])])
            for at in range(12, 30, 3):
                bench.drafts(2, at, text[at])
                bench.absorb([(2, at, text[at : at + 3])])
            return bench.drafts(2, 30, 8)

        self._same([straight, rejected, accepted])

    def test_a_prefix_in_the_blocks_is_enough(self) -> None:
        """A prefix hit: another slot, whose blocks hold the prefix, sees forwards of the tail only. Whatever
        the size of blocks, all that is full is used: an entry may depend on no later token."""
        text = _text(30, 38)

        def whole(bench: Bench) -> list[int]:
            bench.absorb([(0, 0, text)])
            return bench.drafts(0, 38, 6)

        def shared(bench: Bench) -> list[int]:
            # What follows the prefix differs, in chunks that end elsewhere, and among rejected drafts.
            bench.absorb([(3, 0, text[:19])])
            bench.drafts(3, 19, text[19])
            bench.absorb([(3, 19, text[19:32] + _text(31, 5))], confirmed=[14])
            bench.share(3, 0, 32)
            bench.absorb([(0, 32, text[32:])])
            return bench.drafts(0, 38, 6)

        for block in (1, BLOCK, 16):
            self._same([whole, shared], block=block)

    def test_a_slot_is_used_again(self) -> None:
        def fresh(bench: Bench) -> list[int]:
            bench.absorb([(1, 0, _text(41, 11))])
            return bench.drafts(1, 11, 2)

        def used(bench: Bench) -> list[int]:
            bench.absorb([(1, 0, _text(40, 40))])
            bench.drafts(1, 40, 2)
            return fresh(bench)

        self._same([fresh, used])

    def test_reads_no_position_that_was_not_written(self) -> None:
        """Entries that nobody wrote hold other garbage in each run."""

        def run(bench: Bench) -> list[int]:
            bench.absorb([(1, 0, _text(50, 13))])
            return bench.drafts(1, 13, 2)

        self._same([run, run], garbage=True)

    def test_leaves_the_target_alone(self) -> None:
        """The target's pools, and the states that were tapped, belong to the target."""
        with self._bench() as bench:
            rows, taps = bench.forward([(1, 0, _text(60, 18))])
            before = {tap: x.clone() for tap, x in taps.items()}
            pools = [p.data.clone() for p in bench.pools[: len(bench.architecture.groups)]]
            with torch.inference_mode():
                bench.drafter.absorb(rows, taps, torch.tensor([18]))
            bench.drafts(1, 18, 3)
            for tap, x in taps.items():
                assert torch.equal(x, before[tap]), f"absorb changed the hidden state at {tap}"
            for pool, data in zip(bench.pools, pools, strict=False):
                assert torch.equal(pool.data, data), f"the target's group {pool.group.name!r} was written"

    def _same(self, ways: list[Any], garbage: bool = False, block: int = BLOCK) -> None:
        found = []
        for i, way in enumerate(ways):
            with self._bench(garbage=i if garbage else 0, block=block) as bench:
                found.append(way(bench))
        for i, other in enumerate(found[1:], 1):
            assert other == found[0], f"blocks of {block}, way {i}: {other}, way 0: {found[0]}"

    def _bench(self, garbage: int = 0, block: int = BLOCK) -> Bench:
        return Bench(self, garbage, block)


def _text(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 259, length)]
