"""mode=loader: the loader alone has a record and rows as any run, and is never compared with training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ddlbench.figures.panels import panels
from ddlbench.record.record import run_id
from ddlbench.report.__main__ import main as report
from ddlbench.report.fastest import comparisons
from ddlbench.report.overview import summary_text
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import Tables, make_tables, records
from tests.support.faults import end, start
from tests.support.pictures import write_folders
from tests.support.runs import GPT2, RESNET, composed, record

NEW = ("cpu_share", "read_bytes_per_s")
OF_TRAINING = ("train_loss", "val_loss", "updates", "lr_first", "parameters", "mfu", "model_flops_per_s_per_gpu")


def images(folder: Path) -> list[str]:
    write_folders(folder / "images", train=4, val=3)
    return [*RESNET, "data=imagenet", f"data.root={folder}/images"]


def tables(folder: Path) -> Tables:
    return make_tables(read_all([folder / "results"]))


@pytest.mark.parametrize("workers", [0, 2])
def test_image_folders(ddlbench, tmp_path: Path, workers: int) -> None:
    alone = [*images(tmp_path), f"loader.workers={workers}", "mode=loader", "train.epochs=2", "train.steps=null"]
    code, said = ddlbench(*alone)
    assert code == 0, said
    content = record(tmp_path)
    assert content["status"] == "ok"
    assert content["run_id"].startswith("loader-single-")
    assert (content["ledger"]["samples"], content["summary"]["val_samples"]) == (24, 9)
    made = tables(tmp_path)
    (row,) = records(made.runs)
    assert row["mode"] == "loader"
    assert row["throughput_samples_per_s"] > 0
    assert row["cpu_share"] >= 0  # such an epoch may be shorter than a tick
    assert all(row[name] is None for name in OF_TRAINING)
    (merged,) = records(made.scaling)
    assert [merged[name] for name in NEW] == [row[name] for name in NEW]
    first, last = records(made.epochs)
    stored = sum(file.stat().st_size for file in (tmp_path / "images" / "train").rglob("*.JPEG"))
    assert all(epoch["read_bytes"] >= stored for epoch in (first, last))  # a starting worker reads more than images
    assert row["cpu_share"] == pytest.approx(last["cpu_time_s"] / last["epoch_time_s"])
    assert row["read_bytes_per_s"] == pytest.approx(last["read_bytes"] / last["epoch_time_s"])
    assert 0 < row["data_wait_share"] <= 1
    assert "loss" not in said
    assert "no model" in said
    (path,) = tmp_path.glob("results/*/attempt-1/steps.parquet")
    steps = pq.read_table(path).to_pylist()
    assert len(steps) == 2 * 3
    for step in steps:
        assert (step["loss"], step["lr"]) == (None, None)
        assert 0 < step["data_wait_s"] <= step["step_time_s"] < step["data_wait_s"] + 0.5, "a step waits for its batch"


def test_bytes_of_text_are_counted_where_it_is_tokenized_on_the_fly_and_not_where_tokens_are_mapped(
    ddlbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of every window are asked for, and the comparison is another than that of mapped tokens."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})  # one core for the rank, the others for workers
    text = [*GPT2, "model.seq_len=32", "data.val_limit=3", "train.steps=40", "train.epochs=2", "mode=loader"]
    for tokenize in ("ahead", "on_the_fly"):
        code, said = ddlbench(*text, f"data.tokenize={tokenize}")
        assert code == 0, said
    made = tables(tmp_path)
    rows = {json.loads(row["loader_facts"])["workers"]: row for row in records(made.runs)}
    assert sorted(rows) == [0, 2]
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(32 * row["throughput_samples_per_s"])
        assert row["cpu_share"] >= 0
        assert row["val_samples"] == 3
    assert rows[0]["read_bytes_per_s"] is None
    _, last = (epoch for epoch in records(made.epochs) if epoch["read_bytes"] is not None)
    windows = 40 * 2
    assert windows * 32 < last["read_bytes"] < windows * 32 * 40  # a token has about 4 bytes, and lines are read whole
    assert rows[2]["dataset_hash"] == rows[0]["dataset_hash"]
    assert len({row["comparison"] for row in records(made.scaling)}) == 2


def test_the_synthetic_loader_reads_nothing(ddlbench, tmp_path: Path) -> None:
    """What the measurement itself reads, divided by its short epochs, would be megabytes a second."""
    code, said = ddlbench(*images(tmp_path), "loader=synthetic", "mode=loader", "train.epochs=2")
    assert code == 0, said
    made = tables(tmp_path)
    assert [row["read_bytes"] for row in records(made.epochs)] == [None, None]
    assert records(made.runs)[0]["read_bytes_per_s"] is None


def test_training_beside_it_is_another_comparison(ddlbench, tmp_path: Path) -> None:
    """Its columns stay empty, and neither is the other's base."""
    both = [*images(tmp_path), "loader.workers=0", "train.validate=false"]
    for mode in ("train", "loader"):
        code, said = ddlbench(*both, f"mode={mode}")
        assert code == 0, said
    made = tables(tmp_path)
    rows = {row["mode"]: row for row in records(made.scaling)}
    assert len({row["comparison"] for row in rows.values()}) == 2
    assert rows["train"]["read_bytes_per_s"] is None
    assert [row["val_samples"] for row in records(made.runs)] == [None, None]
    assert [row["speedup_vs_own_base"] for row in rows.values()] == [1, 1]
    assert comparisons(made.measurements) == []
    header, _, *lines = summary_text(made.measurements).splitlines()
    assert "mode" in header.split()
    assert [line.split()[3] for line in lines[:2]].count("loader") == 1
    modes = {panel.lines[1].rpartition(", ")[2] for panel in panels(made.measurements)}
    assert modes == {"train", "loader alone"}
    assert report([str(tmp_path / "results")]) == 0


def test_several_ranks_read_each_their_share(tmp_path: Path) -> None:
    words = [word for word in images(tmp_path) if not word.startswith("+")]
    words += ["loader=native", "loader.workers=1", "mode=loader", "train.validate=true"]
    codes, said = end(start(tmp_path / "results", "none", *words))
    assert codes == [0, 0], said
    content = record(tmp_path)
    assert (content["ledger"]["samples"], content["ledger"]["replica_batch"]) == (8, 2)
    assert content["summary"]["val_samples"] == 9
    assert content["summary"]["cpu_share"] >= 0
    assert not {"own_step_s", "straggler_rank"} & set(content["summary"]), "no rank has a step of its own"


def test_the_mode_is_part_of_what_is_measured_and_changes_no_training_run() -> None:
    train, alone = (composed(*RESNET, *words).identity() for words in ([], ["mode=loader"]))
    assert train == alone | {"mode": "train"}
    assert run_id(train, 1, 1, "x") != run_id(alone, 1, 1, "x").removeprefix("loader-")
    plain: dict[str, Any] = {group: {"name": group} for group in ("framework", "model", "loader")} | {"mode": "train"}
    assert run_id(plain, 1, 1, "x") == "framework-model-loader-1x-4bc83ca9"


def test_another_layout_is_a_row_that_says_so(ddlbench, tmp_path: Path) -> None:
    words = [word for word in images(tmp_path) if word != "+framework=single"]
    code, said = ddlbench(*words, "+framework=gpipe", "mode=loader")
    assert code == 3
    assert "Traceback" not in said
    failed = record(tmp_path)
    assert failed["status"] == "unsupported"
    assert failed["reason"] == (
        "mode=loader reads on every rank as single and ddp do, not as gpipe: choose +framework=ddp"
    )
