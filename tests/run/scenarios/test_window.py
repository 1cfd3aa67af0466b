"""profile=true in whole runs, and real windows of every framework on two ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.job import Batch, Framework, Trainer
from ddlbench.measure.profiling.spans import BACKWARD, COMMUNICATE, DATA, FORWARD, UPDATE, profiling
from ddlbench.ranks.launchers import free_port
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.scaling import breakdown
from ddlbench.results.tables.tables import make_tables
from tests.equality.cases import MODELS
from tests.run.scenarios.windows import windows
from tests.support.libraries import why_no_horovod
from tests.support.pictures import write_folders
from tests.support.processes import PYTHON, run
from tests.support.ranks import run_ranks
from tests.support.reference import Case
from tests.support.rehearsals import OF_IMAGES
from tests.support.runs import RESNET, epochs, record

# PipeDream refuses tied weights.
CASE = Case("window", replace(MODELS["gpt2"], tie_weights=False), global_batch=12, steps=9)  # pyright: ignore
STEPS, SLEEP_S = 2, 3.0  # much longer than all else in a step, also on a busy machine


OPTIONS = {
    "local_sgd": ["framework.local_steps=1"],
    "hybrid": ["framework.tp=2"],
    **{f"zero{stage}": ["framework.persistence_threshold=0"] for stage in range(4)},
}


def frameworks() -> dict[str, Framework]:
    """Every option that trains text on two ranks. Those of images alone run as `tensor` and `ddp` do."""
    left_out = {"single"} | OF_IMAGES | ({"horovod"} if why_no_horovod() else set())
    return {
        name: configuration(f"+framework={name}", "+model=gpt2_small", *OPTIONS.get(name, [])).framework
        for name in choices("framework")
        if name not in left_out
    }


class LateOnRank1:
    """A trainer whose rank 1 sleeps before each step of the window."""

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self.trainer, self.rank, self.flush = trainer, rank, trainer.flush

    def step(self, batch: Batch | None) -> Tensor | None:
        time.sleep(SLEEP_S if self.rank == 1 and profiling() else 0.0)
        return self.trainer.step(batch)


@cache
def seen() -> dict[str, dict[str, Any]]:
    return run_ranks(2, windows, CASE, frameworks(), STEPS, LateOnRank1)[0]


@pytest.mark.slow
def test_every_framework_marks_the_parts_of_a_step() -> None:
    for name, section in seen().items():
        assert {FORWARD, BACKWARD, UPDATE, DATA} <= set(section["spans"]) <= {
            FORWARD, BACKWARD, UPDATE, DATA, COMMUNICATE
        }, name  # fmt: skip
        for rank in section["ranks"]:
            assert min(rank["forward_s"], rank["backward_s"]) > 0, (name, rank)
            # A parameter server updates on a thread of its own, beside the steps.
            assert (rank["update_s"] > 0) == (name != "parameter_server"), (name, rank)


@pytest.mark.slow
def test_shares_sum_to_one_and_all_communicate() -> None:
    for name, section in seen().items():
        assert (section["status"], section["steps"]) == ("ok", STEPS), (name, section["reason"])
        parts = ("compute_share", "comm_exposed_share", "data_share", "idle_share")
        assert sum(section[part] for part in parts) == pytest.approx(1), name
        assert section["comm_share"] >= section["comm_exposed_share"]
        assert all(rank["collectives"] > 0 for rank in section["ranks"]), name


def sleeps(framework: str) -> int:
    """In how many steps rank 0 waits for rank 1: before the first one a parameter server has sent its weights."""
    return STEPS - 1 if framework == "parameter_server" else STEPS


@pytest.mark.slow
def test_a_sleep_in_communication_shows_in_its_share() -> None:
    """Rank 0 communicates while it waits for rank 1: for all sleeps, of a window that is hardly longer."""
    wrong: dict[str, tuple[float, float]] = {}
    for name, section in seen().items():
        rank = section["ranks"][0]
        planted, outcomes = sleeps(name) * SLEEP_S / rank["window_s"], rank["exposed_s"] / rank["window_s"]
        if outcomes < planted - 0.05:
            wrong[name] = (planted, outcomes)
    assert not wrong


@pytest.mark.slow
def test_the_late_rank_is_the_one_that_takes_longer_itself() -> None:
    """Both windows are equally long. Without the wait for the other one rank 1's is longer by about its sleeps."""
    for name, section in seen().items():
        prompt, late = (rank["own_s"] for rank in section["ranks"])
        assert late - prompt > sleeps(name) * SLEEP_S / 2, name


THREE_STEPS = [*RESNET[1:], "train.steps=null", "train.epochs=2", "data=imagenet", "loader.workers=0"]


def test_the_measured_epochs_are_those_of_a_run_without_a_window(ddlbench, tmp_path: Path) -> None:
    """Bit-equal losses and metrics, the same ledger, and the same run_id: repeats of one measurement."""
    write_folders(tmp_path / "images", train=4, val=3)  # of three classes: three steps an epoch
    words = ["+framework=single", *THREE_STEPS, f"data.root={tmp_path}/images"]
    code, said = ddlbench(*words, "results_dir=plain")
    assert code == 0, said
    code, said = ddlbench(*words, "results_dir=profiled", "profile=true", "profile_steps=2", "profile_trace=true")
    assert code == 0, said
    plain, content = record(tmp_path / "plain"), record(tmp_path / "profiled")
    lines, without = epochs(tmp_path / "profiled"), epochs(tmp_path / "plain")
    for name in ("train_loss", "val_loss", "val_top1", "updates", "samples", "lr_last"):
        assert [line[name] for line in lines] == [epoch[name] for epoch in without], name
    assert content["ledger"] == plain["ledger"]
    assert content["run_id"] == plain["run_id"]
    assert "profile" not in plain
    window = content["profile"]
    assert (window["status"], window["steps"], window["lead_in_steps"]) == ("ok", 1, 2)  # an epoch has three steps
    assert window["comm_share"] == 0.0  # one rank
    assert window["trace"] == "trace-rank0.json.gz"
    (folder,) = tmp_path.glob("profiled/*/attempt-1")
    assert (folder / window["trace"]).stat().st_size > 1000
    (line,) = (line for line in said.splitlines() if line.startswith("profiled window"))
    shown = [f"{window[f'{name}_share']:.1%}" for name in ("compute", "comm_exposed", "data", "idle")]
    names = ("computing", "exposed communication", "waiting for data", "idle")
    parts = [f"{share} {name}" for share, name in zip(shown, names, strict=True)]
    assert line == f"profiled window of 1 steps: {', '.join(parts)}"


def test_a_run_whose_shares_are_unknown_is_valid_and_has_no_window_in_the_tables(ddlbench, tmp_path: Path) -> None:
    write_folders(tmp_path / "images", train=4, val=3)
    words = ["+framework=local_sgd", *THREE_STEPS, f"data.root={tmp_path}/images"]
    code, said = ddlbench(*words, "framework.local_steps=4", "results_dir=results", "profile=true")
    assert code == 0, said
    assert "profile=true: the shares are unknown, because the window has 3 steps after 0 others, and needs 4" in said
    content = record(tmp_path / "results")
    assert (content["status"], content["profile"]["status"]) == ("ok", "unknown")
    tables = make_tables(read_all([tmp_path / "results"]))
    (row,) = tables.run_rows
    assert row["status"] == "ok"
    assert row["comm_exposed_share"] is row["profile_step_time_s"] is row["profile_window_s"] is None
    assert row["own_step_source"] == "thread"
    assert breakdown(tables.scaling).empty


@pytest.mark.slow
def test_two_real_ranks_fill_the_columns(tmp_path: Path) -> None:
    """torchrun, the record, and the row of runs.csv."""
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    write_folders(tmp_path / "images", train=4, val=3)
    words = ["+framework=ddp", *THREE_STEPS, f"data.root={tmp_path}/images", "profile=true"]
    words.append(f"results_dir={tmp_path}/results")
    done = run(*command, "-m", "ddlbench", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = record(tmp_path / "results")
    tables = make_tables(read_all([tmp_path / "results"]))
    (row,) = tables.runs.to_dict("records")
    window = content["profile"]
    assert [rank["rank"] for rank in window["ranks"]] == [0, 1]
    assert window["window_s"] == pytest.approx(sum(rank["window_s"] for rank in window["ranks"]))
    exposed = sum(rank["exposed_s"] for rank in window["ranks"]) / window["window_s"]
    assert 0 < exposed == pytest.approx(row["comm_exposed_share"])
    assert row["profile_steps"] == 1
    # An all-reduce of two ranks' gradients; BatchNorm's buffers and what the program itself says are little beside it.
    assert row["sent_step_bytes"] == pytest.approx(2 * 4 * row["parameters"], rel=0.05)
    (merged,) = breakdown(tables.scaling).to_dict("records")
    assert merged["comm_exposed_share"] == pytest.approx(exposed)
    assert merged["profile_step_time_s"] == pytest.approx(window["window_s"] / 2)
