"""From observations to a calibration: what it quotes as its error was not fitted to, nor repeated."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from bien.core.architectures.registry import read_architecture
from bien.core.costs.factors import CalibrationFile
from bien.core.costs.fit import FEWEST
from bien.core.costs.machine import load_machine
from bien.core.costs.observed import Observed, Step, StepRecord, by_place
from bien.core.costs.step import StepModel
from bien.core.errors import UserError
from bien.replay.calibrate.display import limits, print_learnt
from bien.replay.calibrate.learn import FITTED, Subject, learn

PLAIN = StepModel(read_architecture("llama-3.1-8b", 64, "bfloat16"), load_machine("h100"))
TRUTH = StepModel(
    PLAIN.a, PLAIN.machine, factors={"products": 1.5, "attention": 3.0, "rows": 9.0, "host": 2.0}
)
WHO = Subject("an engine", "a model", "h100")


def observe(count: int, noise: float, seed: int = 0) -> list[Observed]:
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(count):
        rows = int(2 ** rng.integers(0, 6))
        at = int(2 ** rng.uniform(5, 13))
        counts = np.ones(rows, dtype=int)
        if rng.random() < 0.4:
            counts[0] = 2 ** int(rng.integers(3, 10))
        for k in range(3):
            starts = np.arange(rows) + at + k
            seconds = TRUTH.seconds(starts, counts, rows) * float(np.exp(noise * rng.standard_normal()))
            step = Step(tuple(starts.tolist()), tuple(counts.tolist()), rows)
            records.append(StepRecord(0.0, seconds, step))
    return by_place(records)


def test_errors_are_those_of_places_that_were_not_fitted_to() -> None:
    observed = observe(200, 0.04)
    learnt = learn(PLAIN, observed, WHO)
    fitted = {c.place for c in learnt.compared if c.fitted}
    others = {c.place for c in learnt.compared if not c.fitted}
    assert len(fitted) <= FITTED and not fitted & others
    found = learnt.calibration
    assert found.fitted and found.held_out
    assert (found.fitted.places, found.held_out.places) == (len(fitted), len(others))
    off = [abs(c.predicted / c.measured - 1) for c in learnt.compared if not c.fitted]
    assert found.held_out.median == pytest.approx(float(np.median(off)))
    assert found.held_out.median < 0.06 and abs(found.held_out.total) < 0.02
    assert 0.02 <= found.deviation < 0.05


def test_what_it_is_chosen_by_is_no_measurement() -> None:
    observed = observe(100, 0.04)
    other = [msgspec.structs.replace(o, seconds=o.seconds * (1 + i % 5)) for i, o in enumerate(observed)]
    first, second = (learn(PLAIN, some, WHO).compared for some in (observed, other))
    assert [c.fitted for c in first] == [c.fitted for c in second]


def test_it_says_what_it_is_of_and_where_it_ends() -> None:
    found = learn(PLAIN, observe(100, 0.02), WHO).calibration
    assert (found.engine, found.model, found.machine) == ("an engine", "a model", "h100")
    assert found.formats["weights"] == "bf16" and found.layout["tensor"] == 1
    assert found.ranges["sequences"].high == 32 and not found.ranges["tokens"].holds(5000)
    assert len(limits(found)) == 3
    assert msgspec.json.decode(msgspec.json.encode(found), type=CalibrationFile) == found


def test_a_machine_of_a_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = learn(PLAIN, observe(100, 0.02), Subject("an engine", "a model", "mine.toml")).calibration
    assert found.machine == str(tmp_path / "mine.toml")


def test_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_learnt(learn(PLAIN, observe(100, 0.02), WHO))
    out = capsys.readouterr().out
    assert "an engine, a model on h100" in out and "largest residuals" in out and "extrapolates" in out


def test_too_few_places_are_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=rf"steps at \d+ places were recorded; valid: {FEWEST + 4}"):
        learn(PLAIN, observe(100, 0.0)[:9], WHO)
