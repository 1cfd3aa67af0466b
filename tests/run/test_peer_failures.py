"""Ranks that end without a message, are stopped, or lose their launcher: the record names them, whoever writes it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from ddlbench.ranks.launchers import free_port
from tests.support.disk import fill_disk
from tests.support.faults import ROOT, begun, command, end, patience_s, start
from tests.support.killed import beaten
from tests.support.processes import environment, run, small_disk
from tests.support.records import attempts_of
from tests.support.runs import epochs, record
from tests.support.waiting import WITHIN_S, wait_until

GONE = r"rank {} \(.*, pid \d+\) ended without a message, or is stopped: .*; rank {}"


def torchrun(folder: Path, how: str, *more: str) -> subprocess.Popen[str]:
    """Two ranks whose store lives in torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    words = [*launcher, *command(folder, how, *more)]
    return subprocess.Popen(words, env=environment(PYTHONPATH=f"{ROOT}/src:{ROOT}"), text=True, stderr=subprocess.PIPE)


@pytest.mark.parametrize("on", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_rank_that_was_killed_is_named_not_the_signal_of_the_launcher(tmp_path: Path, on: int) -> None:
    _, said = end([torchrun(tmp_path, "kill", f"+framework.on={on}")])
    content = record(tmp_path)
    assert content["status"] == "error", said
    assert re.match(GONE.format(on, 1 - on), content["reason"]), content["reason"]
    assert content["times"]["end"] is not None


def test_a_launcher_that_dies_is_named(tmp_path: Path) -> None:
    end([torchrun(tmp_path, "launcher", "+framework.on=0", "train.steps=10000")])
    wait_until(lambda: begun(tmp_path) and record(tmp_path)["status"] != "running")
    assert record(tmp_path)["reason"].startswith("torchrun, which held the rendezvous store, ended without a message")


def test_rank_0_is_stopped_and_another_rank_writes_the_end(tmp_path: Path) -> None:
    """With the store in rank 0, which then does not answer either."""
    stopped, other = processes = start(tmp_path, "stop", "+framework.on=0", f"train.timeout_s={patience_s()}")
    try:
        assert other.wait(WITHIN_S) == 8
        content = record(tmp_path)
        assert content["status"] == "timeout"
        assert content["reason"].startswith("rank 0, which holds the rendezvous store, does not answer")
        assert "train.timeout_s" in content["reason"]
        assert content["times"]["end"] is not None
        stopped.send_signal(signal.SIGCONT)
        end(processes)
        assert record(tmp_path) == content
    finally:
        stopped.kill()


@pytest.mark.slow
def test_rank_0_is_stopped_under_torchrun(tmp_path: Path) -> None:
    started = torchrun(tmp_path, "stop", "+framework.on=0", f"train.timeout_s={patience_s()}")
    try:
        wait_until(lambda: begun(tmp_path) and record(tmp_path)["status"] != "running")
    finally:
        started.send_signal(signal.SIGTERM)
        end([started])
    content = record(tmp_path)
    assert content["status"] == "timeout"
    assert re.match(GONE.format(0, 1), content["reason"]), content["reason"]


def test_a_setup_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    codes, said = end(start(tmp_path, "hang_in_setup", "train.timeout_s=3", ranks=1))
    content = record(tmp_path)
    assert codes == [8], said
    assert content["status"] == "timeout"
    assert content["reason"] == "rank 0: the framework's setup did not end within 3 s (train.timeout_s)"


def test_a_loader_worker_that_is_killed_is_named(tmp_path: Path) -> None:
    images = ["loader=native", "loader.workers=1", "data.sample_train=40", "data.sample_val=20"]
    codes, said = end(start(tmp_path, "worker", *images, "train.steps=10"))  # more than are read ahead
    content = record(tmp_path)
    assert codes[1] == 1, said
    assert content["status"] == "error"
    assert re.match(r"rank 1: a loader worker process \(pid \d+\) was killed by signal 'Killed'", content["reason"])
    assert "loader.workers" in content["reason"]


def test_what_was_measured_survives_kill_9(tmp_path: Path) -> None:
    processes = start(tmp_path, "none", "train.epochs=100000", "train.steps=3")
    try:
        wait_until(lambda: begun(tmp_path, epochs=3))
    finally:
        for process in processes:
            process.kill()
        end(processes)
    content, (folder,) = record(tmp_path), tmp_path.glob("*/attempt-1")
    done = content["summary"]["epochs_done"]
    assert content["status"] == "running"
    assert done >= 3
    assert content["summary"]["throughput_samples_per_s"] > 0
    assert content["ledger"]["updates"] == 3 * done
    steps = pd.read_parquet(folder / "steps.parquet").groupby("epoch").size()
    assert steps[:done].tolist() == [2 * 3] * done
    beaten(folder, 60)
    (attempt,) = attempts_of(tmp_path)
    assert attempt.record["status"] == "killed"
    assert len(attempt.epochs) >= done


@pytest.mark.slow
def test_waiting_for_data_ends_where_the_rank_that_prepares_them_is_stopped(tmp_path: Path) -> None:
    # Twice, for a machine that becomes busy while the ranks start: rank 1 must be connected before its patience ends.
    stopped, other = start(tmp_path, "none", "+data=Stopping", f"train.timeout_s={2 * patience_s()}")
    try:
        assert other.wait(WITHIN_S) == 8
    finally:
        stopped.kill()
    _, said = end([stopped, other])
    assert "timeout: rank 0, which holds the rendezvous store, does not answer" in said[1]
    assert "train.timeout_s" in said[1]


def ended_by(fault: Callable[[], object], folder: Path, epochs: int = 0) -> str:
    """What a run says whose results folder has a fault once so many epochs are recorded. It ends in one line."""
    processes = start(folder, "slow", "train.steps=5", "train.epochs=1000", ranks=1)
    wait_until(lambda: begun(folder, epochs))
    fault()
    codes, (said,) = end(processes)
    assert codes == [1], said
    assert "Traceback" not in said
    return said


def test_a_disk_that_fills_up_ends_the_run_with_a_record_and_a_line(tmp_path: Path) -> None:
    with small_disk(tmp_path, 2**21) as disk:
        said = ended_by(lambda: fill_disk(disk), disk)
        content = record(disk)
    assert content["status"] == "error"
    assert "cannot be written (No space left on device)" in content["reason"]
    assert said.count(content["reason"]) == 1


@pytest.mark.slow
def test_a_results_folder_that_is_removed_ends_the_run_with_a_line(tmp_path: Path) -> None:
    results = tmp_path / "results"
    assert "ddlbench: error: the record in" in ended_by(lambda: shutil.rmtree(results), results)


@pytest.mark.slow
def test_a_results_folder_that_becomes_read_only_ends_the_run_with_a_line(tmp_path: Path) -> None:
    """As a file system does after an error of its disk. The epochs from before stay."""
    with small_disk(tmp_path, 2**22) as disk:
        said = ended_by(lambda: run("mount", "-o", "remount,ro", disk), disk, epochs=1)
        content, lines = record(disk), epochs(disk)
    assert "cannot be written (Read-only file system)" in said
    assert content["status"] == "running"  # nothing can be written: the next reader sees that the process has ended
    assert len(lines) >= content["summary"]["epochs_done"] >= 1
