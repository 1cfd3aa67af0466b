"""What the options of the sweep's command line do together. Commands of Slurm are stand-ins (conftest.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

import pytest

from ddlbench.heartbeat import _started
from ddlbench.sweep import local
from ddlbench.sweep.__main__ import main
from ddlbench.sweep.lock import Owner, claim
from ddlbench.sweep.plan import data_check, plan
from ddlbench.sweep.study import load
from tests.support.processes import program
from tests.sweep.studies import CPU, KEYS, SINGLE, ddp, planned, record, write

Sweep: TypeAlias = Callable[..., tuple[int, str, str]]  # conftest.py


@pytest.mark.parametrize("option", ["--slurm", "--local"])
@pytest.mark.parametrize(("show", "shown"), [("--dry-run", "framework  gpus"), ("--status", "1 cells: missing")])
def test_a_plan_and_a_status_start_nothing_whatever_else_is_asked_for(
    tmp_path: Path, submitted: Path, sweep: Sweep, option: str, show: str, shown: str
) -> None:
    code, out, _ = sweep(option, show, keys=KEYS | {"gpus": 1})
    assert (code, out.startswith(shown)) == (0, True)
    assert not submitted.exists()
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("option", ["--resume", "--retry=failed"])
def test_what_is_to_run_again_needs_a_place_to_run(sweep: Sweep, option: str) -> None:
    code, out, _ = sweep(option, keys=KEYS | {"gpus": 1})
    assert (code, out.splitlines()[-1]) == (0, "nothing was started: give --local or --slurm, too")
    for more in ("--status", "--dry-run"):
        assert "nothing was started" not in sweep(option, more, keys=KEYS | {"gpus": 1})[1]


@pytest.mark.parametrize(("first", "second"), [("--local", "--slurm"), ("--cancel", "--status")])
def test_options_that_exclude_each_other(
    sweep: Sweep, capsys: pytest.CaptureFixture[str], first: str, second: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sweep(first, second, keys=KEYS | {"gpus": 1})
    assert f"not allowed with argument {first}" in capsys.readouterr().err


def test_a_plan_for_slurm_is_that_of_its_gpus(tmp_path: Path, submitted: Path, sweep: Sweep) -> None:
    """gloo cannot sum bf16, NCCL can. The option for CPUs may be in the file of the site."""
    keys = KEYS | {"train.precision": "bf16", "train.reduce_dtype": "bf16"}
    (site := tmp_path / "cpus.sh").write_text("#SBATCH --partition=cpu --gpus-per-node=0\n")
    for on_cpus, refused in ((["--sbatch=--gpus-per-node=0"], True), ([f"--site={site}"], True), ([], False)):
        code, out, _ = sweep("--slurm", "--dry-run", *on_cpus, **ddp(2), keys=keys)
        assert (code, "gradients in bf16 need NCCL" in out) == (0, refused)


def test_a_plan_for_slurm_lists_the_jobs_of_what_is_left(tmp_path: Path, submitted: Path, sweep: Sweep) -> None:
    """On 2 GPUs one of five repeats is done and one waits in the queue; on 8 GPUs two fit into a job."""
    content = {**ddp(2, 8), "repeats": 5, "keys": KEYS | {"batch": 8}}
    small = [cell for cell in planned(write(tmp_path, **content)) if cell.gpus == 2]
    record(tmp_path / "results", small[0])
    assert claim(tmp_path / "results", small[1].key, "ddlbench-tiny-a")
    (tmp_path / "squeue").write_text("#!/bin/bash\necho ddlbench-tiny-a 1 0\n")
    code, out, _ = sweep("--slurm", "--pack=2", "--dry-run", **content)
    assert code == 0
    assert out.splitlines()[-5:] == [
        "1 jobs of 1 cell that come first: sbatch --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --time=63",
        "1 jobs of 2 cells: sbatch --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --time=123",
        "2 jobs of 2 cells: sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=123",
        "1 jobs of 1 cell: sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=63",
        "no --cpus-per-task: a task gets its share of the cores that the job has on a node, perhaps one",
    ]
    assert not submitted.exists()


def test_a_plan_shows_the_options_of_the_site_and_those_given(tmp_path: Path, submitted: Path, sweep: Sweep) -> None:
    """Those of the site are its lines for sbatch."""
    lines = "#SBATCH --cpus-per-task=6 --comment='two words'\n# SBATCH --no\nexport A=1\n#SBATCH -C x\n"
    (tmp_path / "mine.sh").write_text(lines)
    given = ["--site", f"{tmp_path}/mine.sh", "--sbatch=--account=me --qos='q r'"]
    code, out, _ = sweep("--slurm", "--dry-run", *given, **ddp(2))
    shown = " --gpus-per-node=2 --time=63 --cpus-per-task=6 '--comment=two words' -C x --account=me '--qos=q r'"
    assert (code, out.splitlines()[-1].endswith(shown)) == (0, True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--site", "moon"], "give a path, or one of alps, frontier, jsc, "),
        (["data=imagenet"], "no cell can run: data=imagenet needs data.root="),
        (["data=imagenet", "data.root=FILE"], "no cell can run: there is no folder FILE/train"),
        (["data.root=FILE"], "no cell can run: data.root=FILE is not a folder"),
        (["--pack", "0"], "--pack=0 must be 1 or more"),
        (["--throttle", "-1"], "--throttle=-1 must be 0 or more"),
        (["results_dir=FILE/results"], "FILE/results cannot be written (Not a directory)"),
    ],
)
@pytest.mark.parametrize("start", ["--slurm --dry-run", "--slurm", "--local"])
def test_a_plan_and_a_submission_and_a_local_sweep_make_the_same_checks(
    tmp_path: Path, submitted: Path, sweep: Sweep, start: str, options: list[str], expected: str
) -> None:
    """The options of Slurm are checked without it, too."""
    (file := tmp_path / "file").touch()
    code, _, said = sweep(*start.split(), *(word.replace("FILE", str(file)) for word in options), **ddp(2))
    assert (code, said.count("\n"), expected.replace("FILE", str(file)) in said) == (2, 1, True), said
    assert not submitted.exists()


def test_a_local_sweep_refuses_options_of_slurm(sweep: Sweep) -> None:
    code, _, said = sweep("--local", "--pack", "2")
    assert (code, "--local ignores --site, --sbatch, --throttle and --pack: leave them out" in said) == (2, True), said


@pytest.mark.parametrize("plan", [["--dry-run"], []], ids=["plan", "submission"])
def test_a_gpu_count_that_does_not_fill_its_nodes_is_refused(submitted: Path, sweep: Sweep, plan: list[str]) -> None:
    code, _, said = sweep("--slurm", *plan, "gpus=[2,6]", "batch=12", **ddp(2))
    assert (code, "gpus=6 does not fill nodes of 4 GPUs" in said, submitted.exists()) == (2, True, False)


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
    tmp_path: Path, submitted: Path, sweep: Sweep, option: str, code: int
) -> None:
    words = ["data=imagenet", f"data.root={tmp_path}/nowhere"]
    assert sweep(option, "--dry-run", *words)[0] == code
    assert sweep(*words)[0] == 0  # a list of the cells alone


def test_a_quotation_that_is_not_closed_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(write(tmp_path)), "--slurm", "--sbatch", '--x "'])
    assert end.value.code == 2
    assert 'argument --sbatch: --x ": no closing quotation' in capsys.readouterr().err


def test_the_time_of_what_has_not_run_is_unknown_not_0(sweep: Sweep) -> None:
    rest = "2 cells have no finished run to estimate from"
    code, out, _ = sweep(repeats=2)
    assert (code, out.splitlines()[-1]) == (0, f"remaining, one after another: unknown; {rest}")


@pytest.mark.parametrize("option", ["--slurm", "--local"])
def test_a_claim_that_no_sweep_has_written_is_named(
    tmp_path: Path, submitted: Path, sweep: Sweep, alone: None, option: str
) -> None:
    """Garbage, a folder and a FIFO, just made. A claim of a sweep that is alive is not named."""
    held = [claim(tmp_path / "results", cell.key) for cell in planned(write(tmp_path, **SINGLE, repeats=4))]
    garbage, folder, pipe, _ = paths = [one.path for one in held if one is not None]
    for path in paths[:3]:
        path.unlink()
    garbage.write_bytes(b"\xff")
    folder.mkdir()
    os.mkfifo(pipe)
    code, said, _ = sweep(option, repeats=4)
    assert code == 1
    assert [f"{path} holds a cell, but no sweep has written it" in said for path in paths] == [True, True, True, False]
    assert not submitted.exists()


def test_a_sweep_whose_claim_was_taken_over_ends_its_ranks_with_one_line(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, sweep: Sweep
) -> None:
    (cell,) = planned(write(tmp_path, **SINGLE))
    started = list[subprocess.Popen[bytes]]()

    def start(*_: object) -> subprocess.Popen[bytes]:
        (tmp_path / "results/.sweep" / f"{cell.key}.2").write_text("{}")
        started.append(subprocess.Popen(["sleep", "300"], start_new_session=True))
        return started[0]

    monkeypatch.setattr(local, "_start", start)
    code, _, said = sweep("--local")
    assert (code, said.count("\n"), "another sweep has taken its cell over" in said) == (1, 1, True)
    assert started[0].returncode is not None


@pytest.mark.parametrize(("status", "expected"), [("ok", 0), ("unsupported", 0), ("diverged", 1), ("oom", 1)])
def test_a_local_sweep_that_finds_a_failed_cell_exits_with_1(
    tmp_path: Path, sweep: Sweep, alone: None, status: str, expected: int
) -> None:
    """It runs nothing. Else a loop until all is well would end with the second call."""
    record(tmp_path / "results", planned(write(tmp_path, **SINGLE))[0], status)
    code, out, _ = sweep("--local")
    assert (code, out.startswith(f"1 cells: {status}\n")) == (expected, True)


@pytest.mark.parametrize("show", [[], ["--dry-run"]], ids=["start", "plan"])
def test_cells_of_more_ranks_than_this_machine_may_start_are_named(
    monkeypatch: pytest.MonkeyPatch, sweep: Sweep, alone: None, show: list[str]
) -> None:
    monkeypatch.setattr(local, "most_ranks", lambda: 1)
    code, out, _ = sweep("--local", *show, **ddp(2, 4))
    named = "2 cells need up to 4 ranks, this machine may start 1 (one for each GPU, without GPUs two for" in out
    assert (code, named, "--dry-run" in out) == (0, True, False)


def test_a_status_says_that_slurm_does_not_answer(tmp_path: Path, submitted: Path, sweep: Sweep) -> None:
    """Where it does, and where no cell was submitted, there is nothing to say."""
    results = tmp_path / "results"
    (cell,) = planned(write(tmp_path, **SINGLE))
    lines = list[str]()
    for step in ("no job", "answers", "does not", "has ended"):
        if step == "answers":
            assert claim(results, cell.key, "ddlbench-tiny-a")
        answers = {"answers": "echo ddlbench-tiny-a 1 0", "has ended": "exit 0"}
        (tmp_path / "squeue").write_text(f"#!/bin/bash\n{answers.get(step, 'exit 1')}\n")
        if step == "has ended":
            (claimed,) = (results / ".sweep").glob("*.1")
            claimed.write_text(json.dumps(asdict(Owner.this("ddlbench-tiny-a")) | {"started": -1}))
        code, out, _ = sweep("--status")
        assert code == 0
        lines.append(out)
    assert ["squeue does not answer" in text for text in lines] == [False, False, True, False]
    shown = [text.splitlines()[0] for text in lines]
    assert shown == ["1 cells: missing", "1 cells: queued", "1 cells: queued", "1 cells: missing"]
    output = f"{results}/.sweep/logs/ddlbench-tiny-a-*.out"
    ended = f"missing although their Slurm job has ended: 1 cells; its output: {output}"
    assert [ended in text for text in lines] == [False, False, False, True]


def test_cancel_says_what_it_could_not_end(
    tmp_path: Path, submitted: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs, one of another user; a sweep of this machine, one of another machine and one of another user."""
    cells, results = planned(write(tmp_path, **SINGLE, repeats=5)), tmp_path / "results"
    mine, theirs = "ddlbench-tiny-mine", "ddlbench-tiny-theirs"
    this = Owner.this()
    owners = [Owner.this(mine), Owner.this(theirs), this, replace(this, place="elsewhere"), replace(this, pid=1)]
    owners[4] = replace(owners[4], started=_started(1))
    for cell, owner in zip(cells, owners, strict=True):
        assert claim(results, cell.key)
        (results / ".sweep" / f"{cell.key}.1").write_text(json.dumps(asdict(owner)))
    (tmp_path / "squeue").write_text(f"#!/bin/bash\necho {mine} 1 0\necho {theirs} 2 0\n")
    program(tmp_path / "scancel", f"#!/bin/bash\necho $* >> {tmp_path}/cancelled\n[ $1 = --name={mine} ]\n")
    signalled = list[tuple[int, int]]()

    def kill(pid: int, number: int) -> None:
        if pid == 1:
            raise PermissionError
        signalled.append((pid, number))

    monkeypatch.setattr(os, "kill", kill)
    assert sweep("--cancel", "--dry-run", repeats=5)[0] == 0
    assert not signalled
    assert not (tmp_path / "cancelled").exists()
    code, said, _ = sweep("--cancel", repeats=5)
    assert code == 1
    assert said.startswith("cancelled: 1 Slurm jobs, 1 local sweeps\n3 of other users or machines still hold")
    assert signalled == [(os.getpid(), signal.SIGTERM)]  # a shell's background processes ignore SIGINT
    assert sorted((tmp_path / "cancelled").read_text().split()) == [f"--name={mine}", f"--name={theirs}"]
