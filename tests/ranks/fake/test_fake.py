"""One rank of a world that does not exist: every framework sets up with fake tensors, on "cuda" too, since its groups
follow from plain integers.

Not here: every step on "cuda", since it asks the driver; steps with the reducer of DDP, which refuses what the fake
group returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.errors import Unsupported
from ddlbench.frameworks.pipeline import stages
from ddlbench.frameworks.shared import groups
from ddlbench.job import Batch, Framework, Job
from ddlbench.ranks.fake.fake import fake_world
from tests.equality.cases import MODELS, RATES
from tests.support.equal import flops_per_block, make_job
from tests.support.libraries import needs_horovod
from tests.support.reference import Case
from tests.support.rehearsals import OF_IMAGES, OF_TEXT

WORLD = 8
LAYOUTS = {  # five blocks and four heads divide over at most five stages and four ranks
    "tensor": ["framework.tp=4", "framework.dp=2"],
    "megatron": ["framework.tp=4", "framework.dp=2"],
    "channel": ["framework.tp=4", "framework.dp=2"],
    "spatial": ["framework.sp=2", "framework.dp=4"],
    "hybrid": ["framework.tp=2", "framework.pp=2", "framework.dp=2"],
    **{name: ["framework.dp=2"] for name in ("gpipe", "1f1b", "zero_bubble", "pipedream_2bw")},
    **{name: ["framework.dp=4"] for name in ("interleaved", "looped_bfs", "zbv", "dualpipev")},
    "pipedream": ["framework.dp=8"],  # a tied embedding may not be on two stages
}
EVERY = choices("framework")
FRAMEWORKS = sorted(set(EVERY) - {"single", "horovod"} - OF_IMAGES)  # that train GPT-2
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ALONE = {"single": "runs in one process, this launch has 8"}
REFUSED = {  # of a model
    "gpt2": ALONE | dict.fromkeys(OF_IMAGES, "to split: choose framework=tensor"),
    "resnet": ALONE | dict.fromkeys(OF_TEXT, "its layers are those of transformers"),
}
RANKS = {"cpu": 5, "cuda": 3}
STEPPING = sorted(set(FRAMEWORKS) - {"ddp", "local_sgd", "tensor", "megatron"})
# The frameworks that use a group of all ranks, in these layouts.
ALL_RANKS = {"ddp", "fsdp", "local_sgd", "deepspeed", "zero0", "zero1", "zero2", "zero3", "pipedream"}


def framework(name: str) -> Framework:
    return configuration(f"+framework={name}", "+model=gpt2_small", *LAYOUTS.get(name, [])).framework


def job_of(model: str, device: torch.device) -> Job:
    """A small job, within a fake world."""
    return replace(make_job(Case(model, MODELS[model], lr=RATES[model], global_batch=32)), device=device)


@pytest.fixture(autouse=True)
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pipeline would count the FLOPs of the same model again."""
    monkeypatch.setattr(stages, "forward_flops_per_block", flops_per_block)


def setups() -> Iterator[Any]:
    for name, device in product(EVERY, (CPU, CUDA)):
        marks = [needs_horovod] if name == "horovod" else []
        # Below they are set up on the CPU too, and step.
        marks += [pytest.mark.slow] if device == CPU and name in STEPPING else []
        yield pytest.param(name, device, marks=marks, id=f"{name}-{device.type}")


def check_weights(trainer: Any, device: torch.device) -> None:
    weights = list((trainer.engine.module if hasattr(trainer, "engine") else trainer.model).parameters())
    assert weights
    local = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
    assert all(isinstance(weight, FakeTensor) and weight.device == device for weight in local)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # DeepSpeed's
@pytest.mark.parametrize("model", [pytest.param("resnet", marks=pytest.mark.slow), "gpt2"])
@pytest.mark.parametrize(("name", "device"), list(setups()))
def test_every_framework_sets_up_as_one_rank_of_eight(
    name: str, device: torch.device, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL makes a communicator of all ranks only for a framework that uses it."""
    chosen, rank, made = framework(name), RANKS[device.type], list[int]()
    monkeypatch.setattr(groups, "first_operation", lambda _, group: made.append(dist.get_world_size(group)))
    with fake_world(rank, WORLD, device, chosen):
        job = job_of(model, device)
        if name in REFUSED[model]:
            with pytest.raises(Unsupported, match=REFUSED[model][name]):
                chosen.check(job)
            return
        chosen.check(job)
        trainer: Any = chosen.setup(job)
        place = trainer.place
        assert 0 <= place.data_rank < place.data_size <= WORLD
        check_weights(trainer, device)
        trainer.close()
    averages = name == "parameter_server" and model == "resnet"  # the statistics of BatchNorm
    assert name not in FRAMEWORKS or (WORLD in made) == (name in ALL_RANKS or averages)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # DeepSpeed's
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("name", STEPPING)
def test_steps_without_memory(name: str, rank: int) -> None:
    chosen = framework(name)
    with fake_world(rank, WORLD, CPU, chosen):
        job = job_of("gpt2", CPU)
        trainer = chosen.setup(job)
        check_weights(trainer, CPU)
        samples = job.replica_batch(trainer.place.data_size)
        tokens = torch.zeros(samples, 16, dtype=torch.long)
        batch = Batch(tokens, tokens, torch.ones(samples, dtype=torch.bool))
        loss = trainer.step(batch if trainer.place.reads_data else None)
        assert (loss is not None) == trainer.place.reports
        assert loss is None or isinstance(loss, FakeTensor)
        trainer.close()


def test_stage_3_leaves_torch_as_it_was() -> None:
    """Its own `linear` keeps other tensors: it would change what other frameworks in this process compute."""
    chosen, linear = framework("zero3"), torch.nn.functional.linear
    with fake_world(0, WORLD, CPU, chosen):
        trainer = chosen.setup(job_of("gpt2", CPU))
        assert torch.nn.functional.linear is not linear
        trainer.close()
    assert torch.nn.functional.linear is linear


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (10, 4), (3, 8), (5, 4), (1, 1)])
def test_a_parameter_is_cut_as_torch_cuts_it(rows: int, ranks: int) -> None:
    weight = torch.arange(2.0 * rows).reshape(rows, 2)
    with fake_world(0, 1024, CPU):
        chunks_in_world = _fsdp_param._chunk_with_empty
    slices = chunks_in_world(weight, ranks, 0)
    expected = _fsdp_param._chunk_with_empty(weight, ranks, 0)
    assert [slices[rank].tolist() for rank in range(ranks)] == [part.tolist() for part in expected]


def test_one_of_1024_ranks_does_not_cut_a_parameter_for_all_of_them() -> None:
    with fake_world(1023, 1024, CPU), patch.object(torch, "chunk") as chunk:
        mesh = DeviceMesh.from_group(cast(dist.ProcessGroup, dist.group.WORLD), "cpu")
        model = fully_shard(nn.Linear(4, 2048, bias=False), mesh=mesh)
    (weight,) = model.parameters()
    assert weight.to_local().shape == (2, 4)
    assert not chunk.called


def test_the_world_ends_with_the_block() -> None:
    swap = torch.utils.swap_tensors
    with fake_world(5, 1024, CUDA):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 1024)
        assert isinstance(torch.zeros(2, device=CUDA), FakeTensor)
    assert not dist.is_initialized()
    assert torch.utils.swap_tensors is swap
    assert not isinstance(torch.zeros(2), FakeTensor)
