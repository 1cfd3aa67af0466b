"""From the configuration to the inputs of a framework."""

from __future__ import annotations

from functools import partial

import torch

from ddlbench.config.schema import Config
from ddlbench.job import Job
from ddlbench.ranks.launch import Launch
from ddlbench.recipe.optimizers import make_optimizer
from ddlbench.recipe.recipe import CrossEntropy
from ddlbench.recomputation import Link


def make_job(config: Config, launch: Launch, device: torch.device) -> Job:
    """The job that the configuration asks this rank for."""
    train, recipe = config.train, config.recipe
    return Job(
        model=config.model,
        loss=CrossEntropy(recipe.label_smoothing),
        optimizer=partial(make_optimizer, recipe.optimizer),
        device=device,
        rank=launch.rank,
        local_rank=launch.local_rank,
        world_size=launch.world_size,
        seed=train.seed,
        global_batch=train.samples_per_update(launch.world_size),
        micro_batch=train.micro_batch,
        precision=train.precision,
        reduce_dtype=train.reduce_dtype,
        clip_norm=train.clip_norm,
        checkpoint_activations=train.checkpoint_activations,
        offload_activations=train.offload_activations,
        flops_per_host_byte=train.flops_per_host_byte,
        compile=train.compile,
        channels_last=train.channels_last,
        timeout_s=train.timeout_s,
        links=counted_links,
    )


def counted_links(job: Job, samples: float) -> list[Link]:
    """What `Job.links` is: the counts of the model's blocks, each complete."""
    from ddlbench.counts.counting import count_job  # takes a second

    return [block.link(samples) for block in count_job(job, job.device.type).blocks]
