"""Spatial parallelism, prediction only: ranks share the rows of every image (Dryden et al. 2019; Kahira et al. 2021).

Convolutions and poolings fetch the rows of their window that a neighbour has, forward of the input and backward of the
output's gradient: 2 alpha + B (halo(x) + halo(dy)) beta a layer. The layers after the last of them see whole images:
they are gathered there, and computed on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddlbench.errors import Unsupported
from ddlbench.frameworks.shared.layout import fill
from ddlbench.measure.formulas.memory_formula import data_parallel, in_fp32
from ddlbench.oracle.machine import collectives
from ddlbench.oracle.memory.passes import Moment, at_peak, buffer_bytes
from ddlbench.oracle.setting import Limit, Message, Outcome, Setting
from ddlbench.oracle.strategies.data_parallel import averaged, pass_seconds
from ddlbench.oracle.timing import overlap
from ddlbench.oracle.timing.computation import Pass


@dataclass(frozen=True)
class Spatial:
    """sp neighbouring ranks share the images of one of dp replicas; None: all ranks / dp."""

    name: str = "spatial"
    dp: int = 1
    sp: int | None = None


def spatial(framework: Spatial, setting: Setting) -> Outcome:
    job, blocks = setting.job, setting.counts.blocks
    if job.model.kind != "images":
        raise Unsupported(f"spatial: {job.model.name} has no image to split: choose framework=tensor")
    sp = fill(setting.world, {"dp": framework.dp, "sp": framework.sp}, free="sp")
    limit = _limit(setting)
    if sp > limit.largest:
        raise Unsupported(
            f"spatial: {sp} ranks cannot share the {limit.largest} rows of {limit.layer}: choose "
            f"framework.sp={limit.largest} or fewer"
        )
    count = job.micro_batches(framework.dp)
    samples = job.replica_batch(framework.dp) / count
    last = max(index for index, block in enumerate(blocks) if block.rows)
    parts = [
        _part(block, sp if index <= last else 1) for index, block in enumerate(setting.computation.blocks(samples))
    ]
    back = [(block.backward + block.forward * job.checkpoint_activations) * setting.contention for block in parts]
    messages: list[Message] = []
    if sp > 1:
        messages += [_halos(setting, samples, count, sp), _joined(setting, samples, count, last, sp)]
    sizes = [[number * float(setting.gradient_bytes) for number in block.parameters] for block in blocks]
    if setting.world > 1:
        sent = overlap.buckets(overlap.gradients(sizes, back))
        messages.append(averaged(setting, sent, sum(back)))
    numbers = setting.counts.numbers
    compute = count * sum(map(pass_seconds(job.checkpoint_activations), parts)) + setting.computation.update(numbers)
    saved = sum(block.saved.at(samples) / (sp if index <= last else 1) for index, block in enumerate(blocks))
    states = data_parallel(numbers, in_fp32(setting.optimizer), 0, 1)
    return Outcome(
        compute_s=compute * setting.contention,
        messages=tuple(messages),
        memory=at_peak(states, [Moment(states.gradients, saved)], buffer_bytes(blocks)),
        limits=(limit, Limit("dp", job.global_batch, "one sample of the global batch a replica")),
        layout={"dp": framework.dp, "sp": sp},
        micro_samples=samples,
    )


def _part(block: Pass, ranks: int) -> Pass:
    return Pass(block.forward / ranks, block.backward / ranks)


def _halos(setting: Setting, samples: float, count: int, sp: int) -> Message:
    """The exchange of halos. All neighbours exchange at once: if some of them are on two nodes, all wait for these."""
    machine, world = setting.machine, setting.world
    crosses = bool(machine.per_node(world) % sp)
    rows = [layer for block in setting.counts.blocks for layer in block.rows if layer.halo]
    bytes_ = [2 * samples * layer.halo * layer.row for layer in rows]  # forward and backward
    seconds = sum(2 * collectives.send(size / 2, machine, 1, world, crosses) for size in bytes_)
    return Message("halo exchange", 2 * count * len(rows), count * sum(bytes_), count * seconds, count * seconds)


def _joined(setting: Setting, samples: float, count: int, last: int, sp: int) -> Message:
    """The gathering of the complete output of the last block that is split; its gradient is already on every rank."""
    size = setting.counts.blocks[last].output * samples
    seconds = count * collectives.all_gather(size, setting.path(sp))
    return Message("all-gather of the last images", count, count * size, seconds, seconds)


def _limit(setting: Setting) -> Limit:
    """The convolution or pooling with the fewest rows."""
    rows = [layer for block in setting.counts.blocks for layer in block.rows]
    fewest = min(rows, key=lambda layer: layer.height)
    return Limit("sp", fewest.height, fewest.name)
