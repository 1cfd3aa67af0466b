"""Learning curves over seeds: one line and one band for runs that differ in seed and repeat alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.figures import figures_of
from tests.support.records import edit_epochs, edited, tables_of, write_run


def run(results, seed, top1, **others):
    """A run of one epoch."""
    folder = write_run(results, train={"seed": seed}, epochs=1, **others)
    edit_epochs(folder, {"val_top1": top1, "elapsed_s": 10.0 + seed})
    return folder


def end(folder, status):
    """The run has ended otherwise, with all of its epochs."""
    with edited(folder) as record:
        record |= {"status": status, "reason": "signal 9"}


def drawn(results, name="accuracy_by_epoch"):
    return figures_of(tables_of(results), name)[name].axes


def values(axes):
    """The points of the curves, without those that only the legend shows."""
    return [line.get_xydata().tolist() for line in axes.lines if np.size(line.get_xdata())]


def bands(axes):
    """(low, high) of each."""
    ends = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
    return [(pytest.approx(result.min()), pytest.approx(result.max())) for result in ends]


def lines_above(axes):
    return [line for text in axes.texts for line in text.get_text().splitlines()]


def test_other_seeds_are_one_curve_with_their_median_and_range(tmp_path):
    for seed, top1 in enumerate((0.5, 0.2, 0.3)):
        run(tmp_path, seed, top1)
    for repeat in (1, 2):
        run(tmp_path, 0, 0.5, repeat=repeat)  # no further evidence: the median over all runs would be 0.5
    (axes,) = drawn(tmp_path)
    assert values(axes) == [[[1, 0.3]]]
    assert bands(axes) == [(0.2, 0.5)]
    assert "median and range of 3 seeds" in lines_above(axes)
    (by_time,) = drawn(tmp_path, "accuracy_by_time")
    assert values(by_time) == [[[10, 0.3]]], "10, 10, 10, 11, 12 s: time is of all runs"
    for seed, top1 in enumerate((0.1, 0.4, 0.6, 0.7, 0.8, 0.9), start=3):
        run(tmp_path, seed, top1)
    (axes,) = drawn(tmp_path)
    assert values(axes) == [[[1, 0.5]]]
    assert bands(axes) == [(0.1, 0.9), (0.2, 0.8)], "the 2nd and the 8th of 9 are the interval of the median"


def test_frameworks_with_other_seeds_share_a_panel(tmp_path):
    for framework, seeds in (("ddp", (0, 1)), ("fsdp", (2,))):
        for seed in seeds:
            run(tmp_path, seed, 0.5, framework=framework)
    (axes,) = drawn(tmp_path)
    assert axes.get_legend_handles_labels()[1] == ["ddp", "fsdp"]
    assert "median and range of 1 to 2 seeds" in lines_above(axes)
    assert not any("train.seed" in text for text in lines_above(axes))


def test_the_head_of_a_panel_has_the_sizes_that_all_its_curves_share(tmp_path):
    for framework, layers in (("ddp", 2), ("fsdp", 4)):
        run(tmp_path, 0, 0.5, changed={"n_layer": layers, "width": 8}, framework=framework)
    tables = tables_of(tmp_path, across=("model.n_layer",))
    (axes,) = figures_of(tables, "accuracy_by_epoch")["accuracy_by_epoch"].axes
    head = " ".join([axes.get_title(), axes.get_title(loc="left"), *lines_above(axes)])
    assert "width=8" in head
    assert not any(size in head for size in ("n_layer=2", "n_layer=4"))


def test_a_failed_run_of_another_seed_is_a_line_with_a_cross_in_the_color_of_the_curve(tmp_path):
    run(tmp_path, 0, 0.5)
    end(run(tmp_path, 1, 0.1), "killed")
    (axes,) = drawn(tmp_path)
    assert values(axes) == [[[1, 0.5]], [[1, 0.1]], [[1, 0.1]]]
    assert [line.get_marker() for line in axes.lines if np.size(line.get_xdata())][2] == "x"
    assert len({line.get_color() for line in axes.lines}) == 1


def test_equal_curves_of_several_frameworks_are_all_visible(tmp_path):
    for framework in ("ddp", "horovod", "local_sgd"):
        run(tmp_path, 0, 0.3 if framework == "local_sgd" else 0.5, framework=framework, gpus=2)
    (axes,) = drawn(tmp_path)
    covered, above, other = (line for line in axes.lines if np.size(line.get_xdata()))
    assert covered.get_ydata() == above.get_ydata() != other.get_ydata()
    assert covered.get_linewidth() > above.get_linewidth() == other.get_linewidth()
    assert covered.get_markersize() > above.get_markersize() == other.get_markersize()


def test_panels_of_one_comparison_share_axes_and_no_two_names_of_a_legend_have_one_look(tmp_path):
    """Ten curves in panels by family: that of the pipelines has gpipe alone, whose looks are its own all the same. The
    shared axes hold the failed runs of every panel."""
    frameworks = ("single", "ddp", "horovod", "local_sgd", "fsdp", "zero2", "zero3", "tensor")
    for number, framework in enumerate(frameworks):
        run(tmp_path, number, 0.1 * (number + 1), framework=framework, gpus=2)
    for gpus in (2, 4):
        run(tmp_path, 9, 0.5, framework="gpipe", gpus=gpus)
    failed = [run(tmp_path, 99, 0.5, framework="ddp", gpus=2, repeat=repeat) for repeat in range(8)]
    for folder in (*failed, run(tmp_path, 99, 0.95, framework="gpipe", gpus=2)):
        end(folder, "killed")
    for name in ("accuracy_by_epoch", "accuracy_by_time"):
        panels = drawn(tmp_path, name)
        named = [line for axes in panels for line in axes.lines if not str(line.get_label()).startswith("_")]
        looks = {line.get_label(): (line.get_color(), line.get_marker(), line.get_markerfacecolor()) for line in named}
        assert len(panels) == 4
        assert len(set(looks.values())) == len(looks) == 10
        assert len({axes.get_ylim() for axes in panels}) == len({axes.get_xlim() for axes in panels}) == 1
        low, high = panels[0].get_ylim()
        assert low < 0.1 < 0.95 < high, "also failed runs, of which each panel draws up to eight"


def test_failed_runs_that_are_not_drawn_are_counted(tmp_path):
    run(tmp_path, 0, 0.5)
    for seed in range(1, 11):
        end(run(tmp_path, seed, 0.1), "diverged")
    (axes,) = drawn(tmp_path)
    assert len(values(axes)) == 1 + 2 * 8, "a line and a cross each"
    assert "2 more that did not end ok are not drawn" in axes.get_legend_handles_labels()[1]


def test_the_learning_rate_of_each_recipe_over_the_epochs(tmp_path):
    """Drawn where it changes; learning_rate is no metric of seeds."""
    for name, rates in (("sgd", (0.1, 0.01, 0.001)), ("cosine", (0.1, 0.05, 0.0))):
        edit_epochs(write_run(tmp_path, recipe={"name": name}), *({"lr_last": rate} for rate in rates))
    (axes,) = figures_of(tables_of(tmp_path, across=["recipe"]), "learning_rate")["learning_rate"].axes
    rates = [[rate for _, rate in line] for line in values(axes)]
    assert sorted(rates) == [[0.1, 0.01, 0.001], [0.1, 0.05, 0.0]]


def test_quality_over_the_batch(tmp_path):
    for gpus, top1 in ((1, 0.75), (2, 0.74), (4, 0.6)):
        for repeat in (0, 1):
            write_run(tmp_path, gpus=gpus, repeat=repeat, summary={"val_top1": top1 + repeat / 100})
    (axes,) = drawn(tmp_path, "accuracy_by_batch")
    merged, repeats = values(axes)
    assert merged == [[batch, pytest.approx(top1)] for batch, top1 in ((32, 0.755), (64, 0.745), (128, 0.605))]
    assert len(repeats) == 6


def test_equal_curves_over_the_batch_are_wider_below_the_others(tmp_path):
    """single has one of the two batches."""
    write_run(tmp_path, framework="single", summary={"val_top1": 0.7})
    for framework, top1 in (("ddp", 0.6), ("fsdp", 0.5)):
        write_run(tmp_path, framework=framework, summary={"val_top1": 0.7})
        write_run(tmp_path, framework=framework, gpus=2, summary={"val_top1": top1})
    (axes,) = drawn(tmp_path, "accuracy_by_batch")
    curves = [line for line in axes.lines if np.size(line.get_xdata()) and line.get_marker() != "."]
    widths = {tuple(np.array(line.get_ydata()).tolist()): line.get_linewidth() for line in curves}
    assert widths[0.7,] > widths[0.7, 0.6] == widths[0.7, 0.5]
    assert axes.get_legend_handles_labels()[1] == ["single", "ddp", "fsdp"]


def test_quality_over_the_batch_is_the_median_of_the_seeds(tmp_path):
    """Three seeds with each batch; the strong and the weak scaling of two GPU counts add no points."""
    for gpus in (1, 2):
        for batch, middle in ((64, 0.70), (128, 0.65)):
            for seed, change in enumerate((-0.03, 0.0, 0.02)):
                summary = {"val_top1": middle + change}
                write_run(tmp_path, gpus=gpus, per_gpu=None, global_batch=batch, train={"seed": seed}, summary=summary)
    (axes,) = drawn(tmp_path, "accuracy_by_batch")
    merged, repeats = values(axes)
    assert merged == [[64, pytest.approx(0.70)], [128, pytest.approx(0.65)]]
    assert len(repeats) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"knobs": {"dp": 4, "tp": 1}}, {"knobs": {"dp": 1, "tp": 4}}, {"tensor [dp=4 tp=1]", "tensor [dp=1 tp=4]"}),
        ({"cluster": "east"}, {"cluster": "west"}, {"tensor at east", "tensor at west"}),
    ],
)
def test_curves_of_several_layouts_and_clusters_have_names_of_their_own(first, second, names, tmp_path):
    for options in (first, second):
        write_run(tmp_path, framework="tensor", gpus=4, **options)
    (axes,) = drawn(tmp_path)
    looks = {line.get_label(): (line.get_color(), line.get_marker()) for line in axes.lines}
    assert {label for label in looks if not label.startswith("_")} == names
    assert len({looks[name] for name in names}) == 2
