"""What the ranks of tests/frameworks/deepspeed/test_deepspeed.py do, all of it in one set of processes."""

from __future__ import annotations

import os
import pkgutil
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.errors import UserError
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed, device_index
from ddlbench.frameworks.deepspeed.knobs import import_deepspeed
from ddlbench.job import Batch, Job, Trainer
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from tests.support.equal import make_job, ready
from tests.support.jobs import CASE

ZERO = [DeepSpeed(zero_stage=stage, persistence_threshold=0) for stage in range(4)]


def samples(job: Job, seed: int = 0) -> Batch:
    """This rank's slice of a global batch."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(61, (job.global_batch, 17), generator=generator).chunk(job.world_size)[job.rank]
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(len(tokens), dtype=torch.bool))


def no_disk() -> str:
    """What rank 0 says of a folder that rank 1 alone lacks."""
    asked = DeepSpeed(zero_stage=3, offload_optimizer=True, offload_to="nvme", nvme_path="/planted")
    with patch.object(Path, "is_dir", lambda _: dist.get_rank() == 0), pytest.raises(UserError) as error:
        asked.setup(make_job(CASE))
    return str(error.value)


def weights_of(trainer: Trainer) -> Tensor:
    """On rank 0; empty elsewhere."""
    state = trainer.state() or {}
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(state.items())] or [torch.empty(0)])


def own_loop(job: Job, stage: int) -> Tensor:
    """The loop of DeepSpeed's "Getting Started" (deepspeed.ai/getting-started): its engine, its configuration file's
    optimizer by name, a model that returns its loss. The weights after a few updates, in their names' order."""
    deepspeed = import_deepspeed(job.device)

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.build()

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    model = WithLoss()
    adamw = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}
    config = {
        "train_batch_size": job.global_batch,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(4):
        batch = samples(job, step)
        for inputs, targets in zip(batch.inputs.chunk(2), batch.targets.chunk(2), strict=True):
            engine.backward(engine(inputs, targets))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = torch.cat([tensor.double().flatten() for _, tensor in sorted(model.model.state_dict().items())])
    engine.destroy()
    return weights


def both_loops() -> list[tuple[Tensor, Tensor]]:
    adamw = partial(make_optimizer, OptimizerConfig("adamw", lr=0.01, weight_decay=0.1))
    job = replace(make_job(replace(CASE, micro_batch=3, clip_norm=0.5)), optimizer=adamw)
    result: list[tuple[Tensor, Tensor]] = []
    for stage, framework in enumerate(ZERO):
        with ready(framework, job) as (trainer, _):
            for step in range(4):
                trainer.step(samples(job, step))
            result.append((weights_of(trainer), own_loop(job, stage)))
    return result


NORMS = (  # where DeepSpeed computes the gradient's norm
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.get_grad_norm_direct",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct",
    "deepspeed.runtime.engine.clip_grad_norm_",
)


def norms(clip_norm: float | None) -> list[tuple[int, bool]]:
    """For each stage how often an update computes the gradient's norm, and what the facts say."""
    result: list[tuple[int, bool]] = []
    import_deepspeed(torch.device("cpu"))
    for framework in ZERO:
        job = make_job(replace(CASE, micro_batch=3, clip_norm=clip_norm))
        with ExitStack() as watched:
            watches = [
                watched.enter_context(patch(name, autospec=True, side_effect=pkgutil.resolve_name(name)))
                for name in NORMS
            ]
            trainer, _ = watched.enter_context(ready(framework, job))
            trainer.step(samples(job))
            result.append((sum(watch.call_count for watch in watches), trainer.facts()["gradient_norm"]))
    return result


def overflow() -> tuple[list[int], list[Tensor]]:
    """Updates counted and weights: at the start, after an overflow, after a finite step."""
    job = replace(make_job(CASE), precision="fp16")
    losses = iter([float("inf"), 1.0])
    plain = job.loss
    job = replace(job, loss=lambda output, targets: plain(output, targets) * next(losses))
    framework = DeepSpeed(zero_stage=0)
    framework.check(job)
    with ready(framework, job) as (trainer, _):
        updates, weights = [trainer.updates], [weights_of(trainer)]
        for _ in range(2):
            trainer.step(samples(job))
            updates.append(trainer.updates)
            weights.append(weights_of(trainer))
    return updates, weights


def on_one_visible_gpu() -> list[dict[str, Any]]:
    """What each stage asks of its accelerator where this rank is the second on its node and sees one GPU only: the
    indices of devices it names. The library computes on the CPU, whatever index it names."""
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    asked: list[int] = []

    class Visible(CPU_Accelerator):
        def device_name(self, device_index: Any = None) -> Literal["cpu"]:
            asked.extend([] if device_index is None else [int(device_index)])
            return "cpu"

        def set_device(self, device_index: Any) -> None:
            if str(device_index) != "cpu":
                asked.append(int(device_index))

    before, results = get_accelerator(), list[dict[str, Any]]()
    os.environ.update(LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    set_accelerator(Visible())
    gpu = partial(device_index, torch.device("cuda", 0), local_rank=1)
    with patch("ddlbench.frameworks.deepspeed.adapter.device_index", lambda *_: gpu()):
        for framework in ZERO:
            job = make_job(CASE)
            trainer = framework.setup(job)
            group = trainer.engine.data_parallel_group
            for step in range(2):
                trainer.step(samples(job, step))
            trainer.close()
            after = {"asked": asked.copy(), "after": os.environ["LOCAL_RANK"]}
            results.append({**after, "of all ranks": group is dist.group.WORLD})
            asked.clear()
    set_accelerator(before)
    return results
