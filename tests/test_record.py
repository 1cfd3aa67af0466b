from __future__ import annotations

import json
import threading
from pathlib import Path

import pandas as pd
import pytest

from ddlbench.errors import UserError
from ddlbench.results.record import Record, run_id, writable, write_json
from tests.test_summary import epoch_row

CONFIG = {group: {"name": f"my{group}"} for group in ("framework", "model", "loader")}


def test_run_id_is_a_pure_function_of_what_is_measured() -> None:
    first = run_id(CONFIG, 2, 1, "abc")
    assert first == run_id(dict(reversed(CONFIG.items())), 2, 1, "abc")
    assert first.startswith("myframework-mymodel-myloader-2x-")
    others = [run_id(CONFIG, 4, 1, "abc"), run_id(CONFIG, 2, 2, "abc"), run_id(CONFIG, 2, 1, "abd")]
    assert len({first, *others}) == 4


def test_attempts_count_up_and_start_as_running(tmp_path: Path) -> None:
    for number in (1, 2):
        record = Record.open(str(tmp_path), "run", {"launch": {}})
        content = json.loads((tmp_path / "run" / f"attempt-{number}" / "run.json").read_text())
        assert (content["attempt"], content["status"], content["times"]["end"]) == (number, "running", None)
        assert record.folder.name == f"attempt-{number}"


def test_epochs_and_steps_are_written_and_the_first_end_counts(tmp_path: Path) -> None:
    record = Record.open(str(tmp_path), "run", {})
    record.epoch(epoch_row(0, 2, [1.0, 2.0], warmup=1, losses=[0.5, float("inf")]))
    record.epoch(epoch_row(1, 2, [1.0, 2.0]))
    lines = [json.loads(line) for line in (record.folder / "epochs.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1]
    assert lines[0]["train_loss"] is None
    assert not (record.folder / "steps.parquet").exists()
    record.finish("diverged", "the loss")
    record.finish("ok")
    content = json.loads((record.folder / "run.json").read_text())
    assert (content["status"], content["reason"]) == ("diverged", "the loss")
    assert content["times"]["end"] >= content["times"]["start"]
    steps = pd.read_parquet(record.folder / "steps.parquet")
    assert steps[["epoch", "step"]].values.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert steps["loss"].isna().tolist() == [False, True, False, False]
    assert steps["warmup"].tolist() == [True, True, False, False]
    assert [path.name for path in record.folder.iterdir() if path.name.startswith(".")] == []


def test_of_two_threads_that_finish_one_is_recorded(tmp_path: Path) -> None:
    record = Record.open(str(tmp_path), "run", {})
    threads = [threading.Thread(target=record.finish, args=(status,)) for status in ("killed", "error")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((record.folder / "run.json").read_text())["status"] in ("killed", "error")


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1.5]}


def test_an_unwritable_place_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"results_dir=.*file/results cannot be written \(Not a directory\)"):
        writable(str(tmp_path / "file" / "results"))
    with pytest.raises(UserError, match=r"File name too long"):
        writable(str(tmp_path / ("long" * 100)))
    writable(str(tmp_path / "new" / "results"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
