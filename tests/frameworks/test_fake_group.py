"""Every framework's groups follow from plain integers: one process sets up and steps as any rank of eight.

torch's fake process group accepts every collective and sends nothing. Not here: Horovod, whose library needs its peers,
a step of those with DDP's reducer, which refuses what the fake group returns, and zero3 as another rank than 0, where
DeepSpeed compares with what rank 0 sent.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddlbench.frameworks.shared import groups
from ddlbench.job import Batch
from tests.frameworks.fake import FRAMEWORKS, JOB_CASE, NO_STEP, WORLD, framework
from tests.support.equal import make_job

RANKS = [(name, rank) for name in FRAMEWORKS for rank in (0, 5) if (name, rank) != ("zero3", 5)]
# The frameworks that use a group of all ranks, in these layouts.
ALL_RANKS = {"ddp", "fsdp", "local_sgd", "deepspeed", "zero0", "zero1", "zero2", "zero3", "pipedream"}


@pytest.fixture(autouse=True)
def torch_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's stage 3 replaces it for good, and other tests run in this process."""
    monkeypatch.setattr(functional, "linear", functional.linear)


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_one_process_sets_up_as_one_rank_of_eight(name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator of all ranks only for a framework that uses it."""
    made: list[int] = []
    monkeypatch.setattr(groups, "first_operation", lambda _, group: made.append(dist.get_world_size(group)))
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        job = make_job(JOB_CASE)
        assert (job.rank, job.world_size) == (rank, WORLD)
        chosen = framework(name)
        chosen.check(job)
        trainer = chosen.setup(job)
        assert (WORLD in made) == (name in ALL_RANKS)
        place = trainer.place
        assert 0 <= place.data_rank < place.data_size <= WORLD
        if name not in NO_STEP:
            samples = job.replica_batch(place.data_size)
            tokens = torch.zeros(samples, 16, dtype=torch.long)
            batch = Batch(tokens, tokens, torch.ones(samples, dtype=torch.bool))
            loss = trainer.step(batch if place.reads_data else None)
            assert (loss is not None) == place.reports
        trainer.close()
    finally:
        dist.destroy_process_group()
