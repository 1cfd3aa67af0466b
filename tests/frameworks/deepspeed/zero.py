"""What the ranks of tests/frameworks/deepspeed/test_deepspeed.py do, all of it in one set of processes."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed, ZeroTrainer, device_index
from ddlbench.frameworks.deepspeed.knobs import import_deepspeed
from ddlbench.job import Batch, Framework, Job, Trainer
from ddlbench.models.gpt2 import GPT2
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from tests.support.broken import repeating
from tests.support.changed_job import ChangedJob
from tests.support.equal import make_job, ready, train_cases
from tests.support.reference import Case

MODEL = GPT2("gpt2", n_layer=1, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0)
CASE = Case("gpt2", MODEL, lr=0.02)
STAGES = (0, 1, 2, 3)
ZERO = [DeepSpeed(zero_stage=stage, persistence_threshold=0) for stage in STAGES]
Found = dict[str, Any]


@dataclass
class ChangedDeepSpeed(ChangedJob, DeepSpeed): ...


KNOBS = {
    "small buckets 2": DeepSpeed(zero_stage=2, reduce_bucket_mb=0.01, gather_bucket_mb=0.01),
    "small buckets 3": DeepSpeed(zero_stage=3, reduce_bucket_mb=0.01, gather_bucket_mb=0.01, persistence_threshold=0),
    "overlap 1": DeepSpeed(zero_stage=1, overlap_comm=True),
    "overlap 2": DeepSpeed(zero_stage=2, overlap_comm=True, reduce_bucket_mb=0.01),
    "no overlap 3": DeepSpeed(zero_stage=3, overlap_comm=False),
    "persistent 3": DeepSpeed(zero_stage=3, persistence_threshold=1000),
    "offloaded optimizer 1": DeepSpeed(zero_stage=1, offload_optimizer=True),
    "offloaded optimizer 2": DeepSpeed(zero_stage=2, offload_optimizer=True),
    "offloaded optimizer and activations 2": ChangedDeepSpeed(
        zero_stage=2, offload_optimizer=True, changes={"offload_activations": True}
    ),
    "offloaded optimizer 3": DeepSpeed(zero_stage=3, offload_optimizer=True),
    "all offloaded 3": DeepSpeed(
        zero_stage=3, offload_optimizer=True, offload_parameters=True, persistence_threshold=0
    ),
}
THREES = replace(CASE, micro_batch=3)


@dataclass
class Clipping(DeepSpeed):
    """Gradients clipped without being configured, as DeepSpeed does by default."""

    def config(self, job: Job) -> dict[str, Any]:
        return super().config(job) | {"gradient_clipping": 0.1}

    def needs_norm(self, job: Job) -> bool:
        return True


@dataclass
class Dropping(DeepSpeed):
    """The last micro batch is a copy of the one before."""

    def setup(self, job: Job) -> ZeroTrainer:
        return repeating(super().setup(job))


FAULTS = [cls(zero_stage=stage) for stage in (1, 3) for cls in (Clipping, Dropping)]


def adamw_job() -> Job:
    """Two parameter groups: without weight decay and with it."""
    config = OptimizerConfig("adamw", lr=0.01, weight_decay=0.1, decay_norm_and_bias=False)
    return replace(make_job(CASE), optimizer=partial(make_optimizer, config))


def samples(job: Job, seed: int = 0) -> Batch:
    """This rank's slice of a global batch."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(61, (job.global_batch, 17), generator=generator).chunk(job.world_size)[job.rank]
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(len(tokens), dtype=torch.bool))


def weights_of(trainer: Trainer) -> Tensor:
    """On rank 0; empty elsewhere."""
    state = trainer.state() or {}
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(state.items())] or [torch.empty(0)])


def train_each(frameworks: Sequence[Framework], reduce_dtypes: Sequence[str]) -> list[Tensor]:
    """Weights after a few updates with AdamW at falling learning rates."""
    result: list[Tensor] = []
    for framework, reduce_dtype in zip(frameworks, reduce_dtypes, strict=True):
        job = replace(adamw_job(), reduce_dtype=reduce_dtype)
        framework.check(job)
        with ready(framework, job) as (trainer, _):
            for step in range(4):
                for group in trainer.optimizer.param_groups:
                    group["lr"] = 0.01 / (step + 1)
                trainer.step(samples(job, step))
            result.append(weights_of(trainer))
    return result


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
    for stage in STAGES:
        with ready(ZERO[stage], job) as (trainer, _):
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
        job = make_job(replace(THREES, clip_norm=clip_norm))
        with ExitStack() as watched:
            watches = [
                watched.enter_context(patch(name, autospec=True, side_effect=pkgutil.resolve_name(name)))
                for name in NORMS
            ]
            trainer, _ = watched.enter_context(ready(framework, job))
            trainer.step(samples(job))
            result.append((sum(watch.call_count for watch in watches), trainer.facts()["gradient_norm"]))
    return result


SIXTEEN = replace(CASE, name="gpt2-bf16", precision="bf16", micro_batch=2)
CASTS = [DeepSpeed(zero_stage=stage, mixed_precision="weights") for stage in (1, 2, 3)]


def rounds(frameworks: Sequence[DeepSpeed]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Weights at the start, after an update, loaded again, and after the same update from there."""
    result: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for framework in frameworks:
        job = make_job(replace(CASE, lr=0.1))
        job = replace(job, optimizer=partial(make_optimizer, OptimizerConfig("sgd", lr=0.1)))  # without a memory
        with ready(framework, job) as (trainer, _):
            state = [trainer.state()]
            dist.broadcast_object_list(state)
            weights = [weights_of(trainer)]
            trainer.step(samples(job))
            weights.append(weights_of(trainer))
            trainer.load(state[0] or {})
            trainer.evaluate(samples(job))  # between two updates, as between two epochs
            weights.append(weights_of(trainer))
            trainer.step(samples(job))
            result.append((*weights, weights_of(trainer)))  # pyright: ignore
    return result


ROUNDS = [*ZERO, DeepSpeed(zero_stage=3), DeepSpeed(zero_stage=3, offload_optimizer=True, offload_parameters=True)]


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


def quick() -> Found:
    return {
        "faults": train_cases([(THREES, framework) for framework in FAULTS]),
        "loops": both_loops(),
        "norms": norms(None),
        "norms when clipping": norms(0.5),
    }


def everything_else() -> Found:
    result = {
        "knobs": train_cases([(THREES, framework) for framework in KNOBS.values()]),
        "adamw": train_each([DDP(), *ZERO, *ZERO], ["fp32"] * 5 + ["fp16"] * 4),
        "casts": train_cases([(SIXTEEN, framework) for framework in CASTS]),
        "rounds": rounds(ROUNDS),
    }
    return result | {"overflow": overflow()}  # last: the library remembers in a global that a run was in fp16
