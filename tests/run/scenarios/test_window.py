"""profile=true: what a window says, and real windows of every framework on two ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ddlbench.config.choices import choices
from ddlbench.config.schema import Config
from ddlbench.errors import RunError
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.megatron.adapter import Megatron
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Batch, Framework, Place, Trainer
from ddlbench.measure.profiling.profile import RankWindow, Seconds
from ddlbench.measure.profiling.spans import BACKWARD, COMMUNICATE, DATA, FORWARD, UPDATE, profiling
from ddlbench.ranks.launchers import free_port
from ddlbench.recipe.recipe import Rates
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.scaling import breakdown
from ddlbench.results.tables.tables import make_tables
from ddlbench.run.scenarios import Training, profile_section
from tests.equality.cases import MODELS
from tests.run.scenarios.windows import run_of, windows
from tests.support.equal import Rows, make_job
from tests.support.libraries import why_no_horovod
from tests.support.pictures import write_folders
from tests.support.processes import PYTHON, run
from tests.support.ranks import run_ranks
from tests.support.reference import Case
from tests.support.rehearsals import OF_IMAGES
from tests.support.runs import epochs, record

# PipeDream refuses tied weights.
CASE = Case("window", replace(MODELS["gpt2"], tie_weights=False), global_batch=12, steps=9)  # pyright: ignore
STEPS, SLEEP_S = 2, 3.0  # much longer than all else in a step, also on a busy machine


def frameworks() -> dict[str, Framework]:
    """Every option on two ranks but `single`."""
    result: dict[str, Framework] = {
        "ddp": DDP(),
        "horovod": Horovod(),
        "local_sgd": LocalSGD(local_steps=1),
        "parameter_server": ParameterServer(),
        "fsdp": FSDP(),
        **{f"zero{stage}": DeepSpeed(zero_stage=stage, persistence_threshold=0) for stage in range(4)},
        "deepspeed": DeepSpeed(zero_stage=1),
        "tensor": TensorParallel(),
        "megatron": Megatron(),
        **{name: Pipeline(schedule=name) for name in ("gpipe", "1f1b", "zero_bubble")},
        **{
            name: Pipeline(schedule=name, virtual_stages=2)
            for name in ("interleaved", "looped_bfs", "zbv", "dualpipev")
        },
        "hybrid": Pipeline(tp=2),
        "pipedream": PipeDream(),
        "pipedream_2bw": PipeDream(double_buffered=True),
    }
    if why_no_horovod():
        del result["horovod"]
    return result


class LateOnRank1:
    """A trainer whose rank 1 sleeps before each step of the window."""

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self.trainer, self.rank, self.flush = trainer, rank, trainer.flush

    def step(self, batch: Batch | None) -> Tensor | None:
        time.sleep(SLEEP_S if self.rank == 1 and profiling() else 0.0)
        return self.trainer.step(batch)


@dataclass
class Silent:
    """A trainer of one number that never communicates."""

    place: Place
    updates: int = 0

    def __post_init__(self) -> None:
        self.weight = torch.ones((), requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

    def step(self, batch: Batch | None) -> Tensor:
        self.updates += 1
        return (self.weight * 2).detach()

    def flush(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {"updates": self.updates}


class WindowKept(Rows):
    section: Mapping[str, Any]

    def window(self, section: Mapping[str, Any], save_trace: object) -> None:
        self.section = section


def silent() -> tuple[str, Mapping[str, Any], dict[str, Any], int]:
    """A scenario whose trainer does not communicate: its error, what was recorded, and its facts."""
    job = make_job(CASE)
    trainer = cast(Trainer, Silent(Place(job.rank, 2)))
    run = run_of(trainer, CASE)
    run.validate, run.recorder = False, WindowKept()
    scenario = Training(cast(Config, SimpleNamespace(profile=True, profile_steps=3)), job)
    scenario.trainer, scenario.rates = trainer, Rates(lambda step: 0.1)
    with pytest.raises(RunError) as error:
        scenario.run(run)
    run.feed.close()
    return str(error.value), run.recorder.section, scenario.facts(), len(run.recorder.rows)


@pytest.mark.slow
def test_no_communication_ends_the_attempt_with_an_error() -> None:
    for rank in ranks():
        error, section, facts, epochs = rank.silent
        assert "no communication was seen on rank 0 of 2 in 3 steps" in error
        assert (section["status"], section["reason"]) == ("error", error)
        assert "comm_exposed_share" not in section
        assert epochs == 1, "the measured epoch was recorded before"
        assert facts == {"updates": 9}, "of the measured epoch alone"


@dataclass
class Seen:
    """What two ranks showed, in one start of them."""

    windows: dict[str, dict[str, Any]]
    silent: tuple[str, Mapping[str, Any], dict[str, Any], int]


def show() -> Seen:
    return Seen(windows(CASE, frameworks(), STEPS, LateOnRank1), silent())


@cache
def ranks() -> list[Seen]:
    return run_ranks(2, show)


def seen() -> dict[str, dict[str, Any]]:
    return ranks()[0].windows


@pytest.mark.slow
def test_every_option_is_tried() -> None:
    missing = set(choices("framework")) - set(seen())
    # Those of images alone run as `tensor` and `ddp` do, with other layers.
    assert missing == {"single"} | OF_IMAGES | ({"horovod"} if why_no_horovod() else set())


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


def rank_window(rank: int, collectives: int) -> RankWindow:
    seconds = Seconds(4.0, 1.0, 1.0, 0.0, 0.0, 1.5, 1.0, 0.5, 0.5)
    return RankWindow(rank, "node7", 0, 2, seconds, collectives, (FORWARD,))


def section_of(*collectives: int) -> dict[str, Any]:
    return profile_section([rank_window(rank, count) for rank, count in enumerate(collectives)], 2, False, {})


def test_a_rank_that_shows_no_communication_is_an_error() -> None:
    section = section_of(3, 0)
    assert section["status"] == "error"
    assert "\n" not in section["reason"]
    assert "no communication was seen on rank 1 of 2 in 2 steps" in section["reason"]
    assert not any(name.endswith("_share") for name in section), "no share, rather than 0"
    assert [rank["collectives"] for rank in section["ranks"]] == [3, 0]


def test_one_rank_need_not_communicate() -> None:
    section = section_of(0)
    assert (section["status"], section["reason"], section["step_s"]) == ("ok", None, 2.0)


def test_the_section_by_hand() -> None:
    section = section_of(3, 5)
    assert (section["window_s"], section["step_s"]) == (8.0, 2.0)  # two ranks, two steps each
    assert section["compute_share"] == 0.5
    assert section["comm_exposed_share"] == 0.25
    assert section["ranks"][1] == {
        "rank": 1, "host": "node7", "stage": 0, "collectives": 5, **asdict(rank_window(1, 5).seconds),
        "compute_s": 2.0, "own_s": 2.5, "own_step_s": 1.25,
    }  # fmt: skip


RESNET = [
    "+framework=single", "+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32",
    "train.global_batch=4", "train.epochs=2", "data=imagenet", "loader.workers=0",
]  # fmt: skip


def test_the_measured_epochs_are_those_of_a_run_without_a_window(ddlbench, tmp_path: Path) -> None:
    """Bit-equal losses and metrics, the same ledger, and the same run_id: repeats of one measurement."""
    write_folders(tmp_path / "images", train=4, val=3)  # of three classes: three steps an epoch
    words = [*RESNET, f"data.root={tmp_path}/images"]
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
    words = ["+framework=local_sgd", *RESNET[1:], f"data.root={tmp_path}/images"]
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
    words = ["+framework=ddp", *RESNET[1:], f"data.root={tmp_path}/images", "profile=true"]
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
