"""What run.json says, section by section; docs/data-dictionary.md explains each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from ddlbench.config.choices import changed
from ddlbench.config.schema import Config
from ddlbench.errors import RunError
from ddlbench.job import Framework, Job, Model, Trainer
from ddlbench.loop import Run
from ddlbench.measure.devices.environment import environment
from ddlbench.measure.devices.unknown import or_none
from ddlbench.measure.formulas.flops import hardware_flops, training_flops
from ddlbench.ranks.launch import Launch
from ddlbench.recipe.recipe import Rates, Recipe
from ddlbench.record.schema import DEVELOPER


def opening(config: Config, launch: Launch, device: torch.device, dataset: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that are known before anything starts."""
    return {
        "config": config.resolved,
        "config_added_later": config.added_later,
        "model": {"changed": changed(vars(config.model))},
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
        "framework_library": framework_library(config.framework),
    }


def framework_library(framework: Framework) -> str:
    """ "deepspeed 0.19.8": the library behind a framework and its version."""
    name: str = getattr(type(framework), "library", "torch")
    version = str(torch.__version__) if name == "torch" else or_none(lambda: metadata.version(name))
    return f"{name} {version or 'of an unknown version'}"


def model_section(
    model: Model, start: Mapping[str, Tensor] | None, checkpoint: Callable[[nn.Sequential], None] | None = None
) -> dict[str, Any]:
    """Name, size and cost of the model. `start`: the whole model's initial state; None where none was built, which
    leaves size and cost unsaid. checkpoint: lets blocks run again, None where they run once"""
    named = {
        "name": model.name,
        "kind": model.kind,
        "changed": changed(vars(model)),
        "tokens_per_sample": model.input_shape()[0] if model.kind == "text" else None,
        "vocabulary": model.outputs() if model.kind == "text" else None,  # with its padding
    }
    if start is None:
        return named
    return {
        **named,
        "parameters": parameter_count(model),
        "flops_per_sample": (flops := training_flops(model)),
        "hardware_flops_per_sample": hardware_flops(model, checkpoint) if checkpoint else flops,
        "weights_hash_start": weights_hash(start),
    }


def parameter_count(model: Model) -> int:
    """Trainable parameters, a tied one counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model.build().parameters())


def weights_hash(state: Mapping[str, Tensor]) -> str:
    """sha256 over names and bytes: equal for every framework that starts from the same seed."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def ledger(run: Run, steps: int) -> dict[str, Any]:
    """The samples, which two rows must share to be comparable, in every mode. They are counted where possible, not
    copied from the configuration."""
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
    """What `dryrun=true` prints: the run as it would be, in JSON."""
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
