"""What the loop gets, from the place of its rank. A set-up that fails half-way leaves no model behind, because process
groups must not be destroyed while one exists."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from ddlbench.config.keys import MODES
from ddlbench.errors import Unsupported, UserError
from ddlbench.job import Place
from ddlbench.ranks.boundary import StopRequest
from ddlbench.ranks.launch import Launch, group_timeout
from ddlbench.run import attempt as attempt_module
from ddlbench.run.attempt import check, close, make_run, seed_replica
from ddlbench.run.settings import check_precision
from tests.support.simulated_run import job_of


def test_every_mode_that_measures_has_a_scenario() -> None:
    assert (*attempt_module.SCENARIOS, "rehearsal") == MODES


def test_data_that_the_system_does_not_let_a_user_read_are_one_line(tmp_path: Path) -> None:
    """A name that is too long; a folder of another user raises the same kind of error."""
    words = ("+framework=ddp", "+model=resnet50", "data=imagenet", f"data.root={tmp_path}", f"results_dir={tmp_path}")
    config, _ = job_of((*words, f"data.train_dir={'x' * 300}"), 1)
    with pytest.raises(UserError, match=r"^the data cannot be read \(.*x: File name too long\): check permissions"):
        check(config, MagicMock(), torch.device("cpu"))


@pytest.mark.parametrize(("rank", "local_rank", "leads"), [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)])
def test_one_rank_of_each_node_reads_what_the_node_has_once(rank: int, local_rank: int, leads: bool) -> None:
    """Two nodes of two ranks: the energy of each node's CPU, and its load."""
    config, job = job_of(("+framework=ddp", "+model=resnet50"), 4)
    scenario: Any = SimpleNamespace(begin=lambda feed: {})
    supervisor: Any = SimpleNamespace(progressed=lambda: None, stop=StopRequest(0))
    feed: Any = SimpleNamespace()
    here = replace(job, rank=rank, local_rank=local_rank)
    attempt: Any = SimpleNamespace(config=config, job=here, record=None, dataset={})
    run = make_run(attempt, scenario, Place(rank, 4), feed, supervisor)
    assert run.meter is not None
    assert run.meter.leader == leads


def test_each_seed_and_each_part_draws_other_numbers() -> None:
    """Also on the CPU, whose generator takes 32 bits of a seed. Ranks that share layers are one part, and add the
    number of parts to the seed in each step."""
    _, job = job_of(("+framework=ddp", "+model=resnet50"), 8)
    draws, low_bits = set[tuple[float, ...]](), set[int]()
    for seed in (0, 1, 2**31 - 1):
        for data_rank in range(2):
            for stage in range(2):
                alike = set[tuple[float, ...]]()
                for tp in range(2):
                    place = Place(data_rank, 2, coordinates={"dp": data_rank, "pp": stage, "tp": tp})
                    seed_replica(replace(job, seed=seed), place)
                    alike.add(tuple(torch.rand(4).tolist()))
                assert len(alike) == 1
                draws |= alike
                low_bits |= {(torch.initial_seed() + 4 * step) % 2**32 for step in range(1000)}
    assert len(draws) == 3 * 4
    assert len(low_bits) == 3 * 4 * 1000


@pytest.mark.parametrize("capability", [7, 8])
def test_a_gpu_without_bf16_is_refused_because_torch_would_emulate_it(
    monkeypatch: pytest.MonkeyPatch, capability: int
) -> None:
    """A V100 has compute capability 7.0."""
    config, _ = job_of(("+framework=ddp", "+model=resnet50", "train.precision=bf16"), 1)
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "get_device_name": "Tesla V100",
        "get_device_properties": SimpleNamespace(major=capability),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "hip", None)
    check_precision(config.train, torch.device("cpu"))
    if capability >= 8:
        check_precision(config.train, torch.device("cuda", 0))
        return
    check_precision(replace(config.train, precision="fp16"), torch.device("cuda", 0))
    with pytest.raises(Unsupported, match=r"^Tesla V100 has no bf16: set train\.precision=fp16 or fp32$"):
        check_precision(config.train, torch.device("cuda", 0))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_error_of_connecting_has_details_and_comes_before_the_supervisors_limit(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """On a GPU a group waits for a minute beyond train.timeout_s."""

    class ConnectingError(BaseException):
        """Is no failure that a run records."""

    def connect(*_: object, **__: object) -> None:
        raise ConnectingError

    config, _ = job_of(("+framework=ddp", "+model=resnet50"), 2)
    supervisor = MagicMock()
    supervisor.__enter__.return_value = supervisor
    replaced = {"pick_device": lambda *_: torch.device(device), "connect": connect, "Supervisor": lambda *_: supervisor}
    nothing = dict.fromkeys(("check", "set_switches", "disable_nccl_abort"), lambda *_: None)
    for name, value in (replaced | nothing).items():
        monkeypatch.setattr(attempt_module, name, value)
    with pytest.raises(ConnectingError):
        attempt_module.run_attempt(config, Launch("torchrun", 0, 2, 0, 2, 1, "localhost", 28770), 0.0)
    limit_s = config.train.timeout_s + supervisor.expect.call_args.kwargs["more_s"]
    assert limit_s >= group_timeout(torch.device(device), config.train.timeout_s).total_seconds() + 10


Models = list["weakref.ref[nn.Module]"]


def set_up(models: Models) -> None:
    model = nn.Linear(1, 1)
    models.append(weakref.ref(model))
    wrap(model)


def wrap(model: nn.Module) -> None:
    wrapped = nn.Sequential(model)
    try:
        raise ValueError("a library's own error")
    except ValueError as error:
        raise RuntimeError(f"cannot train {wrapped}") from error


def test_the_model_of_a_failed_set_up_is_forgotten() -> None:
    models: Models = []
    with pytest.raises(RuntimeError) as caught:
        set_up(models)
    assert models[0]() is not None  # in the frames that the error has passed through
    close(ExitStack(), caught.value)
    assert models[0]() is None
    assert caught.traceback[-1].name == "wrap"  # the traceback can still be printed
