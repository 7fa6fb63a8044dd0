"""`StepModel`: how long a step of an architecture takes on machines, from bytes, operations and messages.

A roofline per part of the model (Williams et al. 2009): the longer of computing and reading, each at a share
of the machine's peak, plus what no byte explains: messages, launches, the host. A calibration multiplies each
term by a factor that it has fitted; without one the factors are 1 and the shares are the machine's priors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bien.core.architectures.base import Architecture, AttentionCost
from bien.core.architectures.weights import Weight
from bien.core.costs.correction import Correction, octaves
from bien.core.costs.correction import factors as correction_factors
from bien.core.costs.formats import BYTES, Formats
from bien.core.costs.layout import Layout
from bien.core.costs.machine import Link, Machine
from bien.core.errors import ResourceError
from bien.core.kv.groups import GroupKind

Array = NDArray[Any]
ACTIVATION = 2.0  # bytes of an activation on the wire
DISPATCHED, COMBINED = 1.0, 2.0  # bytes per feature of a token sent to an expert, and back (DeepSeek-V3)
MEMORY = 4096  # costs kept for the next step of the same size
RESERVED = 0.08  # of the memory: activations, buffers, the runtime


@dataclass(slots=True)
class Terms:
    """Seconds of one step by cause. Their sum, but for the last four, is the step; a calibration gives each
    of them a factor. The last four say once more what the first say with the longer of two: engines do not
    overlap reading and computing as a roofline does, and a calibration may take of them what it finds."""

    products: float = 0.0  # weights of layers: read or multiplied, whichever is longer
    experts: float = 0.0  # routed ones
    head: float = 0.0
    attention: float = 0.0  # the cache read or operations, whichever is longer
    messages: float = 0.0
    launches: float = 0.0
    host: float = 0.0  # of a step
    rows: float = 0.0  # of the host, for its sequences
    weights_read: float = 0.0
    weights_computed: float = 0.0
    cache_read: float = 0.0
    cache_computed: float = 0.0

    def vector(self) -> Array:
        return np.array([getattr(self, f.name) for f in fields(self)])


TERMS = tuple(f.name for f in fields(Terms))
ROOFLINE = np.array([float(i < 8) for i in range(len(TERMS))])
"""Factors of the terms without a calibration."""
_ATTENTION, _READ, _COMPUTED = (TERMS.index(t) for t in ("attention", "cache_read", "cache_computed"))
_HEAD = TERMS.index("head")


class StepModel:
    def __init__(
        self,
        a: Architecture,
        machine: Machine,
        layout: Layout | None = None,
        formats: Formats | None = None,
        factors: Mapping[str, float] | None = None,
        correction: Correction | None = None,
    ) -> None:
        """`factors`: by the names of `Terms`, from a calibration; others are a roofline's. `correction`: what
        the same calibration found beyond them."""
        self.a, self.machine = a, machine
        self.layout, self.formats = layout or Layout(), formats or Formats()
        self.layout.check(a)
        self.formats.check()
        self._factors = np.array(
            [(factors or {}).get(n, plain) for n, plain in zip(TERMS, ROOFLINE, strict=True)]
        )
        e = machine.efficiency
        self._correction = correction
        self._corrected = correction.arrays() if correction else None
        self._bandwidth = machine.memory_gb_per_s * 1e9 * e.memory
        self._computing = e.compute
        self._same: dict[
            tuple[int, int, int, int], tuple[Terms, float]
        ] = {}  # what depends on counts alone, by these
        main = [w for w in a.weights if w.role != "mtp" and not w.spare]
        # Layers repeat: equal parts are looked at once, with how many there are.
        self._layers = Counter(_Part.of(w, self.formats) for w in main if w.role not in _APART)
        self._head = Counter(_Part.of(w, self.formats) for w in main if w.role == "head")
        self._routed = Counter(_Part.of(w, self.formats) for w in main if w.role == "routed")
        self._rates = {
            p.kind: machine.compute(p.kind) * e.compute for p in (*self._layers, *self._routed, *self._head)
        }
        self._mixtures = len({w.name.split("experts")[0] for w in main if w.role == "routed"})
        alike: Counter[AttentionCost] = Counter()
        for cost in a.attention:
            alike[msgspec.structs.replace(cost, layers=0)] += cost.layers
        self._attentions = list(alike.items())
        topk = max((c.cap for c in a.attention), default=0)
        chosen = topk if any(g.kind is GroupKind.INDEXER for g in a.groups) else 0
        self._groups = [
            _Held.of(g, self.layout.kv_share(a, g.kind), chosen, self._kv_scale(g)) for g in a.groups
        ]

    def seconds(self, starts: Array, counts: Array, samples: int) -> float:
        """A step that computes counts[i] tokens of sequences from position starts[i] on, `samples` of which
        yield a token."""
        seconds = float(self.terms(starts, counts, samples).vector() @ self._factors)
        if self._corrected is not None and len(counts):
            tokens = float(counts.sum())
            seen = float((counts * (starts + (counts + 1) / 2)).sum()) / tokens
            seconds *= float(self._left(len(counts), tokens, np.array([seen]))[0])
        return seconds

    def part(self, starts: Array, counts: Array, samples: int, layers: float) -> float:
        """The same step of `layers` layers only, with the head: a drafter's pass."""
        each = self.terms(starts, counts, samples).vector() * self._factors
        head = float(each[_HEAD])
        return head + (float(each.sum()) - head) * layers / self.a.layers

    def _left(self, rows: int, tokens: float, positions: Array) -> Array:
        assert self._corrected is not None and self._correction is not None
        at = octaves(rows, tokens, positions) / np.array(self._correction.lengths)
        return correction_factors(*self._corrected, at)

    def terms(self, starts: Array, counts: Array, samples: int) -> Terms:
        """What the step is made of, before any factor."""
        same, share = self._by_counts(int(counts.sum()), len(counts), samples, self._largest(counts))
        computed, read = self._attention(starts, counts) / self.layout.data
        if self.layout.data > 1 and len(counts):  # no sequence is spread over attention ranks
            ends = starts + counts
            most = int(np.argmax(counts * (ends + 1.0)))
            computed, read = np.maximum(
                (computed, read), self._attention(starts[most : most + 1], counts[most : most + 1])
            )
        return replace(
            same,
            attention=share * float(max(computed, read)),
            cache_read=share * float(read),
            cache_computed=share * float(computed),
        )

    def growing(self, starts: Array, samples: int, steps: int) -> Array:
        """`seconds` of `steps` steps that follow each other, in each of which every sequence computes one
        token: the first from `starts`, the next one position further, and so on."""
        rows = len(starts)
        terms, share = self._by_counts(rows, rows, samples, 1)
        same = float(terms.vector() @ self._factors)
        both = self._growing(starts + 1, steps) / self.layout.data
        if self.layout.data > 1 and rows:
            longest = int(np.argmax(starts))
            both = np.maximum(both, self._growing(starts[longest : longest + 1] + 1, steps))
        f, (computed, read) = self._factors, both
        varying = f[_ATTENTION] * np.maximum(computed, read)
        if f[_READ] or f[_COMPUTED]:
            varying = varying + f[_READ] * read + f[_COMPUTED] * computed
        out: Array = same + share * varying
        if self._corrected is not None and rows:
            seen = (float(starts.sum()) + rows) / rows + np.arange(steps)
            out *= self._left(rows, float(rows), seen)
        return out

    def _growing(self, ends: Array, steps: int) -> Array:
        """[2, steps]: seconds to compute, to read."""
        operations = sum(
            layers * (c.constant * len(ends) + c.per_position * _grown(ends, c.cap, steps))
            for c, layers in self._attentions
        )
        reading = sum(h.per_token * _grown(ends, h.cap, steps) + h.constant * len(ends) for h in self._groups)
        rate = self.machine.compute("bf16") * self._computing * self.layout.tensor * self.layout.pipeline
        return np.stack([operations / rate, reading / self._bandwidth])

    def _largest(self, counts: Array) -> int:
        apart = self.layout.data > 1 or self.layout.pipeline > 1
        return int(counts.max()) if apart and len(counts) else 1

    def _by_counts(self, tokens: int, rows: int, samples: int, largest: int) -> tuple[Terms, float]:
        """All but attention, and how much of the whole attention's time a step takes. `largest`: tokens of
        the largest row. A pipeline takes the step whole, or in as many micro-batches as it has stages where
        rows allow, whichever ends first: each of them reads the weights again."""
        found = self._same.get((tokens, rows, samples, largest))
        if found is None:
            stages = self.layout.pipeline
            splits = {1, max(1, min(stages, rows))}
            tried = [
                (self._split(tokens, rows, samples, largest, m), (m + stages - 1) / (m * stages))
                for m in splits
            ]
            found = min(tried, key=lambda t: float(t[0].vector() @ self._factors))
            if len(self._same) >= MEMORY:
                self._same.clear()
            self._same[tokens, rows, samples, largest] = found
        return found

    def _split(self, tokens: int, rows: int, samples: int, largest: int, parts: int) -> Terms:
        layout, machine = self.layout, self.machine
        tokens = max(largest, math.ceil(tokens / parts))
        own = max(largest, math.ceil(tokens / layout.data))  # of the slowest attention rank
        sampled = math.ceil(samples / layout.data)
        per_stage = (parts + layout.pipeline - 1) / layout.pipeline
        launched = self.a.layers * machine.kernels_per_layer
        dense = [(p, n, own) for p, n in self._layers.items()]
        dense += [(p, n, sampled) for p, n in self._head.items() if sampled]
        read = sum(n * p.bytes for p, n, _ in dense) / self._bandwidth / layout.tensor
        computed = sum(n * 2 * p.size * t / self._rates[p.kind] for p, n, t in dense) / layout.tensor
        apart = self._routing(tokens)
        return Terms(
            products=per_stage * sum(n * self._time(p, own, layout.tensor) for p, n in self._layers.items()),
            experts=per_stage * sum(max(r, c) for r, c in apart),
            head=sum(n * self._time(p, sampled, layout.tensor) for p, n in self._head.items()),
            messages=per_stage * self._messages(own) + self._hops(own),
            launches=per_stage * launched * machine.kernel_us * 1e-6,
            host=machine.host_us * 1e-6,
            rows=machine.host_us_per_row * rows * 1e-6,
            weights_read=per_stage * (read + sum(r for r, _ in apart)),
            weights_computed=per_stage * (computed + sum(c for _, c in apart)),
        )

    def weight_bytes(self) -> float:
        """Of the accelerator that holds most."""
        layout = self.layout
        table = [w for w in self.a.weights if w.role == "embedding"]
        dense = sum(n * p.bytes for p, n in (self._layers + self._head).items()) / layout.tensor
        dense += sum(w.size for w in table) * BYTES[self.formats.head] / layout.tensor
        routed = sum(n * p.bytes * p.copies for p, n in self._routed.items()) / (layout.expert * layout.cut)
        return (dense + routed) / layout.pipeline

    def kv_tokens(self) -> int:
        """Tokens of cache that fit beside the weights, over all attention ranks; states are not counted.
        ResourceError, with the numbers, when the weights alone do not fit."""
        room = self.machine.memory_gb * 1e9 * (1 - RESERVED) - self.weight_bytes()
        each = sum(h.per_token for h in self._groups if h.grows)
        if room <= 0:
            raise ResourceError(
                f"{self.a.model!r} takes {self.weight_bytes() / 1e9:,.1f} GB of weights per accelerator on "
                f"{self.layout.devices} x {self.machine.name}, which has {self.machine.memory_gb:,.0f} GB "
                f"({RESERVED:.0%} kept free); take more accelerators or a narrower format"
            )
        return int(room / each) * self.layout.data if each else self.a.max_context

    def _time(self, p: _Part, tokens: int, ways: int) -> float:
        if not tokens:
            return 0.0
        computing = 2 * p.size * tokens / self._rates[p.kind]
        return max(computing, p.bytes / self._bandwidth) / ways

    def _routing(self, tokens: int) -> list[tuple[float, float]]:
        """Of each kind of routed weights: seconds to read, to compute."""
        out, layout = [], self.layout
        for p, n in self._routed.items():
            # Chance that some token wants an expert, and how far the fullest device is above the mean.
            share = p.used / p.copies
            touched = 1 - (1 - share) ** tokens
            pairs = tokens * p.used / layout.expert
            excess = (
                1 + math.sqrt(2 * math.log(layout.expert) / pairs) if layout.expert > 1 and pairs else 1.0
            )
            ways = layout.expert * layout.cut
            reading = p.bytes * p.copies * touched / ways / self._bandwidth
            out.append((n * reading, n * 2 * p.size * pairs * excess / layout.cut / self._rates[p.kind]))
        return out

    def _attention(self, starts: Array, counts: Array) -> Array:
        """Seconds to compute, to read."""
        # Positions that a row's tokens look at, in the middle of the row.
        ends = starts + counts
        middle = starts + (counts + 1) / 2
        operations = sum(
            layers
            * float((counts * (c.constant + c.per_position * np.minimum(middle, c.cap or np.inf))).sum())
            for c, layers in self._attentions
        )
        rate = self.machine.compute("bf16") * self._computing
        computing = operations / (self.layout.tensor * self.layout.pipeline) / rate
        reading = sum(h.bytes_read(ends) for h in self._groups) / self._bandwidth
        return np.array([computing, reading])

    def _messages(self, tokens: int) -> float:
        layout, a = self.layout, self.a
        seconds = 0.0
        if layout.tensor > 1:
            link, n = self._link(layout.tensor), layout.tensor
            size = tokens * a.hidden_size * ACTIVATION
            seconds += 2 * a.layers * _all_reduce(link, n, size, self.machine.efficiency.link)
        if layout.expert > 1:
            link, used = self._link(layout.stage), max(p.used for p in self._routed)
            size = tokens / layout.tensor * used * a.hidden_size * (DISPATCHED + COMBINED)
            far = size * (layout.expert - 1) / layout.expert
            rate = link.gb_per_s * 1e9 * self.machine.efficiency.link
            seconds += self._mixtures * (2 * link.latency_us * 1e-6 + far / rate)
        return seconds

    def _hops(self, tokens: int) -> float:
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        link = self._link(layout.devices)
        size = tokens * self.a.hidden_size * ACTIVATION
        each = link.latency_us * 1e-6 + size / (link.gb_per_s * 1e9 * self.machine.efficiency.link)
        return (layout.pipeline - 1) * each

    def _link(self, devices: int) -> Link:
        up = self.machine.scale_up
        return up if devices <= up.world else self.machine.scale_out

    def _kv_scale(self, group: Any) -> float:
        # The architecture declares bytes in the dtype that it was read with.
        return BYTES[self.formats.kv] / {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}[group.dtype]


_APART = ("embedding", "head", "routed")


@dataclass(frozen=True, slots=True)
class _Part:
    """One weight of the model as it costs: `bytes` and `size` of one copy."""

    size: int
    bytes: float
    kind: str
    copies: int
    used: int

    @classmethod
    def of(cls, w: Weight, formats: Formats) -> _Part:
        kind = formats.of(w.role)
        return cls(w.size if w.product else 0, w.size * BYTES[kind], kind, w.copies, w.used)


@dataclass(frozen=True, slots=True)
class _Held:
    """What one accelerator holds of a KV group, and reads of it per row."""

    per_token: float
    constant: float  # of a state: read and written
    cap: int  # positions that are read at most; 0: all
    grows: bool  # whether every position is held

    @classmethod
    def of(cls, group: Any, share: float, chosen: int, scale: float) -> _Held:
        if group.kind is GroupKind.STATE:
            return cls(0.0, 2 * group.constant_bytes * share, 0, False)
        cap = chosen if group.kind is GroupKind.LATENT else group.window
        return cls(group.bytes_per_token / group.stride * share * scale, 0.0, cap, not group.window)

    def bytes_read(self, ends: Array) -> float:
        seen = np.minimum(ends, self.cap) if self.cap else ends
        return float(seen.sum()) * self.per_token + len(ends) * self.constant


def _grown(ends: Array, cap: int, steps: int) -> Array:
    """Sums of min(ends + k, cap) for k = 0 .. steps - 1; cap 0: no cap."""
    if not cap:
        return float(ends.sum()) + len(ends) * np.arange(steps, dtype=float)
    # From k - 1 to k, those grow that were below the cap.
    growing = np.searchsorted(np.sort(ends), cap + 1 - np.arange(1, steps), side="left")
    out = np.empty(steps)
    out[0] = float(np.minimum(ends, cap).sum())
    out[1:] = out[0] + np.cumsum(growing)
    return out


def _all_reduce(link: Link, n: int, size: float, share: float) -> float:
    """The faster of one shot and a ring: latency against bytes."""
    rate = link.gb_per_s * 1e9 * share
    latency = link.latency_us * 1e-6
    return min(latency + (n - 1) * size / rate, 2 * math.log2(n) * latency + 2 * (n - 1) / n * size / rate)
