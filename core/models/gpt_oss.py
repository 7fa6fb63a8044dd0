"""`GptOss`: attention with sinks and mixtures of experts that a checkpoint keeps in one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from bien.core.architectures.base import Architecture
from bien.core.models.feed_forward import ClampedSwiGLU
from bien.core.models.llama import Llama
from bien.core.models.mixture import Mixture, SoftmaxRouter, load_experts

if TYPE_CHECKING:
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts


class GptOss(Llama):
    """See `CausalModel`."""

    def make_feed_forward(self, index: int, a: Architecture, source: Checkpoint, parts: ModelParts) -> Any:
        prefix, c = f"model.layers.{index}.mlp.", a.config
        router = SoftmaxRouter(
            source.take(f"{prefix}router.weight"),
            c["num_experts_per_tok"],
            renormalize=True,
            bias=source.take(f"{prefix}router.bias"),
        )
        activation = ClampedSwiGLU(c["swiglu_alpha"], c["swiglu_limit"])
        experts = f"{prefix}experts."
        single = cast("Checkpoint", SingleExperts(experts, source))
        loaded = load_experts(experts, c["num_local_experts"], single, parts, activation, bias=True)
        return Mixture(router, loaded, parts)


class SingleExperts:
    """Stacked experts under the names of single ones: "<prefix>3.up_proj.weight" and so on.

    "gate_up_proj" [experts, H, 2 I] has gate and up columns by turns, "down_proj" is [experts, I, H]; biases
    are [experts, 2 I] and [experts, H].
    """

    def __init__(self, prefix: str, source: Checkpoint) -> None:
        self._prefix, self._source = prefix, source

    def shape(self, name: str) -> tuple[int, ...]:
        stacked, _, half = self._find(name)
        inputs_first = self._source.shape(stacked)[1:]
        own = (*inputs_first[:-1], inputs_first[-1] // 2) if half is not None else inputs_first
        return own[::-1]

    def take(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        stacked, expert, half = self._find(name)
        cuts = [slice(*s.indices(n)) for s, n in zip(slices[::-1], self.shape(name)[::-1], strict=True)]
        if half is not None:
            cuts[-1] = slice(2 * cuts[-1].start, 2 * cuts[-1].stop)
        own = self._source.take(stacked, (slice(expert, expert + 1), *cuts))[0]
        if half is not None:
            own = own[..., half::2]
        return own.t().contiguous() if own.dim() == 2 else own.contiguous()

    def _find(self, name: str) -> tuple[str, int, int | None]:
        # (stacked tensor, expert, which of every two columns; None: all)
        number, projection, kind = name.removeprefix(self._prefix).split(".")
        half = {"gate_proj": 0, "up_proj": 1}.get(projection)
        stacked = "down_proj" if half is None else "gate_up_proj"
        return self._prefix + stacked + ("_bias" if kind == "bias" else ""), int(number), half
