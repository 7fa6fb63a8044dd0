"""`Decoder`: embedding, layers of a mixer and a feed-forward part, norm and output head."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from bien.core.architectures.base import Architecture

if TYPE_CHECKING:
    from bien.core.executors.rows import Rows
    from bien.core.models.loading import Checkpoint
    from bien.core.models.registry import ModelParts, Tap


class DecoderLayer:
    """x + mixer(norm(x)), then + feed-forward(norm(.))."""

    def __init__(
        self,
        index: int,
        mixer: Any,
        feed_forward: Any,
        a: Architecture,
        source: Checkpoint,
        parts: ModelParts,
    ) -> None:
        """`mixer(normed [N, H], rows)` and `feed_forward(normed)` return [N, H]."""
        prefix = f"model.layers.{index}."
        self.index, self.eps = index, float(a.config["rms_norm_eps"])
        self.norm, self.add_norm = parts.kernels.rms_norm, parts.kernels.add_rms_norm
        self.input_norm = source.take(prefix + "input_layernorm.weight")
        self.post_norm = source.take(prefix + "post_attention_layernorm.weight")
        self.mixer, self.feed_forward = mixer, feed_forward

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        update = self.mixer(self.norm(hidden, self.input_norm, self.eps), rows)
        hidden, normed = self.add_norm(hidden, update, self.post_norm, self.eps)
        return hidden.add_(self.feed_forward(normed))

    def fill(self, hidden: Tensor, rows: Rows) -> None:
        """Write the keys and values of tokens that enter this layer as `hidden`."""
        self.mixer.fill(self.norm(hidden, self.input_norm, self.eps), rows)


class Decoder:
    """See `CausalModel`. A model says in `make_layer` what its layers are made of."""

    def __init__(self, a: Architecture, source: Checkpoint, parts: ModelParts) -> None:
        self.kernels, self.collect = parts.kernels, parts.strategy.collect
        self.eps = float(a.config["rms_norm_eps"])
        self.embedding = self._words("model.embed_tokens.weight", source, parts)
        self.whole = len(self.embedding) == a.vocab_size
        cut = parts.strategy.shard("model.embed_tokens.weight", (a.vocab_size, a.hidden_size))
        self.first = cut[0].start or 0  # of the words that this rank holds
        self.layers = [self.make_layer(i, a, source, parts) for i in range(a.layers)]
        self.norm = source.take("model.norm.weight")
        tied = a.config["tie_word_embeddings"]
        head = self.embedding if tied else self._words("lm_head.weight", source, parts)
        self.output = parts.quantizer.linear("lm_head", head, None)

    def make_layer(self, index: int, a: Architecture, source: Checkpoint, parts: ModelParts) -> Any:
        """Decoder layer `index`: called with (hidden [N, H], rows), returns the hidden states behind it."""
        raise NotImplementedError

    def embed(self, tokens: Tensor) -> Tensor:
        if self.whole:
            return self.collect(F.embedding(tokens, self.embedding), "embed")
        local = tokens - self.first
        foreign = (local < 0) | (local >= len(self.embedding))
        words = F.embedding(local.masked_fill_(foreign, 0), self.embedding)
        return self.collect(words.masked_fill_(foreign[:, None], 0), "embed")

    @staticmethod
    def _words(name: str, source: Checkpoint, parts: ModelParts) -> Tensor:
        return source.take(name, parts.strategy.shard(name, source.shape(name)))

    def forward(
        self, tokens: Tensor, rows: Rows, wanted: Collection[Tap] = ()
    ) -> tuple[Tensor, dict[Tap, Tensor]]:
        taps: dict[Tap, Tensor] = {}
        hidden = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if (i, "in") in wanted:
                taps[i, "in"] = hidden
            hidden = layer(hidden, rows)
            if (i, "out") in wanted:
                taps[i, "out"] = hidden
        return hidden, taps

    def normed(self, hidden: Tensor) -> Tensor:
        return self.kernels.rms_norm(hidden, self.norm, self.eps)

    def project(self, normed: Tensor) -> Tensor:
        return self.collect(self.output(normed), "logits")

    def head(self, hidden: Tensor) -> Tensor:
        return self.project(self.normed(hidden))
