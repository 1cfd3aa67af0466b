"""Loss and accuracy over seeds, and what it takes until a metric reaches its target, by hand."""

from __future__ import annotations

import json

import pytest

from ddlbench.errors import UserError
from ddlbench.record.schema import TARGETS
from ddlbench.report.__main__ import main
from ddlbench.results.tables.quality import Target, target, target_costs
from ddlbench.results.tables.tables import records
from tests.support.figures import figures_of
from tests.support.records import edit_epochs, edited, tables_of, write_run


def run(results, seed, top1, repeat=0, **others):
    folder = write_run(results, repeat=repeat, train={"seed": seed}, epochs=2, **others)
    edit_epochs(folder, *({"val_top1": None if top1 is None else top1 + more} for more in (0.0, 0.1)))
    return folder


def learning(results):
    return records(tables_of(results).learning)


def test_a_seed_is_the_median_of_its_repeats_that_ended_ok(tmp_path):
    """Seed 0: 0.1, 0.9 and 0.4, and 0.95 of a run that was killed; seed 1: 0.2; seed 2: not known."""
    for repeat, (top1, rate) in enumerate(((0.1, 1024.0), (0.9, 512.0), (0.4, 256.0))):
        run(tmp_path, seed=0, top1=top1, repeat=repeat, rate=rate)
    with edited(run(tmp_path, seed=0, top1=0.95, repeat=3, rate=1.0)) as record:
        record["status"] = "killed"
    run(tmp_path, seed=1, top1=0.2, rate=16.0)
    run(tmp_path, seed=2, top1=None, rate=128.0)
    first, second = learning(tmp_path)
    result = [first[f"val_top1{end}"] for end in ("", "_min", "_max", "_low", "_high")]
    assert result == [pytest.approx(0.3), 0.2, 0.4, None, None]
    assert (second["epoch"], second["val_top1"]) == (1, pytest.approx(0.4))
    assert (first["runs"], first["seeds"], first["val_perplexity_token"]) == (5, 3, None)
    assert (first["framework"], first["gpus"], first["global_batch"]) == ("ddp", 1, 32)
    assert first["elapsed_s"] == 6.0, "2 s and 1, 2, 4, 8 or 64 s: the median of the five runs"


def test_an_interval_is_that_of_the_seeds_with_a_value(tmp_path):
    for seed, top1 in enumerate((0.11, 0.12, 0.13, 0.14, 0.15, 0.16, None)):
        run(tmp_path, seed=seed, top1=top1)
    first, _ = learning(tmp_path)
    result = [first[f"val_top1{end}"] for end in ("", "_low", "_high")]
    assert result == [pytest.approx(0.135), 0.11, 0.16]
    assert (first["val_loss_low"], first["val_loss_high"]) == (2.2, 2.2)


def test_what_differs_in_more_than_the_seed_is_another_curve(tmp_path):
    run(tmp_path, seed=0, top1=0.5)
    run(tmp_path, seed=1, top1=0.5, framework="fsdp")
    run(tmp_path, seed=1, top1=0.5, gpus=2)
    assert [row["seeds"] for row in learning(tmp_path)] == [1] * 6


HALF = Target("val_top1", 0.5)


def write_course(results, values, metric="val_top1", **others):
    """Epochs of 100 samples in 10 updates and 7 s each."""
    folder = write_run(results, **others)
    rows = [
        {"epoch": n, "samples": 100, "updates": 10 * (n + 1), "elapsed_s": 7.0 * (n + 1), metric: value}
        for n, value in enumerate(values)
    ]
    (folder / "epochs.jsonl").write_text("\n".join(map(json.dumps, rows)))


def costs_of(tables, wanted):
    return target_costs(wanted, tables.epochs, tables.run_rows)


def rows_of(results, wanted):
    return costs_of(tables_of(results), wanted).rows


def test_a_run_that_never_reaches_it_counts_as_infinitely_long(tmp_path):
    for repeat, epochs in enumerate((1, 2, 4, 7, 9)):
        write_course(tmp_path, [0.1] * (epochs - 1) + [0.6], repeat=repeat)
    write_course(tmp_path, [0.1], repeat=5)
    (row,) = rows_of(tmp_path, HALF)
    assert [row[f"epochs_{end}"] for end in ("low", "to_target", "high")] == [1, 5.5, None], "1 2 4 | 7 9 never"
    assert [row[f"{name}_to_target"] for name in ("updates", "samples", "seconds")] == [55, 550, 38.5]
    assert (row["runs"], row["reached"], row["interval"]) == (6, 5, "n=6, 96.9 % CI")


RISE, FALL = [0.3, 0.4, 0.2, 0.6], [0.9, 0.4, 0.7, 0.3]
COURSES = dict.fromkeys(("val_top1", "val_top5"), RISE) | dict.fromkeys(
    ("val_loss", "train_loss", "val_perplexity_token", "val_perplexity_word"), FALL
)


@pytest.mark.parametrize("metric", COURSES)
def test_accuracies_rise_and_losses_fall_to_their_target(tmp_path, metric):
    factor = 10 if "perplexity" in metric else 1
    write_course(tmp_path, [factor * value for value in COURSES[metric]], metric=metric)
    (row,) = rows_of(tmp_path, Target(metric, factor * 0.4))
    result = {name: row[f"{name}_to_target"] for name in ("epochs", "updates", "samples", "seconds")}
    assert result == {"epochs": 2, "updates": 20, "samples": 200, "seconds": 14.0}
    assert (row["target"], row["runs"], row["reached"]) == (f"{metric}={factor * 0.4:g}", 1, 1)


def test_samples_after_an_epoch_that_is_missing_are_unknown(tmp_path):
    write_course(tmp_path, [0.1, 0.2, 0.6, 0.7])
    (path,) = tmp_path.glob("*/attempt-1/epochs.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]))
    (row,) = rows_of(tmp_path, HALF)
    assert (row["epochs_to_target"], row["updates_to_target"], row["samples_to_target"]) == (3, 30, None)
    path.write_text("\n".join([lines[0], lines[1].replace('"samples": 100', '"samples": null'), *lines[2:]]))
    (row,) = rows_of(tmp_path, HALF)
    assert row["samples_to_target"] is None


def test_a_run_whose_cost_is_unknown_leaves_the_median_empty(tmp_path):
    for repeat in range(7):
        write_course(tmp_path, [0.6], repeat=repeat)
    path = next(tmp_path.glob("*/attempt-1/epochs.jsonl"))
    path.write_text(path.read_text().replace('"samples": 100', '"samples": null'))
    (row,) = rows_of(tmp_path, HALF)
    assert (row["runs"], row["epochs_to_target"], row["interval"]) == (7, 1, "n=7, 98.4 % CI")
    assert [row[f"samples_{end}"] for end in ("low", "to_target", "high")] == [None] * 3


def test_a_run_that_diverges_never_reaches_the_target(tmp_path):
    """Seed 0 reaches it in epoch 1, its second run diverges after that epoch; seed 1 diverges; seed 2: epoch 2."""
    write_course(tmp_path, [0.6])
    write_course(tmp_path, [0.6], repeat=1, status="diverged")
    write_course(tmp_path, [0.6], train={"seed": 1}, status="diverged")
    write_course(tmp_path, [0.1, 0.6], train={"seed": 2})
    write_course(tmp_path, [0.6], gpus=2, status="diverged")
    rows = rows_of(tmp_path, HALF)
    facts = [(row["seed"], row["runs"], row["reached"], row["epochs_to_target"]) for row in rows]
    assert sorted(facts, key=str) == [(0, 2, 1, None), (1, 1, 0, None), (2, 1, 1, 2), (None, 4, 2, None)]


def test_a_row_over_seeds_has_the_median_of_the_medians_of_the_seeds(tmp_path):
    """Seed 0 reaches it in epoch 1, 1 and 2, seed 1 in epoch 3, seed 2 never; the samples of seed 1 are not known."""
    for repeat, epochs in enumerate((1, 1, 2)):
        write_course(tmp_path, [0.1] * (epochs - 1) + [0.6], repeat=repeat)
    for seed, values in enumerate(([0.1, 0.1, 0.6], [0.1]), start=1):
        write_course(tmp_path, values, train={"seed": seed})
    write_course(tmp_path, [0.6], gpus=2)
    (path,) = (file for file in tmp_path.glob("*/attempt-1/epochs.jsonl") if len(file.read_text().splitlines()) == 3)
    path.write_text(path.read_text().replace('"samples": 100', '"samples": null'))
    *of_one, over, alone = rows_of(tmp_path, HALF)
    facts = [(row["seed"], row["seeds"], row["runs"], row["reached"]) for row in (*of_one, over, alone)]
    assert facts == [(0, 1, 3, 3), (1, 1, 1, 1), (2, 1, 1, 0), (None, 3, 5, 4), (0, 1, 1, 1)]
    assert (over["measurement"], over["interval"]) == (None, "n=3, no 95 % CI")
    values = [over[f"{name}_to_target"] for name in ("epochs", "updates", "samples", "seconds")]
    assert values == [3, 30, None, 21.0], "of 1, 3 and never; the median of the five runs is 2"


def test_only_runs_with_the_metric_have_a_row(tmp_path):
    write_course(tmp_path, [0.6])
    write_course(tmp_path, [60.0], metric="val_perplexity_token", model="gpt2_small")
    assert [row["model"] for row in rows_of(tmp_path, HALF)] == ["resnet50"]


def test_columns_are_those_of_the_data_dictionary_and_every_row_has_all_of_them(tmp_path):
    for repeat in range(6):
        write_course(tmp_path / "results", [0.1, 0.6], repeat=repeat)
    tables = tables_of(tmp_path / "results")
    wanted = [HALF, Target("val_top1", 0.9)]
    names = [column.name for column in TARGETS]
    costs = [costs_of(tables, target) for target in wanted]
    assert [list(row) for cost in costs for row in cost.rows] == [names, names]
    tables.write(tmp_path, costs)
    reached, not_reached = (tmp_path / "targets.csv").read_text().splitlines()[1:]
    assert reached.startswith("val_top1=0.5,ddp,resnet50,native,sgd,1,32,0,")
    assert ",6,6,2.0,2.0,2.0,20.0,20.0,20.0,200.0,200.0,200.0,14.0,14.0,14.0," in reached
    assert f",6,0{',' * 13}" in not_reached
    tables.write(tmp_path)
    assert not (tmp_path / "targets.csv").exists(), "a report without targets has none of an earlier one"


def test_a_target_has_a_figure_of_seconds_and_one_of_epochs(tmp_path):
    for gpus in (1, 2):
        write_course(tmp_path, [0.2, 0.6], gpus=gpus)
    tables = tables_of(tmp_path)
    names = ("seconds_to_val_top1=0.5", "epochs_to_val_top1=0.5")
    figures = figures_of(tables, *names, targets=[costs_of(tables, HALF)])
    assert tuple(sorted(figures, reverse=True)) == names
    (axes,) = figures["seconds_to_val_top1=0.5"].axes
    assert [[1, 14], [2, 14]] in [line.get_xydata().tolist() for line in axes.lines]


def test_a_target_whose_metric_no_run_has_is_named(tmp_path, capsys):
    write_run(tmp_path, status="error", reason="boom")
    assert main([str(tmp_path), "--target", "val_top1=0.5"]) == 0
    warning = "--target val_top1=0.5: no reported run that ended ok has val_top1\n"
    assert f"warning: {warning}" in capsys.readouterr().err
    assert warning in (tmp_path / "report" / "tables" / "warnings.txt").read_text()


def test_runs_that_do_not_reach_a_target_are_counted(tmp_path, capsys):
    for seed, top1 in enumerate((0.4, 0.6, 0.6)):
        write_course(tmp_path, [0.2, top1], train={"seed": seed})
    assert main([str(tmp_path), "--target", "val_top1=0.5", "val_top1=0.9", "val_top1=0.1"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "--target" in line]
    assert said == [
        f"warning: --target val_top1={wanted} of 3 runs reach it (targets.csv)" for wanted in ("0.5: 2", "0.9: 0")
    ]


@pytest.mark.parametrize("text", ["val_top1", "val_top1=", "val_top1=high", "val_top1=nan", "epoch_time_s=3"])
def test_a_target_that_cannot_be_read_is_refused(text):
    with pytest.raises(UserError, match="METRIC=NUMBER"):
        target(text)


@pytest.mark.parametrize("text", ["val_top1=2", "val_top5=70", "val_top1=0", "val_loss=-1", "val_perplexity_word=0"])
def test_a_target_that_no_run_can_have_is_refused(text):
    with pytest.raises(UserError, match="is above 0"):
        target(text)
    assert target("val_top1=1").value == 1
    assert target("val_loss=70").value == 70
