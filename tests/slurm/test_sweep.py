"""A study as jobs of a real Slurm of two nodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm, numbers, records, sweep
from tests.sweep.studies import KEYS, SINGLE, ddp, statuses, write

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
FEW_CORES = {"preflight_stop": None}  # which ranks get a core just then decides who looks slow


def test_a_study_runs_under_slurm_once(slurm: Slurm, tmp_path: Path) -> None:
    exclude = [{"framework": "ddp", "gpus": 1}, {"framework": "single", "gpus": 2}]
    study = write(tmp_path, keys=KEYS | FEW_CORES, exclude=exclude, repeats=3)
    results = tmp_path / "results"
    on_cpus = ("--slurm", "--sbatch=--gpus-per-node=0", "--pack", "2")
    first = sweep(slurm, study, results, *on_cpus)
    jobs = numbers(first)
    assert len(jobs) == 4
    assert sweep(slurm, study, results, *on_cpus).stdout == "nothing to submit\n"
    states = slurm.wait(*jobs)
    assert states == ["COMPLETED"] * 4, "\n".join(path.read_text() for path in (results / ".sweep/logs").iterdir())
    assert statuses(results) == Counter({"single 1 ok": 3, "ddp 2 ok": 3})
    assert sweep(slurm, study, results, "--status").stdout.startswith("6 cells: ok\n")
    assert sweep(slurm, study, results, *on_cpus).stdout == "nothing to submit\n"


def test_cancel_removes_queued_jobs_and_their_cells_are_missing_again(slurm: Slurm, tmp_path: Path) -> None:
    study = write(tmp_path, **SINGLE)
    results = tmp_path / "results"
    sweep(slurm, study, results, "--slurm", "--sbatch=--gpus-per-node=0 --hold")
    assert sweep(slurm, study, results, "--status").stdout.startswith("1 cells: queued\n")
    assert "cancelled: 1 Slurm jobs" in sweep(slurm, study, results, "--cancel").stdout
    assert sweep(slurm, study, results, "--status").stdout.startswith("1 cells: missing\n")


def test_a_job_that_left_no_record_of_a_cell_is_a_row_and_runs_again_only_when_asked(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Two cells of one job: their folder of images does not exist."""
    study = write(tmp_path, **ddp(2), repeats=3)
    results = tmp_path / "results"
    data = ("data=imagenet", "loader=native", f"data.root={tmp_path}/nowhere", "gpus_per_node=1")
    on_cpus = ("--slurm", "--sbatch=--gpus-per-node=0", "--pack", "2", *data)
    first = sweep(slurm, study, results, *on_cpus)
    jobs = numbers(first)
    assert slurm.wait(*jobs) == ["FAILED", "FAILED"]
    shown = sweep(slurm, study, results, "--status", *data).stdout
    assert shown.startswith("3 cells: error\n")
    assert shown.count(f"error: there is no folder {tmp_path}/nowhere") == 3
    assert sweep(slurm, study, results, *on_cpus).stdout == "nothing to submit\n"
    assert statuses(results) == {"ddp 2 error": 3}
    assert all("before it had a record: exit codes 2" in record["reason"] for record in records(results))
    assert {record["launch"]["nodes"] for record in records(results)} == {2}
    assert [record["environment"]["variables"]["SLURM_JOB_ID"] for record in records(results)].count(jobs[1]) == 2
