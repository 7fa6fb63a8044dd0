"""`Roofline`: what the cost model says of a point before anything was measured."""

from __future__ import annotations

import math

import msgspec

from bien.core.architectures.base import Architecture
from bien.core.costs.layout import Layout
from bien.core.costs.serving import Estimate, Load, Workers, apart, together
from bien.core.costs.step import StepModel
from bien.core.errors import BienError
from bien.replay.validate import names
from bien.replay.validate.points import Point

# A usual value and a step that matters, per feature: logarithms of the concurrency, of ISL and OSL, of the
# decode worker's accelerators, of its expert and its data-parallel ways, of all accelerators; how many
# requests find no place in the cache, per one that does.
MIDDLE = (3.0, 7.5, 7.0, 1.5, 0.0, 0.0, 2.0, 0.0)
STEP = (1.5, 1.2, 1.5, 1.0, 1.2, 1.2, 1.0, 0.7)
MANY = 2.0


class Unpredictable(Exception):
    """Why there is no prediction."""


class Prediction(msgspec.Struct, frozen=True):
    tpot: float  # seconds
    ttft: float
    features: tuple[float, ...]  # scaled, for a calibration
    assumed: tuple[str, ...] = ()  # what was not as the row says


class Roofline:
    """Keeps what it has computed: tables repeat themselves."""

    def __init__(self) -> None:
        self._models: dict[tuple[object, ...], StepModel] = {}
        self._known: dict[tuple[object, ...], Estimate] = {}

    def predict(self, point: Point) -> Prediction:
        """Raises Unpredictable."""
        model, gpu, _, precision, _ = point.group
        assumed = []
        m, g = names.model_name(model), names.machine_name(gpu)
        if m is None:
            m = names.STAND_IN_MODEL
            assumed.append(f"model {model!r} is unknown: costs of {m}")
        if g is None:
            g = names.STAND_IN_MACHINE
            assumed.append(f"gpu {gpu!r} is unknown: costs of {g}")
        try:
            decode, note = self._workers(m, point.decode, lenient=bool(assumed))
            prefill, other = (
                (None, "")
                if point.prefill is None
                else self._workers(m, point.prefill, lenient=bool(assumed))
            )
            estimate = self._estimate(m, g, precision, prefill, decode, point.load)
        except BienError as error:
            raise Unpredictable(_short(str(error))) from None
        assumed += [n for n in dict.fromkeys((note, other)) if n]
        devices = decode.devices + (prefill.devices if prefill else 0)
        layout, load = decode.layout, point.load
        raw = (
            *map(math.log, (load.concurrency, load.isl, load.osl)),
            *map(math.log, (layout.devices, layout.expert, layout.data, devices)),
            min(MANY, math.log1p(estimate.queued)),
        )
        features = tuple((x - m) / s for x, m, s in zip(raw, MIDDLE, STEP, strict=True))
        return Prediction(estimate.tpot, estimate.ttft(load.osl), features, tuple(assumed))

    def _workers(self, model: str, workers: Workers, *, lenient: bool) -> tuple[Workers, str]:
        layout, note = fitting(names.architecture(model), workers.layout, lenient=lenient)
        return Workers(layout, workers.count), note

    def _estimate(
        self, model: str, gpu: str, precision: str, prefill: Workers | None, decode: Workers, load: Load
    ) -> Estimate:
        key = (model, gpu, precision, prefill, decode, load)
        if key not in self._known:
            decoding = self._step(model, gpu, precision, decode.layout)
            if prefill is None:
                self._known[key] = together(decoding, load)
            else:
                prefilling = self._step(model, gpu, precision, prefill.layout)
                self._known[key] = apart(prefilling, prefill.count, decoding, decode.count, load)
        return self._known[key]

    def _step(self, model: str, gpu: str, precision: str, layout: Layout) -> StepModel:
        formats = names.formats(model, precision)
        key = (model, gpu, formats, layout)
        if key not in self._models:
            self._models[key] = StepModel(names.architecture(model), names.machine(gpu), layout, formats)
        return self._models[key]


def fitting(a: Architecture, layout: Layout, *, lenient: bool = False) -> tuple[Layout, str]:
    """The layout, or the next one that the model can have, and what was changed. Unpredictable: experts'
    and attention's accelerators contradict each other, unless `lenient`."""
    routed = max((w.copies for w in a.weights if w.role == "routed"), default=0)
    if not routed:
        layout = Layout(tensor=layout.tensor, data=layout.data, pipeline=layout.pipeline)
    elif layout.expert_tensor and layout.expert * layout.expert_tensor != layout.stage and not lenient:
        raise Unpredictable("tp * dp is not etp * ep")
    try:
        layout.check(a)
        return layout, ""
    except BienError:
        pass
    # Whole racks are listed as one tensor; no head can be cut so, so attention must be data parallel.
    ways = 1 << (layout.stage.bit_length() - 1)
    tensor = 1 if routed else math.gcd(ways, a.heads)
    expert = math.gcd(ways, routed) if routed else 1
    taken = Layout(tensor=tensor, data=ways // tensor, expert=expert)
    return taken, f"tensor = {layout.tensor} is impossible: attention taken as data parallel"


def _short(text: str) -> str:
    return text if len(text) < 200 else f"{text[:197]}..."
