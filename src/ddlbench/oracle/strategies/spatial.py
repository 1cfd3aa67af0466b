"""Spatial parallelism, prediction only: ranks share the rows of every image (Dryden et al. 2019; Kahira et al. 2021).

The window of a convolution or pooling reaches into rows of a neighbour (its halo). Neighbours exchange these rows: of
the input x in the forward pass, of the output's gradient dy in the backward pass. This takes 2 alpha + B (halo(x) +
halo(dy)) beta per layer. The layers after the last window need complete images: an all-gather precedes them, and every
rank computes them in full.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddlbench.errors import Unsupported
from ddlbench.frameworks.shared.layout import fill
from ddlbench.measure.formulas.memory_formula import bytes_of_parameter, data_parallel
from ddlbench.oracle.machine import collectives
from ddlbench.oracle.memory.passes import Moment, at_peak, buffer_bytes, sizes_of
from ddlbench.oracle.setting import Limit, Message, Outcome, Setting
from ddlbench.oracle.strategies.data_parallel import averaged, sizes
from ddlbench.oracle.timing import overlap
from ddlbench.oracle.timing.computation import Pass
from ddlbench.recomputation import repeats


@dataclass(frozen=True)
class Spatial:
    """sp neighbouring ranks share the images of one of dp replicas; None: all ranks / dp."""

    name: str = "spatial"
    dp: int | None = 1
    sp: int | None = None


def spatial(framework: Spatial, setting: Setting) -> Outcome:
    job, blocks = setting.job, setting.counts.blocks
    if job.model.kind != "images":
        raise Unsupported(f"spatial: {job.model.name} has no image to split: choose framework=tensor")
    dp, sp = fill(setting.world, dp=framework.dp, sp=framework.sp).values()
    fewest = min((layer for block in blocks for layer in block.rows), key=lambda layer: layer.height)
    limit = Limit("sp", fewest.height, fewest.name)
    if sp > limit.largest:
        raise Unsupported(
            f"spatial: {sp} ranks cannot share the {limit.largest} rows of {limit.layer}: choose "
            f"framework.sp={limit.largest} or fewer"
        )
    count, samples = setting.micro_batch(dp)
    last = max(index for index, block in enumerate(blocks) if block.rows)
    ranks = [sp if index <= last else 1 for index in range(len(blocks))]  # that share each block
    passes = zip(setting.computation.blocks(samples), ranks, strict=True)
    parts = [Pass(block.forward / share, block.backward / share) for block, share in passes]
    messages: list[Message] = []
    if sp > 1:
        size = blocks[last].output * samples  # its gradient is already on every rank
        seconds = count * collectives.all_gather(size, setting.path(sp))
        gathering = Message("all-gather of the last images", count, count * size, seconds, seconds)
        messages += [_halos(setting, samples, count, sp), gathering]
    if setting.world > 1:
        again = repeats(setting.plan(samples))
        back = [block.back(times) * setting.contention for block, times in zip(parts, again, strict=True)]
        sent = overlap.buckets(overlap.gradients(sizes(setting, setting.gradient_bytes), back))
        messages.append(averaged(setting, sent, sum(back)))
    parameters = setting.counts.parameter_count
    saved = sum(block.saved.at(samples) / share for block, share in zip(blocks, ranks, strict=True))
    states = data_parallel(parameters, bytes_of_parameter(setting.optimizer, sizes=sizes_of(blocks)), 0, 1)
    return Outcome(
        compute_s=setting.compute_s(parts, dp, parameters),
        messages=tuple(messages),
        peak=lambda: at_peak(states, [Moment(states.gradients, saved)], buffer_bytes(blocks)),
        limits=(limit, Limit("dp", job.global_batch, "one sample of the global batch a replica")),
        layout={"dp": dp, "sp": sp},
        micro_samples=samples,
    )


def _halos(setting: Setting, samples: float, count: int, sp: int) -> Message:
    """The exchange of halos. All neighbours exchange at once. If some neighbours are on different nodes, all wait for
    them."""
    machine, world = setting.machine, setting.world
    crosses = bool(machine.per_node(world) % sp)
    rows = [layer for block in setting.counts.blocks for layer in block.rows if layer.halo]
    bytes_ = [2 * samples * layer.halo * layer.row for layer in rows]  # forward and backward
    seconds = sum(2 * collectives.send(size / 2, machine, 1, world, crosses) for size in bytes_)
    return Message("halo exchange", 2 * count * len(rows), count * sum(bytes_), count * seconds, count * seconds)
