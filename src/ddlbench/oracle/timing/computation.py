"""Seconds of computing: of each block forward and backward, and of the weight update.

By the roofline (Williams et al. 2009) an operation takes the longer of FLOPs / peak FLOP/s and bytes / bandwidth of the
memory. On GPUs each kernel also takes a fixed time, and all blocks together take at least the time in which the host
starts their kernels. A measured step shows by which factor the operations are slower than the roofline. If the factor
is above SLOWEST, or if the host would take longer than the step, the step shows how fast the host is. The remaining
factor scales all seconds. Measured blocks replace these seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ddlbench.counts.counts import Block, Counts
from ddlbench.measure.formulas.flops import peak_flops
from ddlbench.oracle.machine.machine import Device, nearest
from ddlbench.recipe.optimizers import Costs
from ddlbench.recomputation import Plan, repeats

# The operations of a large batch take 1.6 to 2.4 times as long as the roofline in bf16: five models on an H100 and two
# on an H200 (docs/measurements). A step that takes more than SLOWEST times as long does not show this factor: its host
# limits it, or it is slow as a whole.
USUAL, SLOWEST = 2.0, 2.5


class Pass(NamedTuple):
    """Seconds of one block for one micro batch.

    host_forward, host_backward: the part of these seconds in which the device waits for the host; collectives of its
        layers can use this time
    """

    forward: float
    backward: float
    host_forward: float = 0.0
    host_backward: float = 0.0

    def times(self, factor: float) -> Pass:
        return Pass(*(factor * seconds for seconds in self))


@dataclass(frozen=True)
class Speeds:
    """FLOP/s of a device, and the bandwidth of its memory in bytes/s: its peaks, or the rates of large kernels.

    kernel_s: seconds of a kernel beside its work; host_s: seconds in which the host starts a kernel
    """

    flops_per_s: float
    bytes_per_s: float
    kernel_s: float = 0.0
    host_s: float = 0.0

    @classmethod
    def of(cls, device: Device, precision: str, tf32: bool) -> Speeds | None:
        """The peaks of a device; None if they are not known."""
        rounded = device.tf32_flops_per_s if precision == "fp32" and tf32 else None
        flops = rounded or peak_flops(device.name, precision)
        if flops is None or device.bytes_per_s is None:
            return None
        return cls(flops, device.bytes_per_s, device.kernel_s, device.host_s)

    def block(self, block: Block, samples: float, tp: int = 1) -> Pass:
        """Seconds of a block for a micro batch. tp: ranks that share the block as far as it can be shared. Its backward
        pass is shared in the same proportion as its forward pass"""
        ahead, back = (  # seconds of the work of each operation
            np.maximum(work.flops * samples / self.flops_per_s, work.moved.at(samples) / self.bytes_per_s)
            for work in (block.forward, block.backward)
        )
        total = float(ahead.sum())
        shared = float(ahead[block.forward.shared].sum()) / total if total and tp > 1 else 0.0
        part = 1 - shared + shared / tp  # of the work of a rank, which starts all kernels
        seconds, waits = list[float](), list[float]()
        for operations in (ahead, back):
            on_device = float(operations.sum()) * part + len(operations) * self.kernel_s
            waits.append(max(0.0, len(operations) * self.host_s - on_device))
            seconds.append(on_device + waits[-1])
        return Pass(*seconds, *waits)


# For a device whose peaks are unknown: 10 FLOPs a byte. Only the proportions of the seconds mean something.
ANY = Speeds(10.0, 1.0)


@dataclass
class Computation:
    """The seconds of computing of one model on one kind of device.

    basis: source of the seconds, for the reader
    factor: seconds of a measured step / seconds that the speeds or the measured blocks give it
    samples: the micro batch of the measured step, None if there is none; remarks: further notes on the basis
    measured: passes of blocks by micro batch size; update_s: of one parameter, None: by its bytes
    measure: measures the blocks and the update, in seconds, for a micro batch of at most `largest` samples
    """

    counts: Counts
    speeds: Speeds
    optimizer: Costs
    basis: str
    factor: float = 1.0
    samples: float | None = None
    remarks: tuple[str, ...] = ()
    measured: dict[int, Sequence[Pass]] = field(default_factory=dict[int, Sequence[Pass]])
    update_s: float | None = None
    measure: Callable[[int], tuple[Sequence[Pass], float]] | None = None
    largest: int = 0
    _cache: dict[tuple[float, int], list[Pass]] = field(default_factory=dict[tuple[float, int], list[Pass]], init=False)

    def blocks(self, samples: float, tp: int = 1, plan: Plan | None = None) -> list[Pass]:
        """Seconds of each block for a micro batch, on a rank that has all blocks. tp: ranks that share each block as
        far as it can be shared; plan: which blocks run again in their backward pass; None: no block"""
        again = repeats(plan) if plan else [0] * len(self.counts.blocks)
        return self.queued(self.alone(samples, tp), self.counts.blocks, again)

    def alone(self, samples: float, tp: int = 1) -> list[Pass]:
        """Seconds of each block for a micro batch by itself: its host starts the kernels of no other block."""
        size = max(1, min(int(samples), self.largest))  # of a part of an image: of the complete image
        if self.measure is not None and size not in self.measured:
            self.measured[size], update_s = self.measure(size)
            self.update_s = self.update_s or update_s / self.counts.parameter_count
        if (samples, tp) not in self._cache:
            passes = [self.speeds.block(block, samples, tp) for block in self.counts.blocks]
            if self.measured:  # at the nearest micro batch; by the roofline in proportion to it
                near = nearest(self.measured, samples)
                bases = (self.speeds.block(block, near) for block in self.counts.blocks)
                passes = [
                    Pass(
                        there.forward * took.forward / base.forward if base.forward else there.forward,
                        there.backward * took.backward / base.backward if base.backward else there.backward,
                    )
                    for took, base, there in zip(passes, bases, self.measured[near], strict=True)
                ]
            self._cache[samples, tp] = [one.times(self.factor) for one in passes]
        return self._cache[samples, tp]

    def queued(self, alone: Sequence[Pass], blocks: Sequence[Block], again: Sequence[int]) -> list[Pass]:
        """Seconds of the blocks of one rank. Kernels wait in a queue: while one block keeps the device busy, the host
        starts the kernels of the next blocks. So all blocks together wait only for the time of the host that is longer
        than the device's time.

        alone: seconds of each block by itself; again: how often each one runs again in its backward pass
        """
        passes = list[Pass]()
        for one, count in zip(alone, again, strict=True):  # the forward pass runs again before the backward pass
            backward, host = one.backward + count * one.forward, one.host_backward + count * one.host_forward
            passes.append(one._replace(backward=backward, host_backward=host))
        waiting = sum(one.host_forward + one.host_backward for one in passes)
        if not waiting:
            return passes
        on_device = sum(one.forward + one.backward for one in passes) - waiting
        kernels = sum(
            (1 + count) * len(block.forward.flops) + len(block.backward.flops)
            for block, count in zip(blocks, again, strict=True)
        )
        share = max(0.0, self.factor * kernels * self.speeds.host_s - on_device) / waiting
        return [
            Pass(
                one.forward - (1 - share) * one.host_forward,
                one.backward - (1 - share) * one.host_backward,
                share * one.host_forward,
                share * one.host_backward,
            )
            for one in passes
        ]

    def update(self, parameters: float) -> float:
        """Seconds of the update of so many parameters. A calibration measures it with the first blocks."""
        assert self.measure is None or self.update_s is not None, "ask for blocks before the update"
        by_bytes = self.optimizer.bytes_ / self.speeds.bytes_per_s
        return self.factor * parameters * (by_bytes if self.update_s is None else self.update_s)

    def step(self, samples: float, micro_batches: int = 1, plan: Plan | None = None) -> float:
        """Seconds of a step of a single process. plan: as for `blocks`"""
        once = sum(one.forward + one.backward for one in self.blocks(samples, plan=plan))
        return micro_batches * once + self.update(self.counts.parameter_count)

    def scaled_to(
        self, step_s: float, samples: float, micro_batches: int, basis: str, plan: Plan | None = None
    ) -> Computation:
        """A measured step of one process, divided among blocks and update.

        samples: of a micro batch
        """

        def step(speeds: Speeds) -> float:
            return replace(self, speeds=speeds).step(samples, micro_batches, plan)

        speeds = self.speeds
        if self.measure is None:  # measured blocks contain kernels and host
            work_s = step(replace(speeds, kernel_s=0.0, host_s=0.0))
            kernels_s = step(replace(speeds, host_s=0.0)) - work_s
            times = max((step_s - kernels_s) / work_s, 1.0)
            slower = times if times <= SLOWEST else USUAL  # of all operations
            speeds = replace(speeds, flops_per_s=speeds.flops_per_s / slower, bytes_per_s=speeds.bytes_per_s / slower)
            host_limits = step(speeds) > step(replace(speeds, host_s=0.0))
            if host_limits and (times > SLOWEST or step(speeds) > step_s):
                speeds = replace(speeds, host_s=speeds.host_s * step_s / step(speeds))
        else:
            self.blocks(samples)  # measures the update, too, for the copies of this object
        factor = step_s / step(speeds)
        return replace(self, speeds=speeds, factor=factor, basis=basis, samples=samples)

    def marks(self, samples: float) -> list[str]:
        """Remarks on the basis, and one if this micro batch is outside of the measured ones."""
        measured = sorted(self.measured) if self.samples is None else [self.samples]
        if not measured or samples in measured:
            return [*self.remarks]
        sizes = ", ".join(f"{size:g}" for size in measured)
        return [*self.remarks, f"{self.basis} at a micro batch of {sizes}, not {samples:g}"]
