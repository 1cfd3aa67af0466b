"""Cells as Slurm jobs: which jobs, and in which order. tests/slurm/test_sweep.py submits them to a real Slurm."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddlbench.errors import UserError
from ddlbench.sweep.__main__ import main
from ddlbench.sweep.lock import Owner, claim
from ddlbench.sweep.slurm import Options, jobs, submit
from ddlbench.sweep.state import State
from ddlbench.sweep.study import load
from tests.support.processes import program
from tests.sweep.studies import KEYS, SINGLE, ddp, planned, record, write


def submit_all(study: Path, options: Options | None = None, before: State | None = None) -> list[str]:
    """Submit what is left of a study with its results beside it; before: the state that is known already."""
    state = before or State(study.parent / "results").refresh()
    return submit(load(str(study)), planned(study), state, options or Options(), None)


def test_the_smallest_cell_of_each_configuration_is_a_job_of_its_own_and_first(tmp_path: Path) -> None:
    axes = {"framework": ["ddp", "fsdp"], "gpus": [2, 4, 8]}
    study = write(tmp_path, axes=axes, exclude=[], repeats=3, keys={"model": "resnet50", "batch": 64})
    result = jobs(planned(study), pack=2)
    assert [(job.proves, len(job.cells), job.cells[0].gpus) for job in result[:2]] == [(True, 1, 2), (True, 1, 2)]
    assert {job.cells[0].values["framework"] for job in result[:2]} == {"ddp", "fsdp"}
    assert [job.cells[0].gpus for job in result] == [2, 2, 2, 2, 4, 4, 4, 8, 8, 8]
    assert all(len({cell.gpus for cell in job.cells}) == 1 for job in result)
    assert len({cell.key for job in result for cell in job.cells}) == 2 * 3 * 3


def test_larger_cells_wait_for_the_proof_and_for_their_turn(tmp_path: Path, submitted: Path) -> None:
    lines = submit_all(write(tmp_path, **ddp(2, 4, 8), keys=KEYS | {"batch": 16}), Options(throttle=2))
    assert [line.partition(":")[0] for line in lines] == ["job 1", "job 2", "job 3"]
    result = submitted.read_text().splitlines()
    assert "--dependency" not in result[0]
    assert "--dependency=afterok:1 --kill-on-invalid-dep=yes" in result[1]
    assert "--dependency=afterok:1,afterany:1 --kill-on-invalid-dep=yes" in result[2]
    assert "--nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=63 " in result[2]
    assert f'train.repeat=0 results_dir="{tmp_path}/results" progress=false' in result[2]


def test_the_results_folder_is_passed_on_as_it_was_given(
    tmp_path: Path, submitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record has the path that the user chose, not where it was on this machine."""
    monkeypatch.chdir(tmp_path)
    assert main([str(write(tmp_path)), "--slurm", "results_dir=results/mine", "gpus=2"]) == 0
    assert 'results_dir="results/mine" progress=false' in submitted.read_text()


def test_cells_of_one_size_share_a_job(tmp_path: Path, submitted: Path) -> None:
    submit_all(write(tmp_path, **ddp(2), repeats=4), Options(pack=3))
    one, three = submitted.read_text().splitlines()
    assert (one.count("+framework=ddp"), three.count("+framework=ddp"), three.count(" --next ")) == (1, 3, 2)
    assert "--time=183 " in three
    assert (one.count("train.time_limit_s="), three.count(" train.time_limit_s=3600")) == (0, 3)


def test_a_cell_of_a_packed_job_keeps_a_limit_of_its_own(tmp_path: Path, submitted: Path) -> None:
    submit_all(write(tmp_path, **ddp(2), repeats=3, keys=KEYS | {"train.time_limit_s": 60}), Options(pack=2))
    _, two = submitted.read_text().splitlines()
    assert (two.count("train.time_limit_s="), two.count("train.time_limit_s=60 ")) == (2, 2)


def test_a_site_gives_its_file_to_the_job_and_its_options_to_sbatch(tmp_path: Path, submitted: Path) -> None:
    """What the user gives comes later, and the last one counts for sbatch."""
    study = write(tmp_path, **ddp(8), keys=KEYS | {"batch": 8})
    submit_all(study, Options(site="perlmutter", sbatch=("--qos=debug",)))
    assert " --constraint=gpu --qos=regular --cpus-per-task=32 --qos=debug " in submitted.read_text()
    site = Path(submitted.with_name(submitted.name + ".site").read_text().strip())
    assert (site.name, site.is_file()) == ("perlmutter.sh", True)


def test_lines_of_a_site_file_are_read_as_sbatch_reads_them_in_any_encoding(tmp_path: Path) -> None:
    lines = "# Jülich\n#SBATCH --comment='two words' # whole nodes\n#SBATCH\t--exclusive\n#SBATCHES -x\n"
    (tmp_path / "site.sh").write_bytes(lines.encode("latin-1"))
    assert Options(site=str(tmp_path / "site.sh")).words() == ["--comment=two words", "--exclusive"]


@pytest.mark.parametrize(
    "option",
    ["-Jmine", "--job-name=mine", "--job", "-d", "--dependency=singleton", "--dep=singleton", "--export=NONE",
     "--export", "-a0-1", "--array=0-1", "--arr", "--wrap=true", "-D/tmp", "--chdir=/tmp", "--ch", "-W", "--wait"],
)  # fmt: skip
def test_options_by_which_a_sweep_knows_its_jobs_are_refused(option: str) -> None:
    with pytest.raises(UserError, match=f"^{option}: jobs of a sweep have"):
        Options(sbatch=("--qos=debug", option)).words()
    allowed = ("--export=ALL,A=1", "--account", "me", "--distribution=block", "--deadline=now", "--wait-all-nodes=1")
    assert Options(sbatch=allowed).words() == [*allowed]


def test_a_job_gets_the_environment_and_a_file_for_its_output(
    tmp_path: Path, submitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm replaces %a, SBATCH_EXPORT=NONE would keep the site's file from the job, and srun would refuse the memory
    of the job in which the sweep runs beside that of the new one."""
    for name, value in {"SBATCH_EXPORT": "NONE", "SLURM_MEM_PER_CPU": "100"}.items():
        monkeypatch.setenv(name, value)
    unset = "${SBATCH_EXPORT-unset}${SLURM_MEM_PER_CPU-unset}"
    program(tmp_path / "sbatch", f'#!/bin/bash\nprintf "%s\\n" "{unset}" "$*" > {submitted}\necho 1\n')
    assert main([str(write(tmp_path, **SINGLE)), "--slurm", f"results_dir={tmp_path}/100%a"]) == 0
    exported, command = submitted.read_text().splitlines()
    assert exported == "unsetunset"
    assert f"--output={tmp_path}/100%%a/.sweep/logs/%x-%j.out " in command


def test_a_quotation_without_an_end_in_a_site_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "site.sh").write_text("#SBATCH --comment='a run\n")
    with pytest.raises(UserError, match=r"site\.sh: a line #SBATCH has no closing quotation: close it"):
        Options(site=str(tmp_path / "site.sh")).words()


def test_what_slurm_did_not_take_is_submitted_by_the_next_sweep_and_nothing_twice(
    tmp_path: Path, submitted: Path
) -> None:
    """The controller goes down after the first job. Whether that job waits is then not known: it holds its cell."""
    study = write(tmp_path, **ddp(2), repeats=3)
    working = (tmp_path / "sbatch").read_text()
    (tmp_path / "sbatch").write_text(working + f"[ $(wc -l < {submitted}) -lt 2 ] || {{ echo down >&2; exit 1; }}\n")
    with pytest.raises(UserError, match=r"sbatch refused a job of 2 GPUs \(down\)"):
        submit_all(study)
    (tmp_path / "sbatch").write_text(working)
    (tmp_path / "squeue").write_text("#!/bin/bash\nexit 1\n")
    submitted.write_text("")
    assert len(submit_all(study)) == 2
    given = [line.partition("train.repeat=")[2][0] for line in submitted.read_text().splitlines()]
    assert len(set(given)) == 2
    assert submit_all(study) == []


def ended_owner(job: str) -> str:
    """The claim of a job whose sweep has ended."""
    return json.dumps(asdict(Owner.this(job)) | {"started": -1})


def test_a_cell_that_another_sweep_took_meanwhile_is_not_submitted(tmp_path: Path, submitted: Path) -> None:
    """The other one submits and ends after this one has asked for the jobs: its job is not among them."""
    study = write(tmp_path, **ddp(2))
    path = tmp_path / "results/.sweep" / f"{planned(study)[0].key}.1"
    (tmp_path / "other").write_text(ended_owner("ddlbench-tiny-other"))
    (tmp_path / "squeue").write_text(f"#!/bin/bash\nsleep 0.1\ncat {tmp_path}/other > '{path}'\n")
    assert submit_all(study) == []
    assert not submitted.exists()
    (tmp_path / "squeue").write_text("#!/bin/bash\n")  # its job has ended without a record
    assert len(submit_all(study)) == 1


def test_the_records_are_read_after_the_jobs_are_known(tmp_path: Path, submitted: Path) -> None:
    """A job that ended between the two has its record."""
    study, results = write(tmp_path, **ddp(2)), tmp_path / "results"
    before = State(results).refresh()
    record(results, planned(study)[0])
    assert submit_all(study, before=before) == []


def test_a_job_that_slurm_took_though_sbatch_gave_up_is_not_submitted_again(tmp_path: Path, submitted: Path) -> None:
    study = write(tmp_path, **ddp(2))
    said = "Batch job submission failed: Socket timed out on send/recv operation"
    working = (tmp_path / "sbatch").read_text()
    (tmp_path / "sbatch").write_text(f"{working}echo '{said}' >&2\nexit 1\n")
    with pytest.raises(UserError, match="Socket timed out"):
        submit_all(study)
    name = submitted.read_text().partition("--job-name=")[2].split()[0]
    (tmp_path / "squeue").write_text(f"#!/bin/bash\necho {name} 1 0\n")
    claimed = next((tmp_path / "results/.sweep").glob("*.1"))
    claimed.write_text(ended_owner(name))
    assert submit_all(study) == []
    (tmp_path / "squeue").write_text("#!/bin/bash\n")
    (tmp_path / "sbatch").write_text(working)
    assert len(submit_all(study)) == 1


@pytest.mark.parametrize(
    ("queued", "attempts", "expected"),
    [
        ("8 0", [], "queued"),
        ("8 0", [("error", "7", None)], "queued"),  # of an earlier job: this one tries it again
        ("8 0", [("error", "8", None)], "error"),  # the job runs other cells now
        ("8 1", [("error", "8", None)], "queued"),  # Slurm has put the job back
        ("8 1", [("error", "8", None), ("error", "8", "1")], "error"),
        ("8 1", [("error", "8", None), ("running", "8", "1")], "running"),
        ("8 1", [("ok", "8", None)], "ok"),
        ("8 1", [("killed", "8", None)], "queued"),
        ("", [("error", "8", None)], "error"),
        ("", [], "missing"),
    ],
)
def test_a_cell_whose_job_waits_again_is_queued_whatever_came_before(
    tmp_path: Path, submitted: Path, sweep: Any, queued: str, attempts: list[Any], expected: str
) -> None:
    """queued: number and restarts of the job, as squeue says it; attempts: status, job, SLURM_RESTART_COUNT"""
    (cell,) = planned(write(tmp_path, **SINGLE))
    results, name = tmp_path / "results", "ddlbench-tiny-0123456789ab"
    for number, (status, job, restarts) in enumerate(attempts, 1):
        variables = {"SLURM_JOB_ID": job} | ({"SLURM_RESTART_COUNT": restarts} if restarts else {})
        record(results, cell, status, number, environment={"variables": variables})
    assert claim(results, cell.key, name, queued=lambda _: False)
    (path,) = (results / ".sweep").glob("*.1")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": -1}))  # the sweep that submitted has ended
    (tmp_path / "squeue").write_text(
        f"#!/bin/bash\necho 'job of others  5  0'\n[ -z '{queued}' ] || echo {name} {queued}\n"
    )
    code, out, _ = sweep("--status")
    assert (code, out.partition("\n")[0]) == (0, f"1 cells: {expected}")
