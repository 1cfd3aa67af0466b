"""What the options of the sweep's command line do together. Commands of Slurm are stand-ins (conftest.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Generator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ddlbench.heartbeat import _started
from ddlbench.sweep import local
from ddlbench.sweep.__main__ import main
from ddlbench.sweep.lock import Owner, claim
from ddlbench.sweep.plan import data_check, plan
from ddlbench.sweep.study import load
from tests.sweep.studies import KEYS, record, write

CPU = torch.device("cpu")


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """For a local sweep within this process: it waits for no other one, and leaves the handler of SIGTERM as it was."""
    monkeypatch.setattr(local, "TURN", tmp_path / "turn")
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("option", ["--slurm", "--local"])
@pytest.mark.parametrize(("show", "shown"), [("--dry-run", "framework  gpus"), ("--status", "1 cells: missing")])
def test_a_plan_and_a_status_start_nothing_whatever_else_is_asked_for(
    tmp_path: Path, submitted: Path, capsys: pytest.CaptureFixture[str], option: str, show: str, shown: str
) -> None:
    study = write(tmp_path, axes={"framework": ["single"]}, exclude=[], keys=KEYS | {"gpus": 1})
    assert main([str(study), option, show, f"results_dir={tmp_path}/results"]) == 0
    assert capsys.readouterr().out.startswith(shown)
    assert not submitted.exists()
    assert not (tmp_path / "results").exists()


def test_a_plan_for_slurm_is_that_of_its_gpus(
    tmp_path: Path, submitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """gloo cannot sum bf16, NCCL can. The option for CPUs may be in the file of the site."""
    keys = KEYS | {"train.precision": "bf16", "train.reduce_dtype": "bf16"}
    study = write(tmp_path, axes={"framework": ["ddp"], "gpus": [2]}, exclude=[], keys=keys)
    words = [str(study), f"results_dir={tmp_path}/results", "--slurm", "--dry-run"]
    (site := tmp_path / "cpus.sh").write_text("#SBATCH --partition=cpu --gpus-per-node=0\n")
    for on_cpus in ("--sbatch=--gpus-per-node=0", f"--site={site}"):
        assert main([*words, on_cpus]) == 0
        assert "gradients in bf16 need NCCL" in capsys.readouterr().out
    assert main(words) == 0
    assert "gradients in bf16 need NCCL" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--slurm", "--local"])
def test_a_results_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, submitted: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "file").touch()
    study = write(tmp_path, axes={"framework": ["single"]}, exclude=[])
    assert main([str(study), option, f"results_dir={tmp_path}/file/results"]) == 2
    said = capsys.readouterr().err
    assert (said.count("\n"), "cannot be written (Not a directory)" in said) == (1, True)
    assert not submitted.exists()


def test_a_plan_for_slurm_lists_the_jobs_of_what_is_left(
    tmp_path: Path, submitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 2 GPUs one of five repeats is done and one waits in the queue; on 8 GPUs two fit into a job."""
    axes = {"framework": ["ddp"], "gpus": [2, 8]}
    study, results = write(tmp_path, axes=axes, exclude=[], repeats=5, keys=KEYS | {"batch": 8}), tmp_path / "results"
    small = [cell for cell in plan(load(str(study)), CPU) if cell.gpus == 2]
    record(results, small[0])
    assert claim(results, small[1].key, "ddlbench-tiny-a")
    (tmp_path / "squeue").write_text("#!/bin/bash\necho ddlbench-tiny-a 1 0\n")
    assert main([str(study), f"results_dir={results}", "--slurm", "--pack=2", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "1 jobs of 1 cell that come first: sbatch --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --time=63",
        "1 jobs of 2 cells: sbatch --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --time=123",
        "2 jobs of 2 cells: sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=123",
        "1 jobs of 1 cell: sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=63",
        "no --cpus-per-task: a task gets its share of the cores that the job has on a node, perhaps one",
    ]
    assert not submitted.exists()


def test_a_plan_shows_the_options_of_the_site_and_those_given(
    tmp_path: Path, submitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.sh").write_text("#SBATCH --cpus-per-task=6\n")
    words = [str(write(tmp_path)), f"results_dir={tmp_path}/results", "--slurm", "--dry-run", "gpus=2"]
    assert main([*words, "--site", f"{tmp_path}/mine.sh", "--sbatch=--account=me --comment='two words'"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(" --gpus-per-node=2 --time=63 --cpus-per-task=6 --account=me '--comment=two words'")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--site", "moon"], "--site moon: there is no file"),
        (["data=imagenet"], "no cell can run: data=imagenet needs data.root="),
        (["data=imagenet", "data.root=FILE"], "no cell can run: there is no folder FILE/train"),
        (["data.root=FILE"], "no cell can run: data.root=FILE is not a folder"),
        (["--pack", "0"], "--pack=0 must be 1 or more"),
        (["--throttle", "-1"], "--throttle=-1 must be 0 or more"),
        (["gpus=[2,6]", "batch=12"], "gpus=6 does not fill nodes of 4 GPUs"),
        (["results_dir=FILE/results"], "FILE/results cannot be written"),
    ],
)
@pytest.mark.parametrize("plan", [["--dry-run"], []], ids=["plan", "submission"])
def test_a_plan_makes_the_checks_of_a_submission(
    tmp_path: Path,
    submitted: Path,
    capsys: pytest.CaptureFixture[str],
    plan: list[str],
    options: list[str],
    expected: str,
) -> None:
    file = tmp_path / "file"
    file.touch()
    study = write(tmp_path, axes={"framework": ["ddp"], "gpus": [2]}, exclude=[])
    given = [word.replace("FILE", str(file)) for word in [f"results_dir={tmp_path}/results", *options]]
    assert main([str(study), "--slurm", *plan, *given]) == 2
    said = capsys.readouterr().err
    assert (said.count("\n"), expected.replace("FILE", str(file)) in said) == (1, True), said
    assert not submitted.exists()


@pytest.mark.parametrize("option", ["--site=moon", "--pack=0", "--throttle=-1"])
def test_the_options_of_slurm_are_checked_also_without_it(tmp_path: Path, option: str) -> None:
    study = write(tmp_path, axes={"framework": ["single"]}, exclude=[])
    assert main([str(study), f"results_dir={tmp_path}/results", "--dry-run", option]) == 2


def test_only_cells_that_validate_need_validation_data(tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "1.JPEG").touch()
    study = write(tmp_path, axes={"framework": ["single"], "train.validate": [True, False]}, exclude=[])
    check = data_check(here=True)
    cells = plan(load(str(study), ["data=imagenet", f"data.root={tmp_path}"]), CPU, check)
    refused = {cell.values["train.validate"]: cell.refused for cell in cells}
    assert refused[False] is None
    assert "val" in str(refused[True])


@pytest.mark.parametrize(("option", "code"), [("--local", 2), ("--slurm", 0)])
def test_a_data_folder_that_this_machine_lacks_may_be_on_another_one(
    tmp_path: Path, submitted: Path, option: str, code: int
) -> None:
    study = write(tmp_path, axes={"framework": ["single"]}, exclude=[])
    words = [f"results_dir={tmp_path}/results", "data=imagenet", f"data.root={tmp_path}/nowhere"]
    assert main([str(study), option, "--dry-run", *words]) == code
    assert main([str(study), *words]) == 0  # a list of the cells alone


def test_a_quotation_that_is_not_closed_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(write(tmp_path)), "--slurm", "--sbatch", '--x "'])
    assert end.value.code == 2
    assert 'argument --sbatch: --x ": no closing quotation' in capsys.readouterr().err


def test_the_time_of_what_has_not_run_is_unknown_not_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, results = write(tmp_path, axes={"framework": ["single"]}, exclude=[], repeats=2), tmp_path / "results"
    assert main([str(study), f"results_dir={results}"]) == 0
    rest = "2 cells have no finished run to estimate from"
    assert capsys.readouterr().out.endswith(f"\nremaining, one after another: unknown; {rest}\n")
    record(results, plan(load(str(study)), CPU)[0], seconds=90)
    assert main([str(study), f"results_dir={results}"]) == 0
    assert capsys.readouterr().out.endswith("\nremaining, one after another: 1.5 minutes, 0.025 GPU-hours\n")


@pytest.mark.parametrize("option", ["--slurm", "--local"])
def test_a_claim_that_no_sweep_has_written_is_named(
    tmp_path: Path, submitted: Path, capsys: pytest.CaptureFixture[str], alone: None, option: str
) -> None:
    """Garbage, a folder and a FIFO, just made. A claim of a sweep that is alive is not named."""
    study = write(tmp_path, axes={"framework": ["single"]}, exclude=[], repeats=4)
    cells, results = plan(load(str(study)), CPU), tmp_path / "results"
    held = [claim(results, cell.key) for cell in cells]
    garbage, folder, pipe, _ = paths = [one.path for one in held if one is not None]
    for path in paths[:3]:
        path.unlink()
    garbage.write_bytes(b"\xff")
    folder.mkdir()
    os.mkfifo(pipe)
    assert main([str(study), option, f"results_dir={results}"]) == 1
    said = capsys.readouterr().out
    assert [f"{path} holds a cell, but no sweep has written it" in said for path in paths] == [True, True, True, False]
    assert not submitted.exists()


def test_a_sweep_whose_claim_was_taken_over_ends_its_ranks_with_one_line(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study, results = write(tmp_path, axes={"framework": ["single"]}, exclude=[]), tmp_path / "results"
    (cell,) = plan(load(str(study)), CPU)
    started = list[subprocess.Popen[bytes]]()

    def start(*_: object) -> subprocess.Popen[bytes]:
        (results / ".sweep" / f"{cell.key}.2").write_text("{}")
        started.append(subprocess.Popen(["sleep", "300"], start_new_session=True))
        return started[0]

    monkeypatch.setattr(local, "_start", start)
    assert main([str(study), "--local", f"results_dir={results}"]) == 1
    said = capsys.readouterr().err
    assert (said.count("\n"), "another sweep has taken its cell over" in said) == (1, True)
    assert started[0].returncode is not None


def test_a_status_says_that_slurm_does_not_answer(
    tmp_path: Path, submitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it does, and where no cell was submitted, there is nothing to say."""
    study, results = write(tmp_path, axes={"framework": ["single"]}, exclude=[]), tmp_path / "results"
    (cell,) = plan(load(str(study)), CPU)
    lines = list[str]()
    for step in ("no job", "answers", "does not", "has ended"):
        if step == "answers":
            assert claim(results, cell.key, "ddlbench-tiny-a")
        answers = {"answers": "echo ddlbench-tiny-a 1 0", "has ended": "exit 0"}
        (tmp_path / "squeue").write_text(f"#!/bin/bash\n{answers.get(step, 'exit 1')}\n")
        if step == "has ended":
            (claimed,) = (results / ".sweep").glob("*.1")
            claimed.write_text(json.dumps(asdict(Owner.this("ddlbench-tiny-a")) | {"started": -1}))
        assert main([str(study), f"results_dir={results}", "--status"]) == 0
        lines.append(capsys.readouterr().out)
    assert ["squeue does not answer" in text for text in lines] == [False, False, True, False]
    shown = [text.splitlines()[0] for text in lines]
    assert shown == ["1 cells: missing", "1 cells: queued", "1 cells: queued", "1 cells: missing"]
    output = f"{results}/.sweep/logs/ddlbench-tiny-a-*.out"
    ended = f"missing although their Slurm job has ended: 1 cells; its output: {output}"
    assert [ended in text for text in lines] == [False, False, False, True]


def test_cancel_says_what_it_could_not_end(
    tmp_path: Path, submitted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs, one of another user; a sweep of this machine, one of another machine and one of another user."""
    study = write(tmp_path, axes={"framework": ["single"]}, exclude=[], repeats=5)
    cells, results = plan(load(str(study)), CPU), tmp_path / "results"
    mine, theirs = "ddlbench-tiny-mine", "ddlbench-tiny-theirs"
    this = Owner.this()
    owners = [Owner.this(mine), Owner.this(theirs), this, replace(this, place="elsewhere"), replace(this, pid=1)]
    owners[4] = replace(owners[4], started=_started(1))
    for cell, owner in zip(cells, owners, strict=True):
        assert claim(results, cell.key)
        (results / ".sweep" / f"{cell.key}.1").write_text(json.dumps(asdict(owner)))
    (tmp_path / "squeue").write_text(f"#!/bin/bash\necho {mine} 1 0\necho {theirs} 2 0\n")
    (tmp_path / "scancel").write_text(f"#!/bin/bash\necho $* >> {tmp_path}/cancelled\n[ $1 = --name={mine} ]\n")
    (tmp_path / "scancel").chmod(0o755)
    signalled = list[int]()

    def kill(pid: int, number: int) -> None:
        if pid == 1:
            raise PermissionError
        signalled.append(pid)

    monkeypatch.setattr(os, "kill", kill)
    assert main([str(study), f"results_dir={results}", "--cancel", "--dry-run"]) == 0
    assert not signalled
    assert not (tmp_path / "cancelled").exists()
    capsys.readouterr()
    assert main([str(study), f"results_dir={results}", "--cancel"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("cancelled: 1 Slurm jobs, 1 local sweeps\n3 of other users or machines still hold")
    assert signalled == [os.getpid()]
    assert sorted((tmp_path / "cancelled").read_text().split()) == [f"--name={mine}", f"--name={theirs}"]
