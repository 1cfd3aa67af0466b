"""A results folder that goes away from under a run, in ways that root meets too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import begun, end, start
from tests.support.processes import run, small_disk
from tests.support.runs import record
from tests.support.waiting import wait_until


@pytest.mark.slow
def test_a_results_folder_that_becomes_read_only_ends_the_run_with_a_line(tmp_path: Path) -> None:
    """As a file system does after an error of its disk. The epochs from before stay."""
    with small_disk(tmp_path, 2**22) as disk:
        processes = start(disk, "slow", "train.steps=5", "train.epochs=1000", ranks=1)
        wait_until(lambda: begun(disk, epochs=1))
        run("mount", "-o", "remount,ro", disk)
        codes, said = end(processes)
        content = record(disk)
        run("mount", "-o", "remount,rw", disk)
        (folder,) = disk.glob("*/attempt-1")
        epochs = len((folder / "epochs.jsonl").read_text().splitlines())
    assert codes == [1], said
    assert "cannot be written (Read-only file system)" in said[0]
    assert "Traceback" not in said[0]
    assert content["status"] == "running"  # nothing can be written: the next reader sees that the process has ended
    assert epochs >= content["summary"]["epochs_done"] >= 1
