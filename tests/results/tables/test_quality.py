"""Loss and accuracy over seeds, by hand."""

from __future__ import annotations

import json

import pytest

from ddlbench.record.schema import LEARNING
from ddlbench.results.tables.tables import records
from tests.support.records import tables_of, write_run


def run(results, seed, top1, repeat=0, **others):
    folder = write_run(results, repeat=repeat, train={"seed": seed}, epochs=2, **others)
    lines = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["val_top1"] = None if top1 is None else top1 + 0.1 * number
    (folder / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def learning(results):
    return records(tables_of(results).learning)


def test_seeds_are_merged_for_quality_and_repeats_of_a_seed_count_once(tmp_path):
    for repeat in range(3):
        run(tmp_path, seed=0, top1=0.5, repeat=repeat)
    run(tmp_path, seed=1, top1=0.2)
    run(tmp_path, seed=2, top1=0.3)
    first, second = learning(tmp_path)
    assert (first["seeds"], first["runs"]) == (3, 5)
    # 0.5, 0.2, 0.3; with every repeat counted the median would be 0.5
    assert (first["val_top1"], first["val_top1_min"], first["val_top1_max"]) == (0.3, 0.2, 0.5)
    assert (second["epoch"], second["val_top1"]) == (1, pytest.approx(0.4))
    assert (first["val_top1_low"], first["val_perplexity_token"]) == (None, None)
    assert (first["framework"], first["gpus"], first["global_batch"]) == ("ddp", 1, 32)


def test_a_seed_is_the_median_of_its_repeats_that_ended_ok(tmp_path):
    """Seed 0: 0.1, 0.9 and 0.4, and 0.95 of a run that was killed; seed 1: 0.2; seed 2: not known."""
    for repeat, (top1, rate) in enumerate(((0.1, 1024.0), (0.9, 512.0), (0.4, 256.0))):
        run(tmp_path, seed=0, top1=top1, repeat=repeat, rate=rate)
    folder = run(tmp_path, seed=0, top1=0.95, repeat=3, rate=1.0)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"status": "killed"}))
    run(tmp_path, seed=1, top1=0.2, rate=16.0)
    run(tmp_path, seed=2, top1=None, rate=128.0)
    first, _ = learning(tmp_path)
    result = [first[f"val_top1{end}"] for end in ("", "_min", "_max", "_low", "_high")]
    assert result == [pytest.approx(0.3), 0.2, 0.4, None, None]
    assert (first["runs"], first["seeds"]) == (5, 3)
    assert first["elapsed_s"] == 6.0, "2 s and 1, 2, 4, 8 or 64 s: the median of the five runs"


def test_an_interval_is_that_of_the_seeds_with_a_value(tmp_path):
    for seed, top1 in enumerate((0.11, 0.12, 0.13, 0.14, 0.15, 0.16, None)):
        run(tmp_path, seed=seed, top1=top1)
    first, _ = learning(tmp_path)
    result = [first[f"val_top1{end}"] for end in ("", "_low", "_high")]
    assert result == [pytest.approx(0.135), 0.11, 0.16]
    assert (first["val_loss_low"], first["val_loss_high"]) == (2.2, 2.2)


def test_times_of_other_seeds_are_other_measurements(tmp_path):
    run(tmp_path, seed=0, top1=0.5)
    run(tmp_path, seed=1, top1=0.2)
    tables = tables_of(tmp_path)
    assert list(tables.scaling["runs_ok"]) == [1, 1]
    assert tables.runs["learning"].nunique() == 1


def test_six_seeds_have_an_interval(tmp_path):
    for seed in range(6):
        run(tmp_path, seed=seed, top1=0.1 * (seed + 1))
    first, _ = learning(tmp_path)
    assert first["val_top1"] == pytest.approx(0.35)
    assert (first["val_top1_low"], first["val_top1_high"]) == (pytest.approx(0.1), pytest.approx(0.6))


def test_what_differs_in_more_than_the_seed_is_another_curve(tmp_path):
    run(tmp_path, seed=0, top1=0.5)
    run(tmp_path, seed=1, top1=0.5, framework="fsdp")
    run(tmp_path, seed=1, top1=0.5, gpus=2)
    assert [row["seeds"] for row in learning(tmp_path)] == [1] * 6


def test_no_run_is_an_empty_table(tmp_path):
    write_run(tmp_path, status="oom")
    table = tables_of(tmp_path).learning
    assert (len(table), list(table)) == (0, [column.name for column in LEARNING])
