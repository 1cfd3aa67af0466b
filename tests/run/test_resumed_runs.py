"""Whole runs that are killed and continued by another attempt."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddlbench.checkpoint import Saved
from ddlbench.errors import Failure
from ddlbench.heartbeat import Process
from ddlbench.ranks.boundary import Boundary, StopRequest
from ddlbench.results.tables.run_rows import run_row
from ddlbench.run.checkpoints import Checkpoints
from tests.support.disk import no_space
from tests.support.faults import end, start
from tests.support.records import attempts_of
from tests.support.runs import SMALL, epochs, record
from tests.support.waiting import wait_until

# A step takes half a second. The framework's planted fault is part of what is measured: the same in all attempts.
WORDS = (
    "slow", "train.epochs=4", "train.steps=2", "train.validate=true", "data.val_limit=8", "checkpoint.every=1",
    "recipe.optimizer.momentum=0.9",
)  # fmt: skip
SAME = ("epoch", "train_loss", "val_loss", "val_top1", "lr_last", "updates", "samples")


def killed_after_two_epochs(folder: Path) -> None:
    processes = start(folder, *WORDS)
    try:
        wait_until(lambda: list(folder.glob("*/checkpoints-1/epoch-000002")))
    finally:
        for process in processes:
            process.kill()
        end(processes)


@pytest.mark.slow
def test_an_attempt_continues_one_that_was_killed(tmp_path: Path) -> None:
    codes, said = end(start(tmp_path / "whole", *WORDS))
    assert codes == [0, 0], said
    killed_after_two_epochs(tmp_path / "cut")
    before = epochs(tmp_path / "cut")
    codes, said = end(start(tmp_path / "cut", *WORDS, "checkpoint.resume=true"))
    assert codes == [0, 0], said
    whole, resumed = epochs(tmp_path / "whole"), epochs(tmp_path / "cut", 2)
    assert [{key: line.get(key) for key in SAME} for line in resumed] == [
        {key: line.get(key) for key in SAME} for line in whole
    ]
    content = record(tmp_path / "cut", 2)
    first = content["resume"]["epoch"]
    assert first in (2, 3)
    assert [line.get("measured_in_attempt") for line in resumed] == [1] * first + [None] * (4 - first)
    assert [line["epoch_time_s"] for line in resumed[:first]] == [line["epoch_time_s"] for line in before[:first]]
    assert resumed[first]["elapsed_s"] > resumed[first - 1]["elapsed_s"]
    summary, ledger = content["summary"], content["ledger"]
    assert (summary["epochs_done"], ledger["samples"], ledger["updates"], ledger["skipped_updates"]) == (4, 32, 8, 0)
    assert summary["epochs_measured"] == 4 - first - (first < 3)  # its own, the first of several left out
    assert not list((tmp_path / "cut").glob("*/checkpoints-*"))  # nothing is left to continue
    assert not list((tmp_path / "whole").glob("*/checkpoints-*"))


def test_the_columns_say_what_saving_took_and_where_a_run_continued(tmp_path: Path, ddlbench) -> None:
    words = [*SMALL, "train.epochs=3", "checkpoint.every=1", "progress=false", f"results_dir={tmp_path}/results"]
    assert ddlbench(*words)[0] == 0
    (attempt,) = attempts_of(tmp_path / "results")
    row = run_row(attempt, [])
    seconds = attempt.record["checkpoints"]["seconds"]
    assert row["checkpoints"] == len(seconds) == 2
    assert row["checkpoint_s"] == pytest.approx(sum(seconds) / 2)
    assert row["checkpoint_bytes"] > 4 * row["parameters"]
    assert row["resumed_attempt"] is row["resumed_epoch"] is row["resumed_updates"] is row["resume_s"] is None


def test_checkpoints_may_lie_elsewhere(tmp_path: Path, ddlbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "_remove_all", lambda _: None)
    monkeypatch.setenv("SCRATCH", f"{tmp_path}/scratch")
    words = [*SMALL, "train.epochs=3", "checkpoint.every=1", "checkpoint.dir=$SCRATCH/saved"]
    assert ddlbench(*words)[0] == 0
    assert len(list(tmp_path.glob("scratch/saved/*/checkpoints-1/epoch-*"))) == 2
    assert not list(tmp_path.glob("results/*/checkpoints-*"))
    assert ddlbench(*words, "checkpoint.resume=true")[0] == 0
    assert record(tmp_path, 2)["resume"]["epoch"] == 2
    code, said = ddlbench(*SMALL, "checkpoint.every=1", "checkpoint.dir=/proc/nowhere")
    assert code == 2
    assert "checkpoint.dir=/proc/nowhere cannot be written" in said


def test_checkpoints_of_an_attempt_whose_record_is_elsewhere_are_continued_or_refused(
    tmp_path: Path, ddlbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both attempts have the number 1. The damaged checkpoint is written again. A run that ends well removes its
    checkpoints; these stay as after a crash."""
    monkeypatch.setattr(Checkpoints, "_remove_all", lambda _: None)
    words = [*SMALL, "train.epochs=3", "checkpoint.every=1", f"checkpoint.dir={tmp_path}/saved", "progress=false"]
    assert ddlbench(*words)[0] == 0
    shutil.rmtree(tmp_path / "results")
    code, said = ddlbench(*words)
    assert code == 2
    assert "checkpoints-1 has checkpoints of an attempt whose record is elsewhere: continue it with" in said
    shutil.rmtree(tmp_path / "results")
    (damaged,) = tmp_path.glob("saved/*/checkpoints-1/epoch-000002/*.distcp")
    size = damaged.stat().st_size
    damaged.write_bytes(b"")
    code, said = ddlbench(*words, "checkpoint.resume=true")
    assert code == 0, said
    assert record(tmp_path)["resume"]["epoch"] == 1
    assert damaged.stat().st_size == size


def test_there_may_be_nothing_to_continue(ddlbench) -> None:
    """As at the first start of a job that would be requeued."""
    code, said = ddlbench(*SMALL, "checkpoint.every=1", "checkpoint.resume=true")
    assert code == 0, said
    assert "begins at epoch 0: " in said
    assert "has no checkpoint (a run that ends well removes its own" in said


def test_an_interrupted_run_says_how_to_continue(tmp_path: Path, ddlbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to itself in epoch 1 stands for the user's; the run continues where the line says."""
    begun = Boundary.begin

    def interrupted(boundary: Boundary, epoch: int, steps: int) -> None:
        if epoch == 1:
            asked: Any = boundary.stop
            stop: StopRequest = asked.__self__  # the supervisor's
            stop.decide(stop.announce(Failure("killed", "rank 0 received SIGINT", 130, 0)) + 1)
        begun(boundary, epoch, steps)

    words = [*SMALL, "train.epochs=3", "progress=true"]
    monkeypatch.setattr(Boundary, "begin", interrupted)
    for more, line in (
        ([], "nothing was saved: with checkpoint.every=1 a run saves itself after each epoch"),
        (["checkpoint.every=2"], "no epoch was saved before the interruption: the same command begins at epoch 0"),
        (["checkpoint.every=1"], "to continue with epoch 1: the same command with checkpoint.resume=true"),
    ):
        code, said = ddlbench(*words, *more)
        assert code == 130
        assert "rank 0 received SIGINT; stopped before epoch 1" in said
        assert f"ddlbench: {line}" in said
    monkeypatch.setattr(Boundary, "begin", begun)
    code, said = ddlbench(*words, "checkpoint.every=1", "checkpoint.resume=true")
    assert code == 0, said
    assert f"of {record(tmp_path, 2)['run_id']} with epoch 1 of 3" in said
    assert "to continue" not in said


def test_what_a_killed_attempt_was_writing_goes_with_the_run_that_ends_well(tmp_path: Path, ddlbench) -> None:
    """Attempts 1 and 2 were killed while they wrote a checkpoint; attempt 4, of another process, is still writing."""
    words = [*SMALL, "train.epochs=3", "checkpoint.every=1", "progress=false"]
    assert ddlbench(*words)[0] == 0
    (run,) = tmp_path.glob("results/*")
    for attempt, name, lives in ((1, ".epoch-000001", False), (2, ".epoch-000002", False), (4, ".epoch-000001", True)):
        (run / f"checkpoints-{attempt}" / name).mkdir(parents=True)
        (run / f"checkpoints-{attempt}" / name / "__0_0.distcp").write_bytes(b"half")
        (run / f"attempt-{attempt}").mkdir(exist_ok=True)
        process = Process.this() if lives else replace(Process.this(), pid=2**22 + 1)
        (run / f"attempt-{attempt}" / ".heartbeat").write_text(json.dumps(vars(process)))
    assert ddlbench(*words, "checkpoint.resume=true")[0] == 0
    assert [path.name for path in run.glob("checkpoints-*")] == ["checkpoints-4"]
    assert list(run.glob("checkpoints-4/.epoch-000001/*"))


@pytest.fixture
def words(ddlbench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run of four epochs whose checkpoints are there, as if it had been killed at its end."""
    monkeypatch.setattr(Checkpoints, "_remove_all", lambda _: None)
    given = [*SMALL, "train.epochs=4", "checkpoint.every=1", "progress=false"]
    assert ddlbench(*given)[0] == 0
    return given


def test_a_damaged_checkpoint_is_one_line_and_the_one_before_is_used(
    tmp_path: Path, ddlbench, words: list[str]
) -> None:
    (place,) = tmp_path.glob("results/*/checkpoints-1")
    assert sorted(path.name for path in place.iterdir()) == ["epoch-000002", "epoch-000003"]  # keep: 2
    assert ddlbench(*words, "checkpoint.resume=true")[0] == 0
    assert record(tmp_path, 2)["resume"]["epoch"] == 3

    (place / "epoch-000003" / "__0_0.distcp").write_bytes(b"not what was written")
    code, said = ddlbench(*words, "checkpoint.resume=true")
    assert code == 0, said
    assert "epoch-000003 is damaged (__0_0.distcp has 20 bytes instead of" in said
    assert record(tmp_path, 3)["resume"]["epoch"] == 2
    shutil.rmtree(place.with_name("checkpoints-3"))  # which continued it

    (place / "epoch-000002" / "checkpoint.json").write_text("{")
    code, said = ddlbench(*words, "checkpoint.resume=true")
    assert code == 2
    assert "are damaged: remove them to begin at epoch 0" in said
    assert "Traceback" not in said


def test_an_attempt_with_enough_checkpoints_removes_those_that_it_continued(
    tmp_path: Path, ddlbench, words: list[str]
) -> None:
    """A job that is requeued many times does not fill the disk."""
    (run,) = tmp_path.glob("results/*")
    shutil.rmtree(run / "checkpoints-1" / "epoch-000003")
    assert ddlbench(*words, "checkpoint.resume=true", "checkpoint.keep=1")[0] == 0
    assert record(tmp_path, 2)["resume"]["epoch"] == 2
    left = [str(path.relative_to(run)) for path in run.glob("checkpoints-*/*")]
    assert left == ["checkpoints-2/epoch-000003"]


def test_no_checkpoint_has_a_secret_of_the_environment(
    tmp_path: Path, ddlbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_AUTH_TOKEN", "planted-secret-1")
    monkeypatch.setenv("MY_PASSWORD", "planted-secret-2")
    kept: list[bytes] = []
    own = shutil.rmtree

    def keep(folder: Any, *args: Any, **kwargs: Any) -> None:
        kept.extend(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())
        own(folder, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", keep)
    assert ddlbench(*SMALL, "checkpoint.every=1")[0] == 0
    assert len(kept) >= 3
    assert not any(b"planted-secret" in content for content in kept)


def test_a_disk_that_is_full_at_the_end_of_a_checkpoint_is_one_line(
    ddlbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Saved, "write", no_space)
    code, said = ddlbench(*SMALL, "checkpoint.every=1", "progress=false")
    assert code == 1
    assert "cannot be written (No space left on device): free space or choose another checkpoint.dir=" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("results/*/checkpoints-1/epoch-*"))
