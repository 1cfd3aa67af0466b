"""Spatial parallelism: ranks share the rows of every image (Dryden et al. 2019; Kahira et al. 2021).

The window of a layer reaches into rows of a neighbour (its halo). Neighbours send each other these rows of the input x
in the forward pass and their gradients in the backward pass: 2 alpha + 2 B halo(x) beta per layer, where Kahira et al.
have B (halo(x) + halo(dy)) beta, as if the gradient of the output were sent. BatchNorm's statistics are those of all
parts. The layers after the last window need complete images: an all-gather precedes them, and every rank computes them
in full.
"""

from __future__ import annotations

import numpy as np

from ddlbench.counts.counts import Share
from ddlbench.errors import Unsupported
from ddlbench.frameworks.shared.groups import batch_norms
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.job import on_meta
from ddlbench.measure.formulas.memory_formula import FP32_BYTES
from ddlbench.oracle.machine import collectives
from ddlbench.oracle.memory.replicas import counts_of_rank, replica
from ddlbench.oracle.setting import Limit, Message, Outcome, Setting
from ddlbench.oracle.strategies.data_parallel import averaged
from ddlbench.oracle.strategies.tensor import batch_message


def spatial(framework: Spatial, setting: Setting) -> Outcome:
    job, blocks, layout = setting.job, setting.counts.blocks, framework.layout(setting.world)
    dp, sp = layout.dp, layout.tp
    fewest = min((layer for block in blocks for layer in block.rows), key=lambda layer: layer.window.output)
    count, samples = setting.micro_batch(dp)
    last = max(index for index, block in enumerate(blocks) if block.rows)
    # A part of every image is as much work as fewer images: each rank starts all kernels and reads all weights.
    shared, complete = (setting.computation.blocks(size) for size in (samples / sp, samples))
    parts = [*shared[: last + 1], *complete[last + 1 :]]
    messages: list[Message] = []
    if sp > 1:
        again = set(setting.again(samples))
        if len(again) > 1:
            raise Unsupported(
                "the oracle has no model of shared images of which some blocks run again: set "
                "train.checkpoint_activations to none or blocks"
            )
        forward = 1 + again.pop() + blocks[0].selective  # runs of each block forward
        height = blocks[last].rows[-1].window.output
        size = blocks[last].output * samples * Part(None, 0, sp).span(height)[1] * sp / height  # of equal parts
        number = count * forward  # its gradient is already on every rank
        seconds = number * collectives.all_gather(size, setting.path(sp))
        gathering = Message("all-gather of the last images", "dp", number, number * size, seconds, seconds)
        messages += [_halos(setting, samples, count, sp, forward), gathering, batch_message(setting, dp, sp, "dp")]
        messages += _statistics(setting, count, sp, forward)
    if setting.world > 1:
        messages.append(averaged(setting, setting.gradient_bytes, back=setting.backward_s(parts, dp)))
    return Outcome(
        compute_s=setting.compute_s(parts, dp, setting.counts.parameter_count),
        messages=tuple(messages),
        peak=lambda: replica(setting, counts_of_rank(setting, Share(sp=sp)), dp, bucketed=setting.world > 1),
        limits=(
            Limit("sp", fewest.window.output, fewest.name),
            Limit("dp", job.global_batch, "one sample of the global batch a replica"),
        ),
        layout={"dp": dp, "sp": sp},
        micro_samples=samples,
    )


def _halos(setting: Setting, samples: float, count: int, sp: int, forward: int) -> Message:
    """The exchange of halos; the bytes are those of the rank that sends most. All neighbours exchange at once. If some
    neighbours are on different nodes, all wait for them. The gradients of a halo are as large as the halo."""
    machine, world = setting.machine, setting.world
    crosses = bool(setting.per_node % sp)
    number, seconds, bytes_ = 0, 0.0, np.zeros(sp)
    for layer in (layer for block in setting.counts.blocks for layer in block.rows):
        taken = np.array([layer.window.taken(Part(None, rank, sp)) for rank in range(sp)], dtype=float)  # [user, owner]
        np.fill_diagonal(taken, 0.0)  # own rows are not sent
        ahead, back = (samples * layer.row * taken.sum(axis) for axis in (0, 1))
        passes = [sent for sent in [ahead] * forward + [back] * (not layer.first) if sent.any()]
        number += len(passes)
        seconds += sum(collectives.send(float(sent.max()), machine, 1, world, crosses) for sent in passes)
        bytes_ += sum(passes)
    total = count * float(bytes_.max())
    return Message("halo exchange", "sp", count * number, total, count * seconds, count * seconds)


def _statistics(setting: Setting, count: int, sp: int, forward: int) -> list[Message]:
    """BatchNorm over all parts: mean, variance and number of the pixels of each part are gathered forward, two sums for
    each channel are added backward."""
    to, number, bytes_, seconds = setting.path(sp), 0, 0.0, 0.0
    for norm in batch_norms(on_meta(setting.job)):
        gathered, summed = FP32_BYTES * sp * (2 * norm.num_features + 1), FP32_BYTES * 2 * norm.num_features
        number += forward + 1
        bytes_ += forward * gathered + summed
        seconds += forward * collectives.all_gather(gathered, to)
        seconds += collectives.all_reduce(summed, to)
    if not number:
        return []
    amounts = (count * amount for amount in (number, bytes_, seconds, seconds))
    return [Message("statistics of BatchNorm", "dp", *amounts)]
