"""framework.balance_by=seconds: the seconds of the blocks, measured before training (Narayanan et al. 2019, 3.1)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ddlbench.data.feed import Request
from ddlbench.data.loaders.synthetic import random_batch
from ddlbench.errors import Unsupported
from ddlbench.job import Job, Place
from ddlbench.measure.block_seconds import block_seconds
from ddlbench.ranks.control import from_rank_0
from ddlbench.ranks.launch import is_fake
from ddlbench.recomputation import plan_of, repeats


def seconds_of_blocks(job: Job, samples: int) -> list[float]:
    """Seconds of each block for a micro batch of `samples`, with recomputation: measured on rank 0's device while the
    others wait, the same on every rank. Collective. Unsupported in a rehearsal, which computes nothing."""
    if is_fake():
        raise Unsupported(
            "framework.balance_by=seconds: a rehearsal computes nothing that could be measured: set framework.balance "
            "to the blocks_per_stage of a run, or framework.balance_by=flops"
        )
    return from_rank_0(_measured(job, samples) if job.rank == 0 else None)


def _measured(job: Job, samples: int) -> list[float]:
    """Without torch.compile. Blocks have all their layers, also where ranks will share them."""
    model = replace(job, device=torch.device("cpu")).build()
    request = Request(job.model, Place(0, 1), job.device, job.seed, samples, channels_last=job.channels_last)
    passes = block_seconds(model, random_batch(request, samples), job.loss, job.precision)
    if job.device.type == "cuda":
        torch.cuda.empty_cache()  # rank 0 trains with as much reserved memory as the others
    again = repeats(plan_of(job.checkpoint_activations, [name for name, _ in model.named_children()], list))
    return [forward * (1 + times) + backward for (forward, backward), times in zip(passes, again, strict=True)]
