"""--study: the figures that a study lists, and the cells that each one lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddlbench.figures.figures import Drawing, plots_of
from ddlbench.report.__main__ import main
from ddlbench.report.study import draw_study
from ddlbench.sweep.study import Study, load, names
from ddlbench.sweep.study_entries import matches
from tests.support.records import edit_epochs, tables_of, write_run

Capture = pytest.CaptureFixture[str]
STUDY = """# Two frameworks
across: [recipe]
figures:
  1: {kind: speedup_bars, where: {gpus: 4}}
  2a: {kind: epoch_time, where: {model: resnet50}, printed: ZeRO within 10 % of DDP}
  2b: {kind: accuracy_by_time, best: true}
  3: {kind: step_seconds}
  4: {kind: throughput, where: {framework: ddp}, by: model}
axes:
  framework: [ddp, zero2]
  model: [resnet50, vgg16]
  gpus: [1, 2, 4]
keys: {scaling: weak, batch: 32}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "paper.yaml"
    path.write_text(STUDY)
    return path


def runs(folder: Path, **others: Any) -> None:
    """ddp: 1, 2, 4 GPUs at 100, 180, 170 samples/s; zero2, with another recipe, 1 and 2 at 80 and 150."""
    for gpus, rate in ((1, 100.0), (2, 180.0), (4, 170.0)):
        write_run(folder, gpus=gpus, rate=rate, **others)
    for gpus, rate in ((1, 80.0), (2, 150.0)):
        write_run(folder, framework="zero2", gpus=gpus, rate=rate, recipe={"name": "adamw"}, **others)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    runs(tmp_path / "results")
    return tmp_path / "results"


def drawn(path: Path, results: Path, *numbers: str) -> Drawing:
    """numbers: of the figures that are drawn; none: all"""
    study = load(str(path))
    chosen = {number: study.figures[number] for number in numbers or study.figures}
    study = replace(study, figures=chosen)
    return draw_study(study, lambda how: tables_of(results, by=",".join(how.by), across=how.across))


def test_each_figure_has_the_rows_of_its_cells_and_names_those_that_are_missing(study: Path, results: Path) -> None:
    drawing = drawn(study, results)
    assert list(drawing.figures) == ["paper_1", "paper_2a", "paper_2b", "paper_4"]
    (bars,) = drawing.figures["paper_1"].axes
    assert [patch.get_height() for patch in bars.patches] == pytest.approx([1.7])  # ddp on 4 over the 100 samples/s
    (lines,) = drawing.figures["paper_2a"].axes
    assert "rows differ in recipe" in lines.texts[0].get_text()
    assert "the paper: ZeRO within 10 % of DDP" in lines.texts[0].get_text()
    assert "the paper" not in bars.texts[0].get_text()
    notes = "\n".join(drawing.notes)
    assert (
        "paper_1: 3 of 4 cells have no run that ended ok: ddp vgg16 gpus=4, zero2 resnet50 gpus=4, zero2 vgg16 gpus=4\n"
        in notes
    )
    assert "paper_2a: 1 of 6 cells have no run that ended ok: zero2 resnet50 gpus=4" in notes
    assert "paper_4: 3 of 6 cells have no run that ended ok: ddp vgg16 gpus=1,2,4" in notes
    assert "paper_3: no run has what step_seconds shows: run with profile=true" in notes


def test_a_key_that_a_later_version_added_has_its_value_of_before(tmp_path: Path) -> None:
    """The tables leave it out there; the legend names keys without their groups."""
    (tmp_path / "levers.yaml").write_text(
        "across: [train.offload_activations]\nfigures:\n  1: {kind: memory_and_throughput}\n"
        "axes: {framework: [ddp], train.offload_activations: [false, true], gpus: [2]}\nkeys: {model: resnet50}\n"
    )
    results = tmp_path / "results"
    write_run(results, gpus=2, rate=100.0)
    write_run(results, gpus=2, rate=50.0, train={"offload_activations": True})
    drawing = drawn(tmp_path / "levers.yaml", results)
    assert not any("have no run" in note for note in drawing.notes)
    (panel,) = drawing.figures["levers_1"].axes
    assert {"ddp", "ddp (offload_activations=true)"} <= set(panel.get_legend_handles_labels()[1])


def test_a_key_of_a_framework_that_a_later_version_added_has_its_value_of_before(tmp_path: Path) -> None:
    """The record says which; its configuration in the tables does not have it."""
    (tmp_path / "ratios.yaml").write_text(
        "figures:\n  1: {kind: throughput_bars}\n"
        "axes: {framework: [ddp], framework.topk_ratio: [0.01, 0.1], gpus: [2]}\nkeys: {model: resnet50}\n"
    )
    later = {"config_added_later": {"framework.topk_ratio": 0.01}}
    for ratio, rate in ((0.01, 100.0), (0.1, 50.0)):
        write_run(tmp_path / "results", gpus=2, rate=rate, knobs={"topk_ratio": ratio}, sections=later)
    drawing = drawn(tmp_path / "ratios.yaml", tmp_path / "results")
    assert drawing.notes == []
    assert sorted(patch.get_height() for patch in drawing.figures["ratios_1"].axes[0].patches) == [50, 100]


def test_best_takes_the_fastest_gpu_count_of_each_curve(study: Path, results: Path) -> None:
    (axes,) = drawn(study, results, "2b").figures["paper_2b"].axes
    assert set(axes.get_legend_handles_labels()[1]) == {"ddp (sgd)", "zero2 (adamw)"}
    assert "2 GPUs, 64 samples an update" in axes.texts[0].get_text()  # ddp is slower on 4


def test_learning_rates_are_those_of_the_figure_s_cells(study: Path, results: Path) -> None:
    study.write_text(STUDY.replace("kind: step_seconds", "kind: learning_rate, where: {gpus: 2}"))
    for path in results.glob("*/attempt-1/epochs.jsonl"):
        edit_epochs(path.parent, *({"lr_last": 0.1 / n} for n in (1, 2, 3)))
    (axes,) = drawn(study, results, "3").figures["paper_3"].axes
    assert set(axes.get_legend_handles_labels()[1]) == {"ddp (sgd)", "zero2 (adamw)"}


def test_a_figure_may_compare_by_another_factor(study: Path, results: Path) -> None:
    runs(results, model="vgg16")
    (panel,) = drawn(study, results, "4").figures["paper_4"].axes
    assert {"resnet50", "vgg16"} <= set(panel.get_legend_handles_labels()[1])


def test_a_figure_has_the_rows_of_each_entry_of_where(study: Path, results: Path) -> None:
    study.write_text(STUDY.replace("{model: resnet50}", "[{framework: ddp, gpus: 4}, {framework: zero2, gpus: 1}]"))
    (axes,) = drawn(study, results, "2a").figures["paper_2a"].axes
    assert {tuple(np.asarray(line.get_xdata())) for line in axes.lines} == {(1,), (4,)}


def test_runs_of_other_cells_are_not_drawn(study: Path, results: Path) -> None:
    before = drawn(study, results, "1", "2a").notes
    write_run(results, framework="fsdp", gpus=4)
    write_run(results, gpus=8)
    drawing = drawn(study, results, "1", "2a")
    assert drawing.notes == before
    assert not any("fsdp" in text for text in drawing.figures["paper_2a"].axes[0].get_legend_handles_labels()[1])


def test_runs_of_another_model_or_loader_than_the_study_s_are_left_out(study: Path, results: Path) -> None:
    study.write_text(STUDY.replace("batch: 32", "batch: 32, loader: native, model.image_size: 32"))
    before = drawn(study, results, "2a")
    write_run(results, framework="zero2", gpus=4, changed={"layers": [1, 1, 1, 1]})
    write_run(results, framework="zero2", gpus=4, loader="synthetic")
    write_run(results, framework="zero2", gpus=2, changed={"image_size": 224})
    drawing = drawn(study, results, "2a")
    keys = "loader.name, model.image_size, model.layers"
    first = f"3 measurements are not of this study: they differ from its cells in {keys}"
    assert drawing.notes == [first, *before.notes]
    (panel,) = drawing.figures["paper_2a"].axes
    assert len(panel.lines) == len(before.figures["paper_2a"].axes[0].lines)


def test_runs_that_differ_in_other_keys_are_drawn(study: Path, results: Path) -> None:
    write_run(results, framework="zero2", gpus=4, changed={"num_classes": 10}, train={"precision": "bf16"}, epochs=5)
    assert drawn(study, results, "2a").notes == []


def test_a_failed_cell_is_missing_and_has_its_status_in_the_figure(study: Path, results: Path) -> None:
    write_run(results, framework="zero2", gpus=4, status="oom", reason="CUDA out of memory", recipe={"name": "adamw"})
    drawing = drawn(study, results, "1", "2a")
    assert "paper_2a: 1 of 6 cells have no run that ended ok: zero2 resnet50 gpus=4" in drawing.notes
    assert "oom" in [text.get_text() for text in drawing.figures["paper_1"].axes[0].texts]


def test_the_command_draws_them_and_says_what_is_missing(study: Path, results: Path, capsys: Capture) -> None:
    assert main([str(results), "--study", str(study)]) == 0
    assert {path.stem for path in (results / "report" / "figures").glob("*.png")} == {
        "paper_1", "paper_2a", "paper_2b", "paper_4",
    }  # fmt: skip
    assert "paper_1: 3 of 4 cells have no run" in capsys.readouterr().out
    assert "paper_1: 3 of 4 cells" in (results / "report" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kind: epoch_time,", "kind: epochs,", "paper_2a: kind epochs does not exist: choose one of throughput, "),
        ("best: true", "worst: true", "figures: 2b: a figure has a name"),
        ("kind: step_seconds", "where: {gpus: 1}", "figures: 3: a figure has a name"),
        ("where: {gpus: 4}", "where: {gpus: 8}", "figures: 1: gpus=8 is on no axis"),
        ("where: {gpus: 4}", "where: [{gpus: 4}, {gpus: 8}]", "figures: 1: gpus=8 is on no axis"),
        ("where: {gpus: 4}", "where: [{gpus: 4}, {}]", "figures: 1: {} names no cells"),
        ("where: {gpus: 4}", "where: []", "figures: 1: [] is no section of keys"),
        ("  3: {kind: step_seconds}", "  3: 4", "figures: 4 is no section of keys"),
        ("best: true", "best: 1", "figures: 2b: a figure has a name"),
        ("printed: ZeRO within 10 % of DDP", "printed: 10", "figures: 2a: a figure has a name"),
        ("by: model}", "by: models}", "--by models: choose of framework, loader, model"),
        ("across: [recipe]", "across: [1]", "across=\\[1\\] must be a list of names"),
        ("across: [recipe]", "across: [recip]", "--across recip: no run has this setting"),
    ],
)
def test_a_mistake_in_a_study_is_one_line(
    study: Path, results: Path, old: str, new: str, said: str, capsys: Capture
) -> None:
    assert old in STUDY
    study.write_text(STUDY.replace(old, new))
    assert main([str(results), "--study", str(study)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert said.replace("\\", "") in message


def test_results_of_other_cells_alone_are_an_error(study: Path, tmp_path: Path, capsys: Capture) -> None:
    write_run(tmp_path, gpus=8)
    write_run(tmp_path, gpus=8, recipe={"name": "adamw"})
    assert main([str(tmp_path), "--study", str(study)]) == 2
    assert "no figure can be drawn: paper_1: 4 of 4 cells have no run" in capsys.readouterr().err
    assert main([str(tmp_path), "--study", "levers_gpu"]) == 2
    assert "single model.pad_vocab_to_multiple=1 train.checkpoint_activations=false" in capsys.readouterr().err


def test_runs_of_some_cells_may_lack_a_setting_of_the_others(results: Path, capsys: Capture) -> None:
    """lin2022 compares across model.tie_weights, which no ResNet has."""
    assert main([str(results), "--study", "lin2022"]) == 0
    assert "lin2022_4: 18 of 20 cells have no run" in capsys.readouterr().out
    assert (results / "report" / "figures" / "lin2022_4.png").exists()


def test_what_cannot_be_predicted_is_said_where_no_figure_can_be_drawn(
    study: Path, results: Path, capsys: Capture
) -> None:
    figures = STUDY.index("  1:"), STUDY.index("axes:")
    study.write_text(f"{STUDY[: figures[0]]}  1: {{kind: predicted_parts}}\n{STUDY[figures[1] :]}")
    assert main([str(results), "--study", str(study), "--predict", "abci"]) == 2
    message = capsys.readouterr().err
    assert "warning: no prediction of ddp, resnet50, 2 GPUs" in message
    assert "of cluster abci is Tesla V100-SXM2-16GB" in message
    assert "no figure can be drawn" in message


def test_a_study_has_its_own_comparison(study: Path, results: Path, capsys: Capture) -> None:
    assert main([str(results), "--study", str(study), "--by", "model"]) == 2
    assert "--study has its own --by and --across" in capsys.readouterr().err


def test_a_schedule_has_a_row_for_each_rank_and_a_box_for_each_pass(study: Path, results: Path) -> None:
    """Damaged passes are left out, and so is what begins after the second step. Ranks keep their numbers: rank 1 has no
    valid pass."""
    study.write_text(STUDY.replace("3: {kind: step_seconds}", "3: {kind: schedule}"))
    first: list[Any] = [["forward", 0.1, 0.2], ["backward", 0.3, 0.5], ["update", 0.5, 0.6], ["forward", 2.3, 2.4]]
    second: list[Any] = [["forward", 0.2, 0.3], ["backward", 0.3, None], 7, ["backward", 0.3, 0.4]]
    ranks = [
        {"stage": 0, "passes": first}, {"stage": 1, "passes": "none"}, {"stage": 2, "passes": second}, 3,
        {"stage": 0}, {"stage": 1}, {"stage": 2},
    ]  # fmt: skip
    window = {"profile": {"status": "ok", "step_s": 1.0, "window_s": 4.0, "steps": 4, "ranks": ranks}}
    write_run(results, framework="zero2", gpus=4, sections=window, recipe={"name": "adamw"})
    (axes,) = drawn(study, results, "3").figures["paper_3"].axes
    boxes = [path.get_extents().bounds for part in axes.collections for path in part.get_paths()]
    assert sorted((round(x, 6), y + 0.4, round(width, 6)) for x, y, width, _ in boxes) == [
        (0, 0, 0.1), (0.1, 2, 0.1), (0.2, 0, 0.2), (0.2, 2, 0.1), (0.4, 0, 0.1),
    ]  # fmt: skip
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0", "2"]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Of all figures that a study may ask for."""
    results = tmp_path_factory.mktemp("results")
    runs(results)
    tables = tables_of(results)
    return {plot.name for plot in plots_of(tables, tables.measurements)}


WITH_FIGURES = [study for study in map(load, names()) if study.figures]


@pytest.mark.parametrize("study", WITH_FIGURES, ids=lambda study: study.name)
def test_the_figures_of_the_ready_studies_exist(study: Study, kinds: set[str]) -> None:
    """Their kinds are figures of the report, and their cells cells of the study."""
    points = list(study.points())
    for figure in study.figures.values():
        assert figure.kind in kinds
        assert any(matches(figure.where, point) for point in points)
