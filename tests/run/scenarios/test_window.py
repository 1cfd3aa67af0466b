"""profile=true: what a window says, and real windows of every framework on two ranks."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ddlbench.config.choices import choices
from ddlbench.data.feed import Request
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Batch, Framework, Trainer
from ddlbench.loop import Run
from ddlbench.measure.profile import RankWindow, Seconds
from ddlbench.measure.profiler import Profiler
from ddlbench.measure.spans import BACKWARD, COMMUNICATE, DATA, FORWARD, UPDATE
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.ranks.control import barrier
from ddlbench.run.scenarios.window import Window, profiled
from tests.equality.test_equal_training import MODELS
from tests.support.equal import Rows, loader, make_job
from tests.support.libraries import why_no_horovod
from tests.support.ranks import run_ranks
from tests.support.reference import Case

# PipeDream refuses tied weights.
CASE = Case("window", replace(MODELS["gpt2"], tie_weights=False), global_batch=12, steps=9)  # pyright: ignore
STEPS, SLEEP_S = 4, 0.4


def frameworks() -> dict[str, Framework]:
    """Every option on two ranks but `single`."""
    found: dict[str, Framework] = {
        "ddp": DDP(),
        "horovod": Horovod(),
        "local_sgd": LocalSGD(local_steps=1),
        "fsdp": FSDP(),
        **{f"zero{stage}": DeepSpeed(zero_stage=stage, persistence_threshold=0) for stage in range(4)},
        "deepspeed": DeepSpeed(zero_stage=1),
        "tensor": TensorParallel(),
        **{name: Pipeline(schedule=name) for name in ("gpipe", "1f1b", "zero_bubble")},
        "interleaved": Pipeline(schedule="interleaved", virtual_stages=2),
        "hybrid": Pipeline(tp=2),
        "pipedream": PipeDream(),
        "pipedream_2bw": PipeDream(double_buffered=True),
    }
    if why_no_horovod():
        del found["horovod"]
    return found


def run_of(trainer: Trainer, case: Case = CASE) -> Run:
    job = make_job(case)
    size = job.replica_batch(trainer.place.data_size)
    feed = loader().open(case.data, Request(case.model, trainer.place, job.device, job.seed, size))
    return Run(job, trainer.place, feed, 1, 0, Rows(), Progress(False), Boundary(job.device))


class LateOnRank1:
    """A trainer whose rank 1 sleeps before each step."""

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self.trainer, self.rank, self.flush = trainer, rank, trainer.flush

    def step(self, batch: Batch | None) -> Tensor | None:
        time.sleep(SLEEP_S if self.rank == 1 else 0.0)
        return self.trainer.step(batch)


def windows() -> dict[str, dict[str, Any]]:
    """The section of every framework's window, rank 1 being late."""
    linear, found = torch.nn.functional.linear, dict[str, dict[str, Any]]()
    for name, framework in frameworks().items():
        job = make_job(CASE)
        framework.check(job)
        trainer = framework.setup(job)
        run = run_of(trainer)
        window = profiled(run, cast(Trainer, LateOnRank1(trainer, job.rank)), STEPS)
        found[name] = window.section()
        run.feed.close()
        barrier()
        trainer.close()
        torch.nn.functional.linear = linear  # DeepSpeed's stage 3 leaves its own there
    return found


@cache
def seen() -> dict[str, dict[str, Any]]:
    return run_ranks(2, windows, timeout_s=280)[0]


@pytest.mark.slow
def test_every_option_is_tried() -> None:
    missing = set(choices("framework")) - set(seen())
    assert missing == {"single"} | ({"horovod"} if why_no_horovod() else set())


@pytest.mark.slow
def test_every_framework_marks_the_parts_of_a_step() -> None:
    for name, section in seen().items():
        assert {FORWARD, BACKWARD, UPDATE, DATA} <= set(section["spans"]) <= {
            FORWARD, BACKWARD, UPDATE, DATA, COMMUNICATE
        }, name  # fmt: skip
        for rank in section["ranks"]:
            assert min(rank["forward_s"], rank["backward_s"], rank["update_s"]) > 0, (name, rank)


@pytest.mark.slow
def test_shares_sum_to_one_and_all_communicate() -> None:
    for name, section in seen().items():
        assert (section["status"], section["steps"]) == ("ok", STEPS), (name, section["reason"])
        parts = ("compute_share", "comm_exposed_share", "data_share", "idle_share")
        assert sum(section[part] for part in parts) == pytest.approx(1), name
        assert section["comm_share"] >= section["comm_exposed_share"]
        assert all(rank["collectives"] > 0 for rank in section["ranks"]), name


@pytest.mark.slow
def test_a_sleep_in_communication_shows_in_its_share() -> None:
    """Rank 0 communicates while it waits for rank 1: for STEPS sleeps, of a window that is hardly longer."""
    wrong: dict[str, tuple[float, float]] = {}
    for name, section in seen().items():
        rank = section["ranks"][0]
        planted, found = STEPS * SLEEP_S / rank["window_s"], rank["exposed_s"] / rank["window_s"]
        if found < planted - 0.05:
            wrong[name] = (planted, found)
    assert not wrong


@pytest.mark.slow
def test_the_late_rank_is_the_one_that_takes_longer_itself() -> None:
    """Both windows are equally long; without the wait for the other one, rank 1's is longer by its sleeps."""
    for name, section in seen().items():
        prompt, late = (rank["own_s"] for rank in section["ranks"])
        assert late - prompt == pytest.approx(STEPS * SLEEP_S, rel=0.2), name


def rank_window(rank: int, collectives: int) -> RankWindow:
    seconds = Seconds(4.0, 1.0, 1.0, 0.0, 0.0, 1.5, 1.0, 0.5, 0.5)
    return RankWindow(rank, 2, seconds, collectives, (FORWARD,))


def window_of(*collectives: int) -> Window:
    ranks = [rank_window(rank, count) for rank, count in enumerate(collectives)]
    return Window(ranks, 2, False, Profiler(torch.device("cpu")))


def test_a_rank_that_shows_no_communication_is_an_error() -> None:
    window = window_of(3, 0)
    assert window.failure is not None
    assert "\n" not in window.failure
    assert "no communication was seen on rank 1 of 2 in 2 steps" in window.failure
    section = window.section()
    assert (section["status"], section["reason"]) == ("error", window.failure)
    assert not any(name.endswith("_share") for name in section), "no share, rather than 0"
    assert [rank["collectives"] for rank in section["ranks"]] == [3, 0]


def test_one_rank_need_not_communicate() -> None:
    assert window_of(0).failure is None
    assert window_of(0).section()["step_s"] == 2.0


def test_the_section_by_hand() -> None:
    section = window_of(3, 5).section()
    assert (section["window_s"], section["step_s"]) == (8.0, 2.0)  # two ranks, two steps each
    assert section["compute_share"] == 0.5
    assert section["comm_exposed_share"] == 0.25
    assert section["ranks"][1] == {
        "rank": 1, "collectives": 5, **asdict(rank_window(1, 5).seconds), "compute_s": 2.0, "own_s": 2.5,
    }  # fmt: skip


GPT2 = [
    "+framework=single", "+model=gpt2_small", "model.n_layer=1", "model.n_embd=32", "model.n_head=2",
    "model.seq_len=32", "train.global_batch=2", "train.steps=3", "train.epochs=2",
]  # fmt: skip


def record(results: Path) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    """run.json, the lines of epochs.jsonl, and the folder of the only attempt."""
    (path,) = results.glob("*/attempt-1/run.json")
    lines = (path.parent / "epochs.jsonl").read_text().splitlines()
    return json.loads(path.read_text()), [json.loads(line) for line in lines], path.parent


def test_the_measured_epochs_are_those_of_a_run_without_a_window(ddlbench, tmp_path: Path) -> None:
    """Bit-equal losses and metrics, the same ledger, and the same run_id: repeats of one measurement."""
    code, said = ddlbench(*GPT2, "results_dir=plain")
    assert code == 0, said
    code, said = ddlbench(*GPT2, "results_dir=profiled", "profile=true", "profile_steps=2", "profile_trace=true")
    assert code == 0, said
    (plain, epochs, _), (content, lines, folder) = record(tmp_path / "plain"), record(tmp_path / "profiled")
    for name in ("train_loss", "val_loss", "val_perplexity_token", "updates", "samples", "lr_last"):
        assert [line[name] for line in lines] == [epoch[name] for epoch in epochs], name
    assert content["ledger"] == plain["ledger"]
    assert content["run_id"] == plain["run_id"]
    assert "profile" not in plain
    window = content["profile"]
    assert (window["status"], window["steps"], window["lead_in_steps"]) == ("ok", 1, 2)  # an epoch has three steps
    assert window["comm_share"] == 0.0  # one rank
    assert window["trace"] == "trace-rank0.json.gz"
    assert (folder / window["trace"]).stat().st_size > 1000
    assert "profiled window of 1 steps" in said
