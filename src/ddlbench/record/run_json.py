"""The sections of run.json; docs/data-dictionary.md explains each. Advice, one of them, is also printed: what would
make a run on a GPU faster, and what else it would change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from ddlbench.config.choices import changed
from ddlbench.config.compose import refusal, supports
from ddlbench.config.keys import added_later
from ddlbench.config.schema import Config
from ddlbench.cores import few_cores
from ddlbench.errors import RunError
from ddlbench.frameworks.shared.refusals import optimizer_of
from ddlbench.job import Job, Model, Trainer
from ddlbench.loop import Run
from ddlbench.measure.devices.environment import environment
from ddlbench.measure.devices.unknown import or_none
from ddlbench.measure.formulas.flops import training_flops
from ddlbench.ranks.launch import Launch
from ddlbench.recipe.optimizers import make_optimizer
from ddlbench.recipe.recipe import Rates, Recipe
from ddlbench.record.schema import DEVELOPER

TILE = 128  # rows of a matrix that tensor cores compute at once, whatever the type of the numbers
HIGH_WAIT = 0.1  # share of the steps' time: below it, another loader saves little


def opening(config: Config, launch: Launch, device: torch.device, dataset: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that are known before anything starts."""
    library: str = getattr(type(config.framework), "library", "torch")  # that the framework uses
    version = str(torch.__version__) if library == "torch" else or_none(lambda: metadata.version(library))
    return {
        "config": config.resolved,
        "config_added_later": added_later(config),
        "model": {"changed": changed("model", vars(config.model))},
        "launch": {
            "launcher": launch.launcher,
            "world_size": launch.world_size,
            "nodes": launch.nodes,
            "ranks_per_node": launch.local_world_size,
            "device_type": device.type,
            "backend": DEVELOPER if config.backend else "nccl" if device.type == "cuda" else "gloo",
            "developer": config.backend is not None,
        },
        "dataset": {"name": config.data.name, "kind": config.data.kind, **dataset},
        "environment": {**environment(device), "threads_per_rank": torch.get_num_threads()},
        "framework_library": f"{library} {version or 'of an unknown version'}",
    }


def model_section(
    model: Model, start: Mapping[str, Tensor] | None, checkpoint: Callable[[nn.Sequential], None] | None = None
) -> dict[str, Any]:
    """Name, size and cost of the model.

    start: the initial state of the whole model; None if none was built: then size and cost are left out
    checkpoint: lets blocks run again; None if they run once
    """
    named = {
        "name": model.name,
        "kind": model.kind,
        "changed": changed("model", vars(model)),
        "tokens_per_sample": model.input_shape()[0] if model.kind == "text" else None,
        "vocabulary": model.outputs() if model.kind == "text" else None,  # with its padding
    }
    if start is None:
        return named
    return {
        **named,
        "parameters": parameter_count(model),
        "flops_per_sample": (flops := training_flops(model)),
        "hardware_flops_per_sample": training_flops(model, checkpoint) if checkpoint else flops,
        "weights_hash_start": weights_hash(start),
    }


def parameter_count(model: Model) -> int:
    """Trainable parameters, a tied one counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model.build().parameters())


def weights_hash(state: Mapping[str, Tensor]) -> str:
    """sha256 of names and bytes: equal for all frameworks that start from the same seed."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def ledger(run: Run, steps: int) -> dict[str, Any]:
    """What comparable rows share in every mode: the samples. They are counted where possible, not copied from the
    configuration."""
    job, data_size = run.job, run.place.data_size
    return {
        "samples": steps * job.global_batch,
        "dropped_samples_per_epoch": run.feed.dropped_samples,
        "global_batch": job.global_batch,
        "replica_batch": job.replica_batch(data_size),
        "data_size": data_size,
        "seed": job.seed,
    }


def training_ledger(run: Run, trainer: Trainer, rates: Rates, recipe: Recipe, steps: int) -> dict[str, Any]:
    """The ledger of a training run: samples, updates, rates."""
    job, updates, facts = run.job, trainer.updates, trainer.facts()
    return ledger(run, steps) | {
        "updates": updates,
        "skipped_updates": steps - updates,
        "micro_batches": facts.get("micro_batches", job.micro_batches(run.place.data_size)),
        "precision": job.precision,
        "precision_scheme": facts.get("precision_scheme", "autocast") if job.precision != "fp32" else None,
        "reduce_dtype": facts.get("reduce_dtype", job.reduce_dtype),
        "clip_norm": job.clip_norm,
        "weight_decay": recipe.optimizer.weight_decay,
        "recipe": recipe.name,
        "label_smoothing": recipe.label_smoothing,
        "dropout": getattr(job.model, "dropout", None),
        "lr_first": rates.first,
        "lr_last": rates.last,
    }


def planned_run(config: Config, job: Job, refusal: RunError | None) -> str:
    """What `dryrun=true` prints: a description of the run in JSON."""
    content = {
        "would_run": refusal is None,
        "reason": str(refusal) if refusal else None,
        "world_size": job.world_size,
        "device": str(job.device),
        "global_batch": job.global_batch,
        "parameters": parameter_count(config.model),
        "config": config.resolved,
    }
    return json.dumps(content, indent=1)


def advice(config: Config, job: Job, loader: Mapping[str, Any]) -> list[str]:
    """A line for each setting that would make the run faster; none on a CPU. loader: its facts"""
    if job.device.type != "cuda":
        return []
    lines = _settings(config, job) if config.mode == "train" else []
    workers = loader.get("workers", loader.get("threads", 0))
    if "cores" in loader and (line := few_cores(loader["cores"], workers)):  # loader=synthetic has none
        lines.append(line)
    return lines


def advice_on_waiting(config: Config, device_type: str, wait_share: float | None) -> list[str]:
    """Advice after the run. wait_share: of the measured steps' time, spent waiting for data; None: not measured"""
    high = config.mode == "train" and device_type == "cuda" and wait_share is not None and wait_share > HIGH_WAIT
    if not high or config.data.kind != "images" or not config.loader.decodes_on_host:
        return []
    return [
        f"{wait_share:.0%} of the steps' time is waiting for data: loader=dali decodes on the GPU, too (crops of the "
        "same distribution, other draws), and loader.workers sets the number of processes that decode"
    ]


def _settings(config: Config, job: Job) -> list[str]:
    """Advice on settings of training. channels_last, compile and the fused optimizer are named only if the framework
    accepts them.

    A padded vocabulary is not the default: the papers trained 50,257 tokens, and a model must not depend on its device.
    """
    train, framework = config.train, config.framework
    text, rows, dropout = job.model.kind == "text", job.model.outputs(), getattr(job.model, "dropout", 0.0)
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
            unfused
            and accepts(replace(job, optimizer=partial(make_optimizer, replace(config.recipe.optimizer, fused=True))))
        ),
    }
    return [line for line, holds in helps.items() if holds]
