"""What would make a run on a GPU faster, and what else it would change: printed once, and recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ddlbench.config.compose import refusal, supports
from ddlbench.config.keys import Train
from ddlbench.config.schema import Config
from ddlbench.cores import few_cores
from ddlbench.frameworks.shared.refusals import optimizer_of
from ddlbench.job import Framework, Job, Model
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer

TILE = 128  # rows of a matrix that tensor cores take at once, whatever their type
HIGH_WAIT = 0.1  # share of the steps' time: below it another loader saves little


def advice(config: Config, job: Job, loader: Mapping[str, Any]) -> list[str]:
    """A line for each setting; none for a CPU. loader: what the loader says of itself."""
    if job.device.type != "cuda":
        return []
    lines = _settings(config.train, config.framework, config.recipe.optimizer, job) if config.mode == "train" else []
    workers = loader.get("workers", loader.get("threads", 0))
    if "cores" in loader and (line := few_cores(loader["cores"], workers)):  # loader=synthetic has none
        lines.append(line)
    return lines


def advice_on_waiting(config: Config, device_type: str, wait_share: float | None) -> list[str]:
    """Advice after the run. wait_share: share of the measured steps' time spent waiting for data; None: not measured"""
    high = config.mode == "train" and device_type == "cuda" and wait_share is not None and wait_share > HIGH_WAIT
    if not high or config.data.kind != "images" or not config.loader.decodes_on_host:
        return []
    return [
        f"{wait_share:.0%} of the steps' time is waiting for data: loader=dali decodes on the GPU, too (crops of the "
        "same distribution, other draws), and loader.workers sets the number of processes that decode"
    ]


def advice_on_classes(model: Model, dataset: Mapping[str, Any]) -> str | None:
    """Advice if the model has more classes than the data. dataset: the record's section of that name"""
    classes, outputs = dataset.get("classes"), model.outputs()
    if classes is None or classes >= outputs:
        return None
    return f"the data has {classes} classes, the model {outputs}: model.num_classes={classes} fits"


def _settings(train: Train, framework: Framework, optimizer: OptimizerConfig, job: Job) -> list[str]:
    """Advice on settings of training; channels last, torch.compile and the fused optimizer only if the framework
    accepts them.

    A padded vocabulary is not the default: the papers trained 50,257 tokens, and a model must not depend on its device.
    """
    text, rows, dropout = job.model.kind == "text", job.model.outputs(), getattr(job.model, "dropout", 0.0)
    fused = partial(make_optimizer, replace(optimizer, fused=True))
    unfused = optimizer_of(job).defaults.get("fused", False) is None

    def accepts(new: Job) -> bool:
        return refusal(partial(supports, framework, new)) is None

    helps = {
        "fp32 without TF32 does not use the tensor cores: train.tf32=true (10 bits of mantissa in matrix products and "
        "convolutions, from NVIDIA's Ampere on) and train.precision=bf16 (7 bits, over fp32 weights) are faster": (
            train.precision == "fp32" and not train.tf32
        ),
        f"a vocabulary of {rows:,} does not fill tensor cores: model.pad_vocab_to_multiple={TILE} is faster; the "
        f"{-rows % TILE} tokens that it adds are never a target but part of the softmax, so losses differ a little": (
            text and rows % TILE > 0
        ),
        f"convolutions in {train.precision} are faster with train.channels_last=true: the same mathematics, but sums "
        "may run in another order": (
            not text
            and train.precision != "fp32"
            and not train.channels_last
            and accepts(replace(job, channels_last=True))
        ),
        # For GPT-2 only: VGG has dropout after two layers alone.
        f"model.dropout={dropout:g} draws random numbers for every activation of embeddings, attention and residual "
        "branches: model.dropout=0 is faster and needs less memory, and trains without this regularization": (
            text and dropout > 0
        ),
        "train.compile=true fuses operations between matrix products: fewer kernels and less memory traffic; the "
        "compiler works in the first step, and results differ by rounding": (
            not job.compile and accepts(replace(job, compile=True))
        ),
        "recipe.optimizer.fused=true updates all weights with one kernel; results differ by rounding": (
            unfused and accepts(replace(job, optimizer=fused))
        ),
    }
    return [line for line, holds in helps.items() if holds]
