"""Epochs, updates, samples and seconds until a metric reaches its target, by hand."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from ddlbench.errors import UserError
from ddlbench.record.schema import TARGETS
from ddlbench.report.__main__ import main
from ddlbench.results.tables.targets import Target, target, target_costs, write_targets
from tests.support.figures import figures_of
from tests.support.records import tables_of, write_run


def write_course(results, values, metric="val_top1", **others):
    """Epochs of 100 samples in 10 updates and 7 s each."""
    folder = write_run(results, **others)
    rows = [
        {"epoch": n, "samples": 100, "updates": 10 * (n + 1), "elapsed_s": 7.0 * (n + 1), metric: value}
        for n, value in enumerate(values)
    ]
    (folder / "epochs.jsonl").write_text("\n".join(map(json.dumps, rows)))


def rows_of(results, wanted):
    return target_costs(tables_of(results), wanted).rows


def test_the_first_epoch_that_reaches_it_counts(tmp_path):
    write_course(tmp_path, [0.2, 0.5, 0.4, 0.6])
    (row,) = rows_of(tmp_path, Target("val_top1", 0.5))
    result = {name: row[f"{name}_to_target"] for name in ("epochs", "updates", "samples", "seconds")}
    assert result == {"epochs": 2, "updates": 20, "samples": 200, "seconds": 14.0}
    assert (row["target"], row["runs"], row["reached"]) == ("val_top1=0.5", 1, 1)


def test_runs_that_never_reach_it_count_as_infinitely_long(tmp_path):
    for repeat, last in enumerate((0.6, 0.6, 0.1)):
        write_course(tmp_path, [0.1, 0.2, last], repeat=repeat)
    (row,) = rows_of(tmp_path, Target("val_top1", 0.5))
    assert (row["runs"], row["reached"], row["epochs_to_target"]) == (3, 2, 3)
    (row,) = rows_of(tmp_path, Target("val_top1", 0.7))
    assert (row["reached"], row["epochs_to_target"], row["seconds_to_target"]) == (0, None, None)


def test_a_run_that_never_reaches_it_moves_the_median(tmp_path):
    for repeat, values in enumerate(([0.6], [0.1, 0.1, 0.6], [0.1] * 4)):
        write_course(tmp_path, values, repeat=repeat)
    (row,) = rows_of(tmp_path, Target("val_top1", 0.5))
    result = [row[f"{name}_to_target"] for name in ("epochs", "updates", "samples", "seconds")]
    assert result == [3, 30, 300, 21.0], "the median of 1, 3 and never; of those that reach it 2"
    assert row["interval"] == "n=3, no 95 % CI"


def test_an_interval_ends_at_infinity_where_a_run_never_reaches_it(tmp_path):
    for repeat, epochs in enumerate((1, 2, 4, 7, 9)):
        write_course(tmp_path, [0.1] * (epochs - 1) + [0.6], repeat=repeat)
    write_course(tmp_path, [0.1], repeat=5)
    (row,) = rows_of(tmp_path, Target("val_top1", 0.5))
    assert [row[f"epochs_{end}"] for end in ("low", "to_target", "high")] == [1, 5.5, None]
    assert (row["runs"], row["reached"], row["interval"]) == (6, 5, "n=6, 96.9 % CI")


def test_runs_that_did_not_end_ok_do_not_count(tmp_path):
    write_course(tmp_path, [0.1, 0.1, 0.6], repeat=0)
    for repeat, status in enumerate(("killed", "diverged"), start=1):
        write_course(tmp_path, [0.6], repeat=repeat, status=status)
    (row,) = rows_of(tmp_path, Target("val_top1", 0.5))
    assert (row["runs"], row["reached"], row["epochs_to_target"]) == (1, 1, 3)


@pytest.mark.parametrize("metric", ["val_top1", "val_top5"])
def test_accuracy_rises_to_its_target(tmp_path, metric):
    write_course(tmp_path, [0.3, 0.4, 0.6], metric=metric)
    (row,) = rows_of(tmp_path, Target(metric, 0.4))
    assert row["epochs_to_target"] == 2


@pytest.mark.parametrize("metric", ["val_loss", "train_loss", "val_perplexity_token", "val_perplexity_word"])
def test_losses_and_perplexities_fall_to_their_target(tmp_path, metric):
    write_course(tmp_path, [9.0, 4.0, 3.0], metric=metric)
    (row,) = rows_of(tmp_path, Target(metric, 4.0))
    assert row["epochs_to_target"] == 2


def test_samples_after_an_epoch_that_is_missing_are_unknown(tmp_path):
    write_course(tmp_path, [0.1, 0.2, 0.6, 0.7])
    (path,) = tmp_path.glob("*/attempt-1/epochs.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]))
    (row,) = rows_of(tmp_path, Target("val_top1", 0.5))
    assert (row["epochs_to_target"], row["updates_to_target"], row["samples_to_target"]) == (3, 30, None)
    path.write_text("\n".join([lines[0], lines[1].replace('"samples": 100', '"samples": null'), *lines[2:]]))
    (row,) = rows_of(tmp_path, Target("val_top1", 0.5))
    assert row["samples_to_target"] is None


def test_six_runs_have_an_interval(tmp_path):
    for repeat in range(6):
        write_course(tmp_path, [0.1] * repeat + [0.6], repeat=repeat)
    (row,) = rows_of(tmp_path, Target("val_top1", 0.5))
    assert (row["epochs_low"], row["epochs_to_target"], row["epochs_high"]) == (1, 3.5, 6)


def test_only_runs_with_the_metric_have_a_row(tmp_path):
    write_course(tmp_path, [0.6])
    write_course(tmp_path, [60.0], metric="val_perplexity_token", model="gpt2_small")
    assert [row["model"] for row in rows_of(tmp_path, Target("val_top1", 0.5))] == ["resnet50"]


def test_columns_are_those_of_the_data_dictionary_and_every_row_has_all_of_them(tmp_path):
    for repeat in range(6):
        write_course(tmp_path / "results", [0.1, 0.6], repeat=repeat)
    tables = tables_of(tmp_path / "results")
    wanted = [Target("val_top1", 0.5), Target("val_top1", 0.9)]
    names = [column.name for column in TARGETS]
    costs = [target_costs(tables, target) for target in wanted]
    assert [list(row) for cost in costs for row in cost.rows] == [names, names]
    write_targets(costs, tmp_path)
    reached, not_reached = (tmp_path / "targets.csv").read_text().splitlines()[1:]
    assert reached.startswith("val_top1=0.5,ddp,resnet50,native,sgd,1,32,")
    assert ",6,6,2.0,2.0,2.0,20.0,20.0,20.0,200.0,200.0,200.0,14.0,14.0,14.0," in reached
    assert f",6,0{',' * 13}" in not_reached
    write_targets([], tmp_path)
    assert not (tmp_path / "targets.csv").exists(), "a report without targets has none of an earlier one"


def test_a_table_and_two_figures(tmp_path):
    for gpus in (1, 2):
        write_course(tmp_path / "results", [0.2, 0.6], gpus=gpus)
    tables = tables_of(tmp_path / "results")
    write_targets([target_costs(tables, Target("val_top1", 0.5))], tmp_path)
    assert list(pd.read_csv(tmp_path / "targets.csv")["seconds_to_target"]) == [14.0, 14.0]
    names = ("seconds_to_val_top1=0.5", "epochs_to_val_top1=0.5")
    figures = figures_of(tables, *names, targets=[target_costs(tables, Target("val_top1", 0.5))])
    assert tuple(sorted(figures, reverse=True)) == names
    (axes,) = figures["seconds_to_val_top1=0.5"].axes
    assert [[1, 14], [2, 14]] in [line.get_xydata().tolist() for line in axes.lines]


def test_a_target_whose_metric_no_run_has_is_named(tmp_path, capsys):
    write_run(tmp_path, status="error", reason="boom")
    assert main([str(tmp_path), "--target", "val_top1=0.5"]) == 0
    warning = "--target val_top1=0.5: no reported run that ended ok has val_top1\n"
    assert f"warning: {warning}" in capsys.readouterr().err
    assert warning in (tmp_path / "report" / "tables" / "warnings.txt").read_text()


@pytest.mark.parametrize("text", ["val_top1", "val_top1=", "val_top1=high", "val_top1=nan", "epoch_time_s=3"])
def test_a_target_that_cannot_be_read(text):
    with pytest.raises(UserError, match="METRIC=NUMBER"):
        target(text)


@pytest.mark.parametrize("text", ["val_top1=2", "val_top5=70", "val_top1=0", "val_loss=-1", "val_perplexity_word=0"])
def test_a_target_that_no_run_can_have_is_refused(text):
    with pytest.raises(UserError, match="is above 0"):
        target(text)
    assert target("val_top1=1").value == 1
    assert target("val_loss=70").value == 70
