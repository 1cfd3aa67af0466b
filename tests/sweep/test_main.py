"""What the options of the sweep's command line do together. Commands of Slurm are stand-ins (conftest.py)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ddlbench.heartbeat import _started
from ddlbench.sweep.__main__ import main
from ddlbench.sweep.lock import Owner, claim
from ddlbench.sweep.plan import plan
from ddlbench.sweep.study import load
from tests.sweep.studies import KEYS, record, write

CPU = torch.device("cpu")


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
    """gloo cannot sum bf16, NCCL can."""
    keys = KEYS | {"train.precision": "bf16", "train.reduce_dtype": "bf16"}
    study = write(tmp_path, axes={"framework": ["ddp"], "gpus": [2]}, exclude=[], keys=keys)
    words = [str(study), f"results_dir={tmp_path}/results", "--slurm", "--dry-run"]
    assert main([*words, "--sbatch=--gpus-per-node=0"]) == 0
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
    """Of five repeats on 2 GPUs one is done, one waits in the queue, and of those on 8 two fit into a job."""
    axes = {"framework": ["ddp"], "gpus": [2, 8]}
    study, results = write(tmp_path, axes=axes, exclude=[], repeats=5, keys=KEYS | {"batch": 8}), tmp_path / "results"
    small = [cell for cell in plan(load(str(study)), CPU) if cell.gpus == 2]
    record(results, small[0])
    assert claim(results, small[1].key, "ddlbench-tiny-a")
    (tmp_path / "squeue").write_text("#!/bin/bash\necho ddlbench-tiny-a 1 0\n")
    assert main([str(study), f"results_dir={results}", "--slurm", "--pack=2", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "1 jobs of 1 cell that come first: --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --time=63",
        "1 jobs of 2 cells: --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --time=123",
        "2 jobs of 2 cells: --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=123",
        "1 jobs of 1 cell: --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=63",
    ]
    assert not submitted.exists()


def test_a_status_says_that_slurm_does_not_answer(
    tmp_path: Path, submitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it does, and where no cell was submitted, there is nothing to say."""
    study, results = write(tmp_path, axes={"framework": ["single"]}, exclude=[]), tmp_path / "results"
    (cell,) = plan(load(str(study)), CPU)
    lines = list[str]()
    for step in ("no job", "answers", "does not"):
        if step == "answers":
            assert claim(results, cell.key, "ddlbench-tiny-a")
        if step != "answers":
            (tmp_path / "squeue").write_text("#!/bin/bash\nexit 1\n")
        else:
            (tmp_path / "squeue").write_text("#!/bin/bash\necho ddlbench-tiny-a 1 0\n")
        assert main([str(study), f"results_dir={results}", "--status"]) == 0
        lines.append(capsys.readouterr().out)
    assert ["squeue does not answer" in text for text in lines] == [False, False, True]
    assert [text.splitlines()[0] for text in lines] == ["1 cells: missing", "1 cells: queued", "1 cells: queued"]


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
    assert main([str(study), f"results_dir={results}", "--cancel"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("cancelled: 1 Slurm jobs, 1 local sweeps\n3 of other users or machines still hold")
    assert signalled == [os.getpid()]
    assert sorted((tmp_path / "cancelled").read_text().split()) == [f"--name={mine}", f"--name={theirs}"]
