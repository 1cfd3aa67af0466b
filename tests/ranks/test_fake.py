"""One rank of a world that does not exist: every framework sets up with fake tensors, on "cuda" too.

Not here: Horovod, whose library needs its peers; on "cuda" DeepSpeed and every step, since they ask the driver; steps
with the reducer of DDP, which refuses what the fake group returns.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from ddlbench.job import Batch
from ddlbench.ranks.fake import fake_world
from tests.frameworks.fake import FRAMEWORKS, JOB_CASE, NO_STEP, WORLD, framework
from tests.support.equal import make_job

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ON_CUDA = [name for name in FRAMEWORKS if not name.startswith(("zero0", "zero1", "zero2", "zero3", "deepspeed"))]


@pytest.mark.parametrize("name", ON_CUDA)
def test_sets_up_for_a_gpu_that_is_not_there(name: str) -> None:
    with fake_world(3, WORLD, CUDA):
        job = replace(make_job(JOB_CASE), device=CUDA)
        trainer = framework(name).setup(job)
        weights = [weight for group in trainer.optimizer.param_groups for weight in group["params"]]
        assert weights
        local = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
        assert all(isinstance(weight, FakeTensor) and weight.device == CUDA for weight in local)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # DeepSpeed's
@pytest.mark.parametrize("name", sorted(set(FRAMEWORKS) - NO_STEP))
def test_steps_without_memory(name: str) -> None:
    with fake_world(0, WORLD, CPU):
        job = make_job(JOB_CASE)
        trainer = framework(name).setup(job)
        samples = job.replica_batch(trainer.place.data_size)
        tokens = torch.zeros(samples, 16, dtype=torch.long)
        batch = Batch(tokens, tokens, torch.ones(samples, dtype=torch.bool))
        loss = trainer.step(batch if trainer.place.reads_data else None)
        assert (loss is not None) == trainer.place.reports
        assert loss is None or isinstance(loss, FakeTensor)


def test_the_world_ends_with_the_block() -> None:
    swap = torch.utils.swap_tensors
    with fake_world(5, 1024, CUDA):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 1024)
        assert isinstance(torch.zeros(2, device=CUDA), FakeTensor)
    assert not dist.is_initialized()
    assert torch.utils.swap_tensors is swap
    assert not isinstance(torch.zeros(2), FakeTensor)
