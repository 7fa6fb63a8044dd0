"""Reading tables of published points: layouts, what is dropped, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bien.core.architectures.registry import read_architecture
from bien.core.costs.layout import Layout
from bien.core.errors import UserError
from bien.replay.validate.names import formats, machine_name, model_name
from bien.replay.validate.points import read_points
from bien.replay.validate.roofline import Roofline, Unpredictable, fitting
from tests.replay.validate.tables import ROW, ladder, write

FULL = {**ROW, "id": "a", "isl": "1024", "osl": "128", "concurrency": "4"}


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("tp4pp1dp1etp4ep1", Layout(tensor=4, expert_tensor=4)),
        ("tp2pp2dp4etp1ep8", Layout(tensor=2, pipeline=2, data=4, expert=8, expert_tensor=1)),
        ("tp8", Layout(tensor=8)),
        ("tep8", Layout(tensor=8, expert=8)),
        # one dump multiplied tensor by expert ways; another has the same measurements as tp4 ep4, dp4 ep4
        ("tp16pp1dp1etp4ep4", Layout(tensor=4, expert=4)),
        ("tp64pp1dp1etp8ep8", Layout(tensor=8, expert=8)),
        ("tp1pp1dp16etp4ep4", Layout(data=4, expert=4)),
        ("tp4pp1dp4etp1ep16", Layout(data=4, expert=4)),
    ],
)
def test_layouts(tmp_path: Path, text: str, layout: Layout) -> None:
    [point] = read_points(write(tmp_path / "p.csv", [{**FULL, "parallelism": text}])).points
    assert point.decode.layout == layout and point.decode.count == 1 and point.prefill is None
    assert (point.ttft, point.tpot) == (0.1, 0.01)


def test_workers_apart(tmp_path: Path) -> None:
    text = "P3x(tp1pp1dp8etp1ep8)+D9x(tp8pp1dp1etp1ep8)"
    path = write(tmp_path / "p.csv.xz", [{**FULL, "parallelism": text, "disagg": "1"}])
    [point] = read_points(path).points
    assert point.prefill is not None and point.group[-1] == "disagg"
    assert (point.prefill.count, point.prefill.devices, point.decode.count, point.decode.devices) == (
        3,
        24,
        9,
        72,
    )


def test_rows_that_say_too_little_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [FULL, {**FULL, "isl": ""}, {**FULL, "tpot_ms": "nan"}, {**FULL, "ttft_ms": "-1"}]
    rows += [{**FULL, "concurrency": "0"}, {**FULL, "osl": "many"}, {**FULL, "parallelism": "all of them"}]
    rows += [{**FULL, "parallelism": "tp0pp1dp1etp1ep1"}, {**FULL, "disagg": "1"}, {**FULL, "isl": "inf"}]
    rows += [{**FULL, "concurrency": "1e8"}, {**FULL, "parallelism": "tp99999pp1dp99999etp1ep1"}]
    table = read_points(write(tmp_path / "p.csv", rows))
    assert table.rows == 12 and [p.id for p in table.points] == ["a"]
    assert sum(table.dropped.values()) == 11 and table.dropped["no isl"] == 2


@pytest.mark.parametrize("text", ["1", "true", "TRUE", " True ", "yes"])
def test_whatever_says_disaggregated_is_read_as_such(tmp_path: Path, text: str) -> None:
    row = {**FULL, "parallelism": "P1x(tp8pp1dp1etp1ep1)+D2x(tp8pp1dp1etp1ep1)", "disagg": text}
    [point] = read_points(write(tmp_path / "p.csv", [row])).points
    assert point.group[-1] == "disagg"


@pytest.mark.parametrize("text", ["", "maybe", "2"])
def test_what_says_neither_is_no_point(tmp_path: Path, text: str) -> None:
    table = read_points(write(tmp_path / "p.csv", [{**FULL, "disagg": text}]))
    assert not table.points and table.dropped == {f"disagg is {text!r}, not true or false": 1}


def test_a_short_row_does_not_stop_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", [FULL])
    path.write_text(path.read_text() + "\nb,meta\n")
    table = read_points(path)
    assert len(table.points) == 1 and sum(table.dropped.values()) == 1


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("none.csv", None, "none.csv"),
        ("p.csv.xz", b"not xz", r"p\.csv\.xz"),
        ("p.csv", b"\xff\xfe", r"p\.csv"),
        ("p.csv", b"model,gpu\n", "column 'precision' is missing"),
        ("p.csv", b"", "column 'model' is missing"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path: Path, name: str, data: bytes | None, match: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=match):
        read_points(tmp_path / name)


def test_names_of_models_and_accelerators() -> None:
    known = {
        "deepseek-ai/DeepSeek-R1-0528": "deepseek-v3",
        "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek-v3.2",
        "nvidia/Kimi-K2.5-NVFP4": "kimi-k2",
        "zai-org/GLM-5-FP8": "glm-5.1",
        "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
        "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b",
        "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
        "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": None,
        "zai-org/GLM-4.7-Flash": None,
        "someone/else": None,
    }
    assert {name: model_name(name) for name in known} == known
    assert machine_name("gb200") == "gb200-nvl72" and machine_name("b200_sxm") == "b200"
    assert machine_name("unstated (8-GPU node)") is None


def test_formats_of_a_precision_depend_on_the_model() -> None:
    assert formats("deepseek-v3", "fp4").routed == "fp4" and formats("deepseek-v3", "fp4").weights == "fp8"
    assert formats("llama-3.1-70b", "nvfp4").weights == "fp4"
    assert formats("kimi-k2", "int4").weights == "bf16" and formats("kimi-k2", "int4").routed == "int4"
    assert formats("gpt-oss-120b", "fp8").routed == "fp4"
    assert formats("llama-3.1-8b", "").weights == "bf16"
    assert formats("llama-3.1-8b", "anything").weights == "bf16"


def test_layouts_that_a_model_cannot_have() -> None:
    v3, llama = (read_architecture(name, 64, "bfloat16") for name in ("deepseek-v3", "llama-3.1-8b"))
    layout, note = fitting(v3, Layout(tensor=72, expert_tensor=72))
    assert (layout.tensor, layout.data, layout.expert) == (1, 64, 64) and "72" in note
    with pytest.raises(Unpredictable, match="etp"):
        fitting(v3, Layout(tensor=4, expert=2, expert_tensor=1))
    assert fitting(llama, Layout(tensor=4, expert=2, expert_tensor=1)) == (Layout(tensor=4), "")


def test_what_does_not_fit_is_told_with_the_numbers(tmp_path: Path) -> None:
    row = {**FULL, "model": "deepseek-ai/DeepSeek-R1", "parallelism": "tp1pp1dp1etp1ep1"}
    [point] = read_points(write(tmp_path / "p.csv", [row])).points
    with pytest.raises(Unpredictable, match=r"\d+.* GB of weights per accelerator on 1 x H200"):
        Roofline().predict(point)


def test_what_is_unknown_gets_stand_ins_that_are_named(tmp_path: Path) -> None:
    rows = [{**FULL, "model": "someone/else", "gpu": "tpu9"}, {**FULL, "gpu": "tpu9", "parallelism": "tp3"}]
    for point in read_points(write(tmp_path / "p.csv", rows)).points:
        assert any("'tpu9' is unknown" in note for note in Roofline().predict(point).assumed)


def test_predictions_do_not_look_at_answers(tmp_path: Path) -> None:
    rows = ladder()
    plain = read_points(write(tmp_path / "a.csv", rows)).points
    other = read_points(
        write(tmp_path / "b.csv", [{**r, "ttft_ms": "7", "tpot_ms": "9"} for r in rows])
    ).points
    roofline = Roofline()
    assert [roofline.predict(p) for p in plain] == [Roofline().predict(p) for p in other]
