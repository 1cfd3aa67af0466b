from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from ddlbench.errors import RunError, UserError
from ddlbench.files import unfinished_path
from ddlbench.heartbeat import Process
from ddlbench.measure.summary import summarize
from ddlbench.record.files import CLAIM, DEAD_CLAIM_S, HEARTBEAT, end_for_rank_0, write_json
from ddlbench.record.record import Record, run_id, writable
from tests.support.disk import fill_disk
from tests.support.epoch_rows import epoch_row
from tests.support.killed import ended_process
from tests.support.processes import small_disk

CONFIG = {group: {"name": f"my{group}"} for group in ("framework", "model", "loader")}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record.open(str(tmp_path), "run", {})


def status(record: Record) -> tuple[str, str | None]:
    content = json.loads((record.folder / "run.json").read_text())
    return content["status"], content["reason"]


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


def test_epochs_and_steps_are_written_and_the_first_end_counts(record: Record) -> None:
    record.epoch(epoch_row(0, 2, [1.0, 2.0], warmup=1, losses=[0.5, float("inf")]))
    record.epoch(epoch_row(1, 2, [1.0, 2.0]))
    lines = [json.loads(line) for line in (record.folder / "epochs.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1]
    assert lines[0]["train_loss"] is None
    assert sorted(pd.read_parquet(record.folder / "steps.parquet")["epoch"].unique()) == [0, 1]
    record.finish("diverged", "the loss")
    record.finish("ok")
    content = json.loads((record.folder / "run.json").read_text())
    assert (content["status"], content["reason"]) == ("diverged", "the loss")
    assert content["times"]["end"] >= content["times"]["start"]
    assert (record.folder / "steps.parquet").is_file()
    steps = pd.read_parquet(record.folder / "steps.parquet")
    assert steps[["epoch", "step"]].values.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert steps["loss"].isna().tolist() == [False, True, False, False]
    assert steps["warmup"].tolist() == [True, True, False, False]
    assert [path.name for path in record.folder.iterdir() if path.name.startswith(".")] == []


def test_epochs_of_an_earlier_attempt_come_first_and_say_whose_they_are(tmp_path: Path) -> None:
    first = Record.open(str(tmp_path), "run", {})
    first.epoch(epoch_row(0, 2, [1.0, 2.0]))
    second = Record.open(str(tmp_path), "run", {})
    second.resume({"attempt": 1, "epoch": 1}, first.lines())
    second.epoch(epoch_row(1, 2, [1.0, 2.0]))
    third = Record.open(str(tmp_path), "run", {})
    third.resume({"attempt": 2, "epoch": 2}, second.lines())
    assert third.content["loader"] == {"bad_samples": []}  # no attempt has any
    assert [(line["epoch"], line.get("measured_in_attempt")) for line in second.lines()] == [(0, 1), (1, None)]
    assert [(line["epoch"], line.get("measured_in_attempt")) for line in third.lines()] == [(0, 1), (1, 2)]
    assert json.loads((third.folder / "run.json").read_text())["resume"] == {"attempt": 2, "epoch": 2}
    assert [row.epoch for row in second.rows] == [1]  # the summary is of its own


def test_of_two_threads_that_finish_one_is_recorded(record: Record) -> None:
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(record.finish, ("killed", "error")))
    assert sorted(ended) == [False, True]
    assert status(record) == (("killed", "error")[ended.index(True)], None)


def test_an_unwritable_place_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"results_dir=.*file/results cannot be written \(Not a directory\)"):
        writable(str(tmp_path / "file" / "results"))
    with pytest.raises(UserError, match=r"File name too long"):
        writable(str(tmp_path / ("long" * 100)))
    writable(str(tmp_path / "new" / "results"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("no_folder", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_run_whose_folder_cannot_be_made_is_the_users_mistake(
    tmp_path: Path, no_folder: Callable[[Path], None]
) -> None:
    no_folder(tmp_path / "run")
    with pytest.raises(UserError, match=r"/run cannot be written \(File exists\): choose another results_dir="):
        Record.open(str(tmp_path), "run", {})


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1.5]}


def test_a_request_to_stop_that_comes_after_the_last_step_does_not_undo_a_complete_run(record: Record) -> None:
    assert record.finish("killed", "rank 0 received SIGTERM", final=False, ended_by="signal")
    assert record.finish("ok")
    assert status(record) == ("ok", None)


def test_after_an_end_that_is_not_final_a_better_reason_and_epochs_may_follow_but_no_success(record: Record) -> None:
    record.epoch(epoch_row(0, 2, [1.0, 2.0]))
    assert record.finish("killed", "a signal", final=False)
    assert status(record) == ("killed", "a signal")
    assert (record.folder / "steps.parquet").is_dir()
    assert not record.finish("ok")
    assert record.finish("error", "another rank ended")
    assert record.finish("killed", "too late") is False
    assert status(record) == ("error", "another rank ended")
    assert pd.read_parquet(record.folder / "steps.parquet")["epoch"].tolist() == [0, 0]


def test_rank_0_keeps_the_end_that_another_rank_recorded_for_it(record: Record) -> None:
    assert end_for_rank_0(record.folder, "timeout", "rank 0 is stopped")
    assert not end_for_rank_0(record.folder, "error", "second")
    record.save()
    assert not record.finish("ok")
    assert not record.finish("error", "rank 0 wakes up")
    assert status(record) == ("timeout", "rank 0 is stopped")
    assert json.loads((record.folder / "run.json").read_text())["times"]["end"] is not None


def test_a_process_that_was_killed_while_it_wrote_the_end_does_not_keep_others_from_it(record: Record) -> None:
    """Between its claim and the rename of run.json."""
    (record.folder / CLAIM).touch()
    (record.folder / ".run.json.4711").write_text('{"status": "kil')
    assert not end_for_rank_0(record.folder, "killed", "it may still be at it")
    past = time.time() - DEAD_CLAIM_S - 1
    os.utime(record.folder / CLAIM, (past, past))
    assert end_for_rank_0(record.folder, "killed", "no process is left", "2026-01-01T10:00:00.000+00:00")
    assert status(record) == ("killed", "no process is left")
    content = json.loads((record.folder / "run.json").read_text())
    assert content["times"]["end"] == "2026-01-01T10:00:00.000+00:00"


def test_a_node_whose_clock_is_wrong_does_not_end_a_record_twice(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record.folder / CLAIM).touch()  # another rank writes the end at this moment
    ahead = time.time() + 10 * DEAD_CLAIM_S
    monkeypatch.setattr(time, "time", lambda: ahead)
    assert not end_for_rank_0(record.folder, "killed", "by the clock of this node nobody is left")


def test_what_a_killed_run_was_writing_is_removed_with_its_end_and_not_looked_for_before(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    here = unfinished_path(path, tmp_path).name.split("~")
    here[-2] = str(ended_process().pid)
    leftover = tmp_path / "~".join(here)
    leftover.write_text("half")
    write_json(path, {"status": "running", "times": {}})
    assert leftover.exists()
    assert end_for_rank_0(tmp_path, "killed", "its processes have ended")
    assert not leftover.exists()


def test_a_heartbeat_is_there_until_the_end_is_on_disk(record: Record) -> None:
    assert json.loads((record.folder / HEARTBEAT).read_text()) == vars(Process.this())
    record.finish("error", "a better reason may follow", final=False)
    assert (record.folder / HEARTBEAT).exists()
    record.finish("error", "this one")
    assert not (record.folder / HEARTBEAT).exists()
    assert not record.heartbeat or not record.heartbeat.path.exists()


def test_an_ended_record_is_not_ended_again(tmp_path: Path, record: Record) -> None:
    record.finish("ok")
    assert not end_for_rank_0(record.folder, "error", "late")
    assert not end_for_rank_0(tmp_path / "nowhere", "error", "not reachable from here")
    assert status(record) == ("ok", None)


def test_a_full_disk_has_room_for_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path, 2**21) as disk:
        record = Record.open(str(disk), "run", {})
        record.epoch(epoch_row(0, 3, [1.0, 2.0]))
        fill_disk(disk)
        with pytest.raises(RunError, match=r"the record in .* cannot be written \(No space left on device\)"):
            record.epoch(epoch_row(1, 3, [1.0, 2.0]))
        assert record.finish("error", "the disk is full")
        assert status(record) == ("error", "the disk is full")
        assert pd.read_parquet(record.folder / "steps.parquet")["epoch"].unique().tolist() == [0]
        assert [path.name for path in record.folder.rglob(".*")] == []
        with pytest.raises(UserError, match=r"attempt-2 cannot be written \(No space left on device\)"):
            Record.open(str(disk), "run", {})
        assert [path.name for path in record.folder.parent.iterdir()] == ["attempt-1"]
    assert capsys.readouterr().err == ""


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path, record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(tmp_path / "run")
    assert not record.finish("error", "why it ended")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ddlbench: the end cannot be recorded in {record.folder} (No such file or directory)")
    assert line.endswith("error: why it ended")


def test_the_rows_of_a_long_run_hold_no_ranks(record: Record) -> None:
    """A thousand epochs of a thousand ranks would fill the memory; the summary stays what it was."""
    kept = [epoch_row(epoch, 2, [1.0, 2.0 + epoch]) for epoch in range(2)]
    expected = summarize(kept, world_size=1, tokens_per_sample=None)
    for row in kept:
        record.epoch(row)
    assert [row.ranks for row in record.rows] == [[], []]
    assert summarize(record.rows, world_size=1, tokens_per_sample=None) == expected
    assert "slowest_s" not in record.rows[0].line()
