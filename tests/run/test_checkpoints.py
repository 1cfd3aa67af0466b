"""Which runs cannot be saved so that they continue exactly. That the others do: tests/equality/test_resume.py."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddlbench.checkpoint import Live, complete
from ddlbench.config.choices import choices
from ddlbench.config.compose import make_job
from ddlbench.config.keys import Checkpoint
from ddlbench.errors import Unsupported
from ddlbench.ranks.control import barrier, without_timeout
from ddlbench.ranks.launch import Launch
from ddlbench.run.checkpoints import Checkpoints, check_checkpoints, open_checkpoints
from ddlbench.run.supervisor import Supervisor
from tests.support.ranks import run_ranks
from tests.support.runs import composed


def refusal(*words: str) -> str | None:
    config = composed("+model=resnet50", *words)
    try:
        check_checkpoints(config, make_job(config, Launch("torchrun", world_size=2), torch.device("cpu")))
    except Unsupported as reason:
        return str(reason)
    return None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("+framework=ddp framework.comm_hook=noop", "ddp: with comm_hook=noop every rank has other weights"),
        ("+framework=horovod framework.adasum=true", "horovod: Adasum's optimizer keeps weights of its own"),
        ("+framework=zero1 framework.offload_optimizer=true", "buffers on the host are not saved"),
        ("+framework=zero3 framework.offload_parameters=true", "buffers on the host are not saved"),
        ("+framework=zero2 train.precision=bf16 framework.mixed_precision=weights", "keeps a second copy"),
        ("+framework=zero0 train.precision=fp16", "DeepSpeed's state of the loss scale is not saved"),
    ],
)
def test_what_could_not_continue_exactly_is_refused(words: str, reason: str) -> None:
    said = refusal(*words.split(), "checkpoint.every=1")
    assert said is not None
    assert reason in said
    assert said.endswith("set checkpoint.every=null")
    assert refusal(*words.split()) is None


@pytest.mark.parametrize("framework", choices("framework"))
def test_every_framework_saves(framework: str) -> None:
    assert refusal(f"+framework={framework}", "checkpoint.every=1") is None


def test_a_trainer_that_cannot_be_saved_is_refused() -> None:
    config = SimpleNamespace(checkpoint=Checkpoint(every=1), framework=SimpleNamespace(name="other"))
    attempt: Any = SimpleNamespace(config=config)
    nothing: Any = object()
    with pytest.raises(Unsupported, match=r"^other does not save checkpoints: set checkpoint.every=null$"):
        open_checkpoints(attempt, nothing, nothing, nothing, nothing)


def save_slowly(folder: Path) -> bool:
    """Rank 1 needs three times the timeout of collectives to write its part."""
    rank, weight = dist.get_rank(), torch.nn.Parameter(torch.ones(3))

    def live() -> Live:
        time.sleep(3 * rank)
        return Live({"weight": weight}, torch.optim.SGD([weight]))

    trainer = SimpleNamespace(live=live, numbers=dict, updates=1)
    supervisor: Any = object.__new__(Supervisor)
    vars(supervisor).update(attempt=SimpleNamespace(device=torch.device("cpu")), timeout_s=1.0, rank=rank)
    checkpoints: Any = object.__new__(Checkpoints)
    vars(checkpoints).update(
        attempt=SimpleNamespace(record=None, run_id="run"), supervisor=supervisor, trainer=trainer,
        rates=SimpleNamespace(state=lambda: {"step": 0, "first": None, "last": None}), every=1, keep=2,
        number=1, lineage=[1], rank=rank, place=folder, folder=folder / "checkpoints-1", seconds=[],
    )  # fmt: skip
    run: Any = SimpleNamespace(job=SimpleNamespace(device=torch.device("cpu")), epochs=9, elapsed_s=0.0)
    with without_timeout(timedelta(seconds=1)):
        barrier()
    checkpoints.save(run, 0)
    return bool(complete(checkpoints.folder))


def test_a_rank_that_writes_longer_than_the_timeout_does_not_end_the_run(tmp_path: Path) -> None:
    assert run_ranks(2, save_slowly, tmp_path) == [True, True]


def test_only_rank_0_looks_for_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranks would list the same folders at once."""
    monkeypatch.setattr("ddlbench.run.checkpoints.from_rank_0", lambda here: here)
    checkpoints: Any = object.__new__(Checkpoints)
    checkpoints.rank, checkpoints.place = 1, SimpleNamespace(glob=lambda _: pytest.fail("looked for folders"))
    assert checkpoints._newest_sound() is None
