"""The peak memory of one micro batch's forward and backward pass.

In the backward pass gradients arrive block by block while saved activations are freed, so the two maxima are at
different moments. Not included: the contexts of CUDA and NCCL, workspaces of kernels, fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

from ddlbench.activation_memory import instants
from ddlbench.job import Job, example_batch
from ddlbench.measure.formulas.memory_formula import FP32_BYTES, Bytes
from ddlbench.oracle.counts.counting import count_job
from ddlbench.oracle.counts.counts import Block, Counts
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.recipe.optimizers import costs
from ddlbench.recomputation import Plan


class Moment(NamedTuple):
    """Bytes at one moment of a step: gradients, and activations with temporary results and buffers of the library."""

    gradients: float
    activations: float

    def plus(self, gradients: float, activations: float = 0.0) -> Moment:
        return Moment(self.gradients + gradients, self.activations + activations)


def passes(
    blocks: Sequence[Block],
    samples: float,
    plan: Plan,
    gradients: Sequence[float],
    accumulating: bool,
    gathered: Sequence[tuple[float, float]] = (),
) -> Moment:
    """The peak of one micro batch: forward block by block, then backward.

    plan: which blocks run again
    gradients: bytes that stay in memory from the backward pass of each block on (`arriving`)
    accumulating: gradients are added to existing ones
    gathered: bytes that the library has in memory while each block runs forward and backward
    """
    peak = Moment(0.0, 0.0)
    for run in instants(plan, [block.link(samples, accumulating) for block in blocks]):
        beside = gathered[run.block][run.backward] if gathered else 0.0
        peak = max(peak, Moment(sum(gradients[run.done :]), run.bytes_ + beside), key=sum)
    return peak


def arriving(counts: Counts, accumulating: bool, shards: int = 1, number_bytes: int = FP32_BYTES) -> list[float]:
    """Bytes of the gradients that each block adds in a backward pass; accumulating: they have memory already. The
    gradient of a tied parameter from the last block waits for that from the first block. number_bytes: of a gradient"""
    parameters = [0.0 if accumulating else block.parameter_count / shards for block in counts.blocks]
    if counts.tied:
        parameters[0] -= 0.0 if accumulating else counts.tied / shards
        parameters[-1] += counts.tied
    return [number_bytes * count for count in parameters]


def largest_tensor(blocks: Sequence[Block], number_bytes: int = FP32_BYTES) -> float:
    """Bytes of the largest gradient."""
    return number_bytes * float(max((size for block in blocks for size in block.tensor_sizes), default=0))


def sizes_of(blocks: Sequence[Block], shards: int = 1) -> list[int]:
    """Numbers of each tensor on a rank. shards: of which it has one, cut between numbers instead of rows"""
    return [ceil(size / shards) for block in blocks for size in block.tensor_sizes]


def update_copies(optimizer: str, blocks: Sequence[Block], part: float = 1.0) -> float:
    """Bytes of temporary results of the update, which handles one tensor at a time. part: of each tensor on this
    rank."""
    return costs(optimizer).copies * largest_tensor(blocks) * part


def batch_bytes(job: Job, samples: float) -> float:
    """Bytes of a replica's batch."""
    one = example_batch(job.model, 1)
    return samples * (one.inputs.nbytes + one.targets.nbytes + one.valid.nbytes)


def buffer_bytes(blocks: Sequence[Block]) -> float:
    """Bytes of BatchNorm's statistics."""
    return float(sum(block.buffers for block in blocks))


def at_peak(states: Bytes, moments: Iterable[Moment], permanent: float) -> Memory:
    """The parts of a rank's memory at the fullest of these moments. permanent: other bytes that stay all the time"""
    peak = max(moments, key=sum)
    return Memory(states.parameters, peak.gradients, states.optimizer, peak.activations, permanent)


def counts_of_rank(setting: Setting, tp: int, sequence: bool = False, cast: bool = False, sp: int = 1) -> Counts:
    """The counts of one of tp ranks that share every layer, or of sp ranks that share the rows of images. cast: the
    weights themselves are in 16 bits"""
    if tp == sp == 1 and not cast:
        return setting.counts
    return count_job(setting.job, setting.machine.device.type, tp, sequence, cast, sp)
