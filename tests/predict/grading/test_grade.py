from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ddlbench.errors import UserError
from ddlbench.oracle import bands
from ddlbench.oracle.memory.stages import Cut
from ddlbench.oracle.strategies import pipeline
from ddlbench.predict.__main__ import main
from ddlbench.predict.grading import grade, layouts
from ddlbench.predict.grading.grade import Grade, learned_rows, predicted_s
from ddlbench.predict.grading.points import Point, Words, points
from ddlbench.results.rows import Row
from tests.predict.grading.rows import BASE, POINT, rows

Capture = pytest.CaptureFixture[str]
LAYOUT = {
    "gpus": "4", "global_batch": "16", "micro_batch": "1", "hidden": "1024", "heads": "16", "layers": "4",
    "seq_len": "1024", "tp": "1", "dp": "4", "pp": "1", "iteration_ms": "100",
}  # fmt: skip


def graded(gpus: int, measured: float, predicted: float, strategy: str = "ddp") -> Row:
    words = Words(2, "source", "model", strategy, "gpu", "network")
    return words.graded(gpus, "base", measured, predicted, bands.band(predicted, "ddp", 1))


def written(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def test_the_summary_by_hand() -> None:
    """Errors of -20, -5, +5 and +9 % at 2, 4, 8 and 16 GPUs. Mean size 9.75 %, median 7 %, three of four within 10 %.
    The slope over log2 (1, 2, 3, 4): (-1.5 x -0.2 - 0.5 x -0.05 + 0.5 x 0.05 + 1.5 x 0.09) / 5 = 0.097."""
    rows = [graded(2, 1.0, 0.8), graded(4, 1.0, 0.95), graded(8, 1.0, 1.05, "fsdp"), graded(16, 2.0, 2.18, "fsdp")]
    summary = Grade(rows, [], [0.0, 0.1]).summary()
    assert summary["rows"] == 4
    assert summary["mean_error"] == pytest.approx(0.0975)
    assert summary["median_error"] == pytest.approx(0.07)
    assert summary["within_10"] == pytest.approx(0.75)
    assert summary["mean_signed_error"] == pytest.approx(-0.0275)
    assert summary["slope_per_doubling"] == pytest.approx(0.097)
    assert summary["regret"] == pytest.approx(0.05)
    assert summary["by"]["strategy"]["ddp"]["mean_error"] == pytest.approx(0.125)
    assert summary["by"]["gpus"]["16"] == pytest.approx(
        {"rows": 1, "mean_error": 0.09, "median_error": 0.09, "within_10": 1.0, "mean_signed_error": 0.09}
    )


def test_two_points_have_a_slope_without_an_interval(capsys: Capture) -> None:
    grade.show(Grade([graded(2, 1.0, 0.9), graded(4, 1.0, 1.0)], []), as_json=False)
    assert "error per doubling of the GPUs: +10.00%\n" in capsys.readouterr().out


def test_coverage_counts_measurements_between_the_ends_of_their_bands() -> None:
    low_80, high_80, low_95, high_95 = bands.band(1.0, "ddp", 1).values()
    assert low_95 < low_80 < high_80 < high_95
    inside, between, outside = (high_80 + low_80) / 2, (high_80 + high_95) / 2, high_95 * 1.01
    summary = Grade([graded(8, factor, 1.0) for factor in (inside, between, outside)], [], []).summary()
    assert summary["coverage_80"] == pytest.approx(1 / 3)
    assert summary["coverage_95"] == pytest.approx(2 / 3)


def test_a_prediction_from_a_base_on_several_gpus_returns_the_base() -> None:
    """The seconds of one device are solved so that the prediction for the base is its measured step."""
    (point,) = points(rows(BASE, POINT), [])
    again = predicted_s(replace(point, measured=point.base))
    more = predicted_s(point)
    assert again == pytest.approx(point.base.seconds)
    assert more > point.base.seconds * point.machine.slowest(32) / point.machine.slowest(8)


def test_a_network_that_cannot_have_carried_the_gradients_is_no_network_of_the_measurement() -> None:
    """25.6 million gradients in fp32, 2 x 3/4 of them between four nodes: 0.153 GB over 0.1125 GB/s take 1.36 s."""
    slow = {"network": "1Gb Ethernet"}
    (point,) = points(rows({**BASE, **slow}, {**POINT, **slow}), [])
    with pytest.raises(UserError, match=r"needs 1\.36 s for the gradients alone.*took 0\.137 s"):
        predicted_s(point)


def test_the_largest_count_of_a_series_is_predicted_from_all_smaller_ones() -> None:
    """The network carries a tenth of what it should, which 16 and 32 GPUs tell; 64 GPUs follow. A series of two GPU
    counts says nothing of a third."""
    (sample,) = points(rows(BASE, POINT), [])
    links = sample.machine.links
    slower = replace(sample.machine, links=(links[0], replace(links[1], bytes_per_s=links[1].bytes_per_s / 10)))
    series = list[Point]()
    for gpus in (16, 32, 64):
        at = replace(sample, measured=replace(sample.measured, gpus=gpus, samples=256 * gpus))
        series.append(replace(at, measured=replace(at.measured, seconds=predicted_s(at, slower))))
    (last,) = learned_rows([series[2], *series[:2]], [])
    assert (last["gpus"], last["base"]) == (64, "16, 32 GPUs")
    wrong, measured = predicted_s(series[2]), series[2].measured.seconds
    assert abs(last["predicted_s"] - measured) < 0.1 * abs(wrong - measured)
    assert list(learned_rows(series[2:], [])) == []


def test_a_series_that_teaches_nothing_does_not_end_the_grade(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> float:
        raise UserError("communication alone takes longer")

    monkeypatch.setattr(grade, "learn", refused)
    more = [{**POINT, "gpus": "64", "global_batch": "16384", "measured": "110000"}]
    assert main(["--grade", str(written(tmp_path / "points.csv", [BASE, POINT, *more])), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["learned_points"]) == (2, [])
    (reason,) = result["left_out"]
    assert reason == "a page, ResNet-50, not learned from smaller counts: communication alone takes longer"


def test_a_layout_takes_each_of_its_micro_batches_and_one_update() -> None:
    cells = [{**LAYOUT, "global_batch": str(4 * count)} for count in (2, 4, 8)]
    seconds = [layouts.predicted_s(one) for one in layouts.layouts(rows(*cells), [])]
    two, four, eight = seconds
    assert eight - four == pytest.approx(2 * (four - two))
    assert 2 * two > four


def test_a_layout_s_head_is_on_its_last_stage_and_small_kernels_do_not_become_faster() -> None:
    cells = [{**LAYOUT, "dp": "1", degree: "4"} for degree in ("dp", "tp", "pp")]
    data, tensor, pipeline = (layouts.predicted_s(one) for one in layouts.layouts(rows(*cells), []))
    assert tensor > 3 * data  # four times the micro batches of the same host's pace, and less of the head
    assert pipeline > data


def test_two_interleaved_stages_of_a_rank_halve_the_bubble() -> None:
    """On two ranks the step is (micro batches + 1 / stages of a rank) passes of the larger rank, that with the head."""
    own = {"global_batch": "4", "dp": "2", "pp": "2", "layers": "96"}
    cells = [LAYOUT | own | {"chunks": chunks} for chunks in ("", "1", "2")]
    (one,) = {layouts.predicted_s(cell) for cell in layouts.layouts(rows(*cells[:2]), [])}
    (two,) = (layouts.predicted_s(cell) for cell in layouts.layouts(rows(cells[2]), []))
    assert two / one == pytest.approx((2 + 0.5) / (2 + 1), rel=0.03)  # of 2 micro batches


@pytest.mark.slow
def test_large_models_of_another_source_are_predicted(capsys: Capture) -> None:
    """Korthikanti et al. 2022, Table 5: 22 billion to 1 trillion parameters on 8 to 512 A100."""
    assert main(["--grade", "benchmarks/measured/gpt_large.csv", "--json"]) == 0
    graded = json.loads(capsys.readouterr().out)
    assert graded["rows"] == 4
    assert graded["mean_error"] < 0.04


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dp": "2"}, "does not fill 4 GPUs"),
        ({"layers": "5", "pp": "2", "dp": "2"}, "does not divide 5 layers"),
        ({"pp": "2", "dp": "2", "chunks": "3"}, "does not divide 4 layers"),
        ({"chunks": "2"}, "4 micro batches over pp=1 cannot be interleaved"),
        (
            {"gpus": "3", "dp": "1", "pp": "3", "chunks": "2", "layers": "6", "global_batch": "7"},
            "7 micro batches over pp=3 ",
        ),
        ({"chunks": "0"}, "chunks = '0' is no number above 0"),
        ({"global_batch": "6"}, "does not divide 4 layers and 6 samples"),
        ({"heads": "3"}, "3 heads do not divide"),
        ({"iteration_ms": "fast"}, "iteration_ms = 'fast' is no number above 0"),
        ({"hidden": "-1"}, "hidden = '-1' is no number above 0"),
        ({"seq_len": "nan"}, "seq_len = 'nan' is no number above 0"),
        ({"layers": "4.5"}, "layers = '4.5' is no whole number"),
    ],
)
def test_a_layout_is_left_out_with_its_reason(change: dict[str, str], reason: str) -> None:
    left_out = list[str]()
    assert list(layouts.layouts(rows({**LAYOUT, **change}), left_out)) == []
    assert left_out[0].startswith("line 2: ")
    assert reason in left_out[0]


def test_the_command_prints_every_point_and_the_summary(tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path / "points.csv", [BASE, POINT, {**POINT, "model": "AlexNet\x1b[31m"}])
    assert main(["--grade", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == 1
    (point,) = result["points"]
    assert point["line"] == 3
    assert point["error"] == pytest.approx(point["predicted_s"] / point["measured_s"] - 1)
    assert result["mean_error"] == pytest.approx(abs(point["error"]))
    assert len(result["left_out"]) == 1
    assert "\x1b" not in result["left_out"][0]
    assert main(["--grade", str(path)]) == 0
    text = capsys.readouterr().out
    assert "1 rows: mean error" in text
    assert "left out: line 4" in text


def test_the_recommended_layout_is_that_with_the_fewest_predicted_seconds(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower of two layouts is predicted as the faster one: 120 ms instead of 100 ms. --plan, which refuses a third
    one, finds the faster of these two, and 100 ms is not the best of a case whose other layout it refuses."""
    others = [("4", "1", "120"), ("2", "2", "90")]
    rows = [LAYOUT, *({**LAYOUT, "tp": tp, "dp": dp, "iteration_ms": ms} for tp, dp, ms in others)]
    monkeypatch.setattr(layouts, "predicted_s", lambda layout: {4: 0.09, 1: 0.11, 2: 0.12}[layout.tp])
    monkeypatch.setattr(layouts, "planned_s", lambda layout: {4: 0.09, 1: 0.08, 2: None}[layout.tp])
    assert main(["--grade", str(written(tmp_path / "layouts.csv", rows)), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["regret"] == pytest.approx(120 / 90 - 1)
    assert result["planned_regret"] == pytest.approx(0.0)


def test_ranks_that_share_layers_send_parts_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM's: each of 8 ranks of a stage sends an eighth of the output, [1024, 1024] in 16 bits, to the other
    node, and they gather it there. The 8 messages share 90 % of 100 GB/s."""
    cuts = list[Cut]()
    monkeypatch.setattr(layouts, "Cut", lambda *parts, **more: cuts.append(Cut(*parts, **more)) or cuts[-1])
    cells = {"gpus": "16", "tp": "8", "dp": "1", "pp": "2"}
    (layout,) = layouts.layouts(rows({**LAYOUT, **cells}), [])
    layouts.predicted_s(layout)
    (cut,) = cuts
    size, gathered_s = 2 * 1024**2, cut.setting.path(8).seconds("all_reduce", 2 * 1024**2) / 2
    assert pipeline._sending(cut) == pytest.approx([14e-6 + size / 90e9 + gathered_s], rel=1e-6)
    whole_s = pipeline._sending(replace(cut, scattered=False))
    assert whole_s == pytest.approx([14e-6 + 8 * size / 90e9], rel=1e-6)


def test_a_plan_of_a_layout_is_predicted_as_the_command_does(capsys: Capture) -> None:
    """A node of eight A100; the peaks of ThetaGPU's file are those of the table of GPUs."""
    (layout,) = layouts.layouts(rows(LAYOUT), [])
    sizes = {"n_layer": layout.layers, "n_embd": layout.hidden, "n_head": layout.heads, "seq_len": layout.seq_len}
    train = {"global_batch": layout.global_batch, "micro_batch": layout.micro_batch, "precision": "fp16"}
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    words += [f"train.{key}={value}" for key, value in (*train.items(), ("checkpoint_activations", "true"))]
    words += [f"framework.{degree}={getattr(layout, degree)}" for degree in ("dp", "tp", "pp")]
    words += ["+framework=hybrid", "+model=gpt2_medium", "cluster=thetagpu", f"gpus={layout.gpus}", "--json"]
    assert main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert layouts.planned_s(layout) == pytest.approx(row["step_s"], rel=0.01)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n1,2\n", "missing columns: base_gpus, base_value"),
        ("", "missing columns: base_gpus"),
        (None, "cannot be read"),
        (f"{','.join(POINT)}\n{','.join((POINT | {'model': 'AlexNet'}).values())}\n", "no row can be graded: line 2"),
        (
            f"{','.join(POINT)}\n{','.join((POINT | {'gpus': '8', 'measured': '16000'}).values())}\n",
            "none has another number of GPUs than its base",
        ),
    ],
)
def test_a_file_that_cannot_be_graded_is_one_line(
    content: str | None, said: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "points.csv"
    if content is not None:
        path.write_text(content)
    assert main(["--grade", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
