"""--by with several factors, and --across: rows that differ in named settings share a table and a base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddlbench.config.compose import configuration
from ddlbench.errors import UserError
from ddlbench.figures.panels import panels
from ddlbench.report.fastest import best, comparisons
from ddlbench.results.tables.merge import SEEN, AttemptRow, Comparison, measured_options
from ddlbench.sweep.study import load
from tests.support.records import tables_of, write_repeats, write_run

Rows = dict[tuple[str, int], dict[str, Any]]
ADAMW: dict[str, Any] = {"recipe": {"name": "adamw"}, "train": {"precision": "bf16"}}


def rows_of(folder: Path, **how: Any) -> Rows:
    return {(row["framework"], row["gpus"]): row.row for row in tables_of(folder, **how).scaling_rows}


def two_recipes(folder: Path, repeats: int = 1) -> None:
    """ddp with sgd in fp32 on 1 and 2 GPUs, 100 and 160 samples/s; fsdp the same on 2, 150 samples/s; zero2 with adamw
    in bf16 on 1 and 2, 125 and 240 samples/s."""
    for repeat in range(repeats):
        more = 1 + repeat / 1000
        for gpus, rate in ((1, 100.0), (2, 160.0)):
            write_run(folder, framework="ddp", gpus=gpus, rate=rate * more, repeat=repeat)
        write_run(folder, framework="fsdp", gpus=2, rate=150 * more, repeat=repeat)
        for gpus, rate in ((1, 125.0), (2, 240.0)):
            write_run(folder, framework="zero2", gpus=gpus, rate=rate * more, repeat=repeat, **ADAMW)


def test_rows_across_settings_share_the_fastest_single_gpu_and_say_what_differs(tmp_path: Path) -> None:
    two_recipes(tmp_path)
    rows = rows_of(tmp_path, across=["recipe", "precision", "data"])  # no row differs in data
    assert len({row["comparison"] for row in rows.values()}) == 1
    assert {row["across"] for (name, _), row in rows.items() if name == "zero2"} == {"precision=bf16 recipe=adamw"}
    assert {row["across"] for (name, _), row in rows.items() if name != "zero2"} == {"precision=fp32 recipe=sgd"}
    for name, speedup in (("ddp", 1.28), ("fsdp", 1.2), ("zero2", 1.92)):  # over 125 samples/s
        assert rows[name, 2]["speedup"] == pytest.approx(speedup)
        assert rows[name, 2]["best_single_compared"] == "zero2"
        assert rows[name, 2]["best_single_across"] == "precision=bf16 recipe=adamw"
    assert rows["ddp", 2]["speedup_vs_own_base"] == pytest.approx(1.6)
    assert rows["zero2", 2]["speedup_vs_own_base"] == pytest.approx(1.92)


def test_recipes_of_one_name_are_told_apart_by_their_keys(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        write_run(tmp_path, recipe={"lr": rate}, rate=100 * rate)
    rows = tables_of(tmp_path, across=["recipe"]).scaling_rows
    assert sorted(row["across"] for row in rows) == ["recipe.lr=0.1", "recipe.lr=0.2"]
    assert len({row["comparison"] for row in rows}) == 1


def test_a_verdict_is_given_only_between_rows_that_are_equal_but_for_the_compared_factor(tmp_path: Path) -> None:
    two_recipes(tmp_path, repeats=6)
    rows = rows_of(tmp_path, across=["recipe", "precision"])
    assert {name: rows[name, 2]["speedup_verdict"] for name in ("ddp", "fsdp", "zero2")} == {
        "ddp": None, "fsdp": None, "zero2": "speedup",
    }  # fmt: skip
    assert rows["ddp", 2]["speedup_low"] is not None  # the number stays
    assert rows["ddp", 2]["speedup_vs_own_base_verdict"] == "speedup"
    measured = tables_of(tmp_path, across=["recipe", "precision"]).measurements
    ((paragraph,), _) = best(measured)
    assert paragraph[0].endswith("rows differ in precision, recipe")
    assert paragraph[1][1] == (
        "On 2 GPUs, 64 samples an update: zero2 (bf16 adamw) has the shortest median time, 4.16 ms a sample (240.6 "
        "samples/s), 1.5 times as fast as ddp (fp32 sgd); no verdict, because they differ in more than the framework."
    )
    said = " ".join(comparisons(measured))
    assert "zero2 (bf16 adamw) is" in said  # over its own single GPU
    assert "ddp (fp32 sgd): speedup 1.28 without a verdict" in said
    assert "fsdp (fp32 sgd) took 4.16 ms and 6.65 ms a sample: no verdict" in said


def test_weak_and_strong_scaling_share_a_panel_where_scaling_is_named(tmp_path: Path) -> None:
    """ddp at 32 samples a GPU, pipedream at 32 samples an update; on 1 GPU their batches are equal."""
    for gpus in (1, 2, 4):
        write_run(tmp_path, framework="ddp", gpus=gpus, rate=90.0 * gpus, per_gpu=32)
        write_run(tmp_path, framework="pipedream", gpus=gpus, rate=100.0 * gpus, per_gpu=None, global_batch=32)
    rows = rows_of(tmp_path, across=["scaling"])
    assert len(rows) == len(tables_of(tmp_path, across=["scaling"]).scaling_rows) == 6  # each once
    assert {key: row["across"] for key, row in rows.items()} == {
        (name, gpus): f"scaling={kind}"
        for name, kind in (("ddp", "weak"), ("pipedream", "strong"))
        for gpus in (1, 2, 4)
    }
    assert rows["ddp", 4]["speedup"] == pytest.approx(3.6)  # over pipedream's 100 samples/s
    assert rows["ddp", 4]["speedup_vs_own_base"] == pytest.approx(4)
    (panel,) = panels(tables_of(tmp_path, across=["scaling"]).measurements)
    assert "rows differ in scaling" in panel.lines
    assert list(panel.curves) == ["pipedream (strong)", "ddp (weak)"]


def test_no_verdict_between_batches_of_weak_and_strong_scaling(tmp_path: Path) -> None:
    """The best single GPU has 32 samples an update; pipedream has 64, ddp 32 a GPU."""
    for gpus in (1, 2):
        write_repeats(tmp_path, *[100.0 * gpus] * 6, gpus=gpus)
        per = {"per_gpu": None, "global_batch": 64}
        write_repeats(tmp_path, *[80.0 * gpus] * 6, framework="pipedream", gpus=gpus, **per)
    rows = rows_of(tmp_path, across=["scaling"])
    assert rows["pipedream", 2]["best_single_compared"] == "ddp"
    assert rows["pipedream", 2]["speedup_verdict"] is None
    assert rows["pipedream", 2]["speedup"] == pytest.approx(1.6)
    assert rows["ddp", 2]["speedup_verdict"] == "speedup"


def test_an_own_base_has_the_same_settings_across_which_rows_are_compared(tmp_path: Path) -> None:
    for precision, rates in (("fp32", (100.0, 160.0)), ("bf16", (200.0, 380.0))):
        for gpus, rate in zip((1, 2), rates, strict=True):
            write_run(tmp_path, gpus=gpus, rate=rate, train={"precision": precision})
    rows = tables_of(tmp_path, across=["precision"]).scaling_rows
    speedups = {
        (row["precision"], row["gpus"]): (row["speedup"], row["speedup_vs_own_base"]) for row in rows if row["gpus"] > 1
    }
    assert speedups["fp32", 2] == pytest.approx((0.8, 1.6))
    assert speedups["bf16", 2] == pytest.approx((1.9, 1.9))


def test_several_factors_are_compared_at_once(tmp_path: Path) -> None:
    for framework in ("ddp", "horovod"):
        for loader, rate in (("native", 100.0), ("dali", 130.0)):
            write_run(tmp_path, framework=framework, loader=loader, rate=rate)
    tables = tables_of(tmp_path, by="framework,loader")
    (panel,) = panels(tables.measurements)
    assert sorted(panel.curves) == ["ddp, dali", "ddp, native", "horovod, dali", "horovod, native"]
    assert {row["compared_by"] for row in tables.scaling_rows} == {"framework, loader"}
    assert len(panels(tables_of(tmp_path).measurements)) == 2


def test_a_key_that_all_runs_have_with_the_value_of_earlier_behavior_is_a_setting(tmp_path: Path) -> None:
    write_run(tmp_path, sections={"config_added_later": {"train.offload_activations": False}})
    (row,) = tables_of(tmp_path, across=["train.offload_activations"]).scaling_rows
    assert not row["across"]


@pytest.mark.parametrize("name", ["", "recip", "framework", "loader"])
def test_a_setting_that_no_run_has_is_named(tmp_path: Path, name: str) -> None:
    write_run(tmp_path)
    with pytest.raises(UserError, match=f"--across {name}: "):
        tables_of(tmp_path, across=[name])


@pytest.mark.parametrize(
    ("study", "how", "curves"),
    [
        ("lin2022", Comparison(across=("recipe", "precision", "data", "scaling", "model.tie_weights")), [4, 4, 6, 6]),
        ("aach2023", Comparison(("framework", "loader"), ("data",)), [9, 9, 9]),
    ],
)
def test_the_rows_of_a_papers_figure_share_one_table_for_each_model(
    study: str, how: Comparison, curves: list[int]
) -> None:
    """The curves of Lin's figures 4 to 12 and Aach's 3b and 7: all frameworks, with DALI on either device."""
    tables = dict[str, set[str]]()
    loaded = load(study)
    for point in loaded.points():
        config = configuration(*loaded.words(point)).identity()
        run = AttemptRow(dict.fromkeys(SEEN) | {"dataset_hash": config["data"]["name"]}, measured_options(config))
        key = f"{point['framework']} {point.get('loader')} {point.get('loader.device')}"
        tables.setdefault(how.comparison_id(run), set()).add(key)
    assert sorted(map(len, tables.values())) == curves
