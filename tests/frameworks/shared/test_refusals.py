"""What several frameworks refuse for the same reason. docs/frameworks.md lists what each refuses on four GPUs, and
tests/scripts/pages/ compares it with them; here is what depends on sizes, on the layout of ranks and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ddlbench.errors import UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.megatron.adapter import Megatron
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Framework
from tests.equality.cases import MODELS
from tests.support.jobs import ranks, refused, two_ranks, wrong_knob


@pytest.mark.parametrize(
    "framework", [DDP(), FSDP(), LocalSGD(), ParameterServer(), DeepSpeed(), Horovod()], ids=lambda one: one.name
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_ones(framework: Framework) -> None:
    whole = r"global_batch=5 does not divide over 2 replicas \(rest 1\): choose train\.global_batch=4 or 6"
    refused(framework, two_ranks(global_batch=5), whole, UserError)
    micro = replace(two_ranks(global_batch=12), micro_batch=4)
    refused(framework, micro, r"micro_batch=4 does not divide the 6 samples .*choose train\.micro_batch=3", UserError)


@pytest.mark.parametrize(
    "framework",
    [DDP(), FSDP(), TensorParallel(), TensorParallel(dp=2), Megatron(dp=2), DeepSpeed(zero_stage=0)],
    ids=lambda one: one.name,
)
def test_gradients_in_bf16_need_a_gpu(framework: Framework) -> None:
    asked = ranks(2, reduce_dtype="bf16")
    refused(framework, asked, "gradients in bf16 need NCCL")
    framework.check(replace(asked, device=torch.device("cuda", 0)))


@pytest.mark.parametrize(
    ("make", "key", "model"),
    [(TensorParallel, "tp", "gpt2"), (Pipeline, "tp", "gpt2"), (Spatial, "sp", "resnet")],
)
def test_a_mesh_that_does_not_fill_the_ranks_is_refused(make: Callable[..., Framework], key: str, model: str) -> None:
    mesh = rf"framework\.dp=2 x framework\.{key}=3 .*does not fill 4 ranks: choose framework\.dp=2 framework\.{key}=2"
    refused(make(dp=2, **{key: 3}), ranks(4, MODELS[model]), mesh, UserError)
    for name in ("dp", key):
        wrong_knob(make, rf"framework\.{name}=0 must be 1 or more", **{name: 0})
