"""A framework without equations: the FLOPs, messages and memory of one rank are traced in a rehearsal.

The seconds of computing are those of one device for the same samples, in proportion to the FLOPs of the rank. The
overlap is unknown, so all communication counts as exposed, and the step is an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ddlbench.errors import Unsupported
from ddlbench.frameworks.deepspeed.knobs import DeepSpeedOptions
from ddlbench.frameworks.single import Single
from ddlbench.job import Job, on_meta
from ddlbench.measure.formulas.memory_formula import FP32_BYTES, touched
from ddlbench.oracle.machine import collectives
from ddlbench.oracle.setting import Memory, Message, Outcome, Setting
from ddlbench.rehearsal.rehearse import Rehearsal, Sent, rehearse_job


def traced(framework: Any, setting: Setting) -> Outcome:
    """Unsupported if the framework cannot be rehearsed, or if it sends a message that the oracle has no seconds for."""
    if setting.job.offload_activations:
        raise Unsupported(
            "the oracle has no model of offloaded activations with a framework that is traced: set "
            "train.offload_activations=none"
        )
    job = replace(setting.job, device=torch.device("cpu"))  # such a rehearsal needs nothing of this process
    rank = rehearsed(framework, job)
    samples = job.replica_batch(rank.replicas)
    one_device = rehearsed(Single(), replace(job, world_size=1, global_batch=samples))
    count, micro = setting.micro_batch(rank.replicas)
    seconds = count * sum(block.forward + block.backward for block in setting.passes(micro))
    memory = memory_of(rank)
    update = setting.computation.update(memory.weights / FP32_BYTES)
    layout, on_cuda = {"dp": rank.replicas}, setting.job.device.type == "cuda"
    return Outcome(
        compute_s=(seconds * (rank.flops or 0.0) / (one_device.flops or 1.0) + update) * setting.contention,
        messages=tuple(message(sent, setting) for sent in rank.collectives or () if sent.kind != "recv"),
        # A GPU's kernels save other tensors than those of the CPU, for attention above all.
        peak=lambda: rehearsed_memory(framework, setting.job, layout, pinned=None) if on_cuda else memory,
        layout=layout,
        traced=True,
        micro_samples=micro,
    )


def rehearsed(framework: Any, job: Job, pinned: bool | None = None) -> Rehearsal:
    """Rehearse a step of the job. Unsupported with the reason if that fails."""
    if job.device.type == "cuda":
        job = replace(job, device=torch.device("cuda", 0), local_rank=0)
    rank = rehearse_job(framework, job, pinned)
    if rank.collectives is None:
        name, reason = type(framework).__name__, rank.error
        raise Unsupported(f"no step of {name} can be rehearsed: {reason}")
    return rank


def distinct_ranks(world: int, layout: Mapping[str, int]) -> range:
    """One rank of each pipeline stage, or of each part of the images: a part in the middle has two neighbours."""
    return range(layout["sp"]) if "sp" in layout else range(0, world, world // layout.get("pp", 1))


def rehearsed_memory(framework: Any, job: Job, layout: Mapping[str, int], pinned: bool | None) -> Memory:
    """The memory of the rank that needs the most, from a rehearsal of the `distinct_ranks`. ZeRO 1 and 2 cut parameters
    at the borders of shards, so the first rank, the last rank, and the rank with parts of the largest parameters are
    rehearsed.

    pinned: as for `rehearse_job`
    """
    world = job.world_size
    ranks = set(distinct_ranks(world, layout))
    if isinstance(framework, DeepSpeedOptions) and framework.zero_stage in (1, 2):
        sizes = [parameter.numel() for parameter in on_meta(job).parameters()]
        ranks |= {world - 1, int(touched(sizes, world).argmax())}
    memories = [memory_of(rehearsed(framework, replace(job, rank=rank, local_rank=rank), pinned)) for rank in ranks]
    return max(memories, key=lambda memory: memory.total)


def message(sent: Sent, setting: Setting) -> Message:
    """The communication of one kind in a step, all exposed."""
    size = sent.bytes_ / sent.count
    if sent.kind == "send":
        flows = setting.per_node if sent.stride >= setting.per_node else 0
        one = collectives.send(size, setting.machine, setting.job.world_size, flows)
    elif sent.kind in collectives.FORMULAS:
        one = setting.path(sent.ranks, sent.stride).seconds(sent.kind, size)
    else:
        raise Unsupported(f"the oracle has no seconds for {sent.kind}, which was traced {sent.count:g} times a step")
    seconds = sent.count * one
    return Message(f"{sent.kind} among {sent.ranks} ranks", "", sent.count, sent.bytes_, seconds, seconds)


def memory_of(rank: Rehearsal) -> Memory:
    """The memory of a rehearsed rank, in bytes. All bytes at its peak beside weights, gradients and optimizer states
    count as activations."""
    memory = rank.memory or {}
    weights, gradients, optimizer, peak = (
        float(memory.get(name) or 0) for name in ("parameters", "gradients", "optimizer", "peak")
    )
    return Memory(weights, gradients, optimizer, max(0.0, peak - weights - gradients - optimizer), 0.0)
