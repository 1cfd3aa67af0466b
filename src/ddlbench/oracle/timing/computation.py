"""Seconds of computing: of each block forward and backward, and of the weight update.

By the roofline (Williams et al. 2009) an operation takes the longer of FLOPs / peak FLOP/s and bytes / bandwidth of the
memory. A measured step is divided among the operations in proportion to their roofline; measured blocks replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ddlbench.oracle.counts.counts import Block, Counts, Floats, Work
from ddlbench.oracle.machine.machine import Device
from ddlbench.recipe.optimizers import costs


@dataclass(frozen=True)
class Pass:
    """Seconds of one block for one micro batch. checkpointed: the forward pass runs again before the backward pass"""

    forward: float
    backward: float

    def both(self, checkpointed: bool) -> float:
        return self.forward * (2 if checkpointed else 1) + self.backward

    def back(self, checkpointed: bool) -> float:
        return self.backward + (self.forward if checkpointed else 0.0)


@dataclass(frozen=True)
class Speeds:
    """Peak FLOP/s of a device, and the bandwidth of its memory."""

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, device: Device, precision: str, tf32: bool) -> Speeds | None:
        flops = device.flops_per_s(precision, tf32)
        return None if flops is None or device.bytes_per_s is None else cls(flops, device.bytes_per_s)

    def operations(self, work: Work, samples: float) -> Floats:
        """Seconds of each operation."""
        return np.maximum(work.flops * samples / self.flops_per_s, work.moved.at(samples) / self.bytes_per_s)

    def seconds(self, work: Work, samples: float) -> float:
        return float(self.operations(work, samples).sum())

    def block(self, block: Block, samples: float) -> Pass:
        return Pass(self.seconds(block.forward, samples), self.seconds(block.backward, samples))


# For a device whose peaks are unknown: 10 FLOPs a byte. Only the proportions of the seconds mean something.
ANY = Speeds(10.0, 1.0)


@dataclass
class Computation:
    """The seconds of computing of one model on one kind of device.

    basis: source of the seconds, for the reader
    factor: seconds of a measured step / seconds that the roofline or the measured blocks give it
    samples: the micro batch of the measured step, None if there is none; remarks: further notes on the basis
    measured: passes of blocks by micro batch size; update_s: of one parameter, None: by its bytes
    measure: measures the blocks, and the update in seconds, for a micro batch of at most `largest` samples
    """

    counts: Counts
    speeds: Speeds
    optimizer: str
    basis: str
    factor: float = 1.0
    samples: float | None = None
    remarks: tuple[str, ...] = ()
    measured: dict[int, Sequence[Pass]] = field(default_factory=dict[int, Sequence[Pass]])
    update_s: float | None = None
    measure: Callable[[int], tuple[Sequence[Pass], float]] | None = None
    largest: int = 0
    _cache: dict[tuple[float, int], list[Pass]] = field(default_factory=dict[tuple[float, int], list[Pass]])

    def blocks(self, samples: float, tp: int = 1) -> list[Pass]:
        """Seconds of each block for a micro batch. tp: ranks that share each block as far as it can be shared."""
        key = samples, tp
        if key not in self._cache:
            size = min(int(samples), self.largest)
            if self.measure is not None and size not in self.measured:
                self.measured[size], update_s = self.measure(size)
                self.update_s = self.update_s or update_s / self.counts.parameter_count
            self._cache[key] = [self._block(index, samples, tp) for index in range(len(self.counts.blocks))]
        return self._cache[key]

    def _block(self, index: int, samples: float, tp: int) -> Pass:
        """Seconds of a block by the roofline; or as measured at the nearest micro batch, in proportion to it."""
        block = self.counts.blocks[index]
        took = self.speeds.block(block, samples)
        if self.measured:
            near = min(self.measured, key=lambda size: abs(size - samples))
            base, there = self.speeds.block(block, near), self.measured[near][index]
            took = Pass(
                there.forward * took.forward / base.forward if base.forward else there.forward,
                there.backward * took.backward / base.backward if base.backward else there.backward,
            )
        shared = self._shared(block, samples) if tp > 1 else 0.0
        factor = self.factor * (1 - shared + shared / tp)
        return Pass(took.forward * factor, took.backward * factor)

    def _shared(self, block: Block, samples: float) -> float:
        """The share of a block's time that tensor parallelism divides."""
        seconds = self.speeds.operations(block.forward, samples)
        total = float(seconds.sum())
        return float(seconds[block.forward.shared].sum()) / total if total else 0.0

    def update(self, parameters: float) -> float:
        """Seconds of the update of so many parameters. A calibration measures it with the first blocks."""
        assert self.measure is None or self.update_s is not None, "ask for blocks before the update"
        parameter_s = self.update_s
        if parameter_s is None:
            parameter_s = costs(self.optimizer).bytes_ / self.speeds.bytes_per_s
        return self.factor * parameters * parameter_s

    def step(self, samples: float, micro_batches: int = 1, checkpointed: bool = False) -> float:
        """Seconds of a step of a single process."""
        once = sum(block.both(checkpointed) for block in self.blocks(samples))
        return micro_batches * once + self.update(self.counts.parameter_count)

    def marks(self, samples: float) -> list[str]:
        """Remarks on the basis, and one if this micro batch is outside of the measured ones."""
        measured = sorted(self.measured) if self.samples is None else [self.samples]
        if not measured or samples in measured:
            return [*self.remarks]
        sizes = ", ".join(f"{size:g}" for size in measured)
        return [*self.remarks, f"{self.basis} at a micro batch of {sizes}, not {samples:g}"]


def spread(
    plain: Computation, step_s: float, samples: float, micro_batches: int, basis: str, checkpointed: bool = False
) -> Computation:
    """A measured step of one process, divided among blocks and update in the proportions of `plain`."""
    factor = step_s / plain.step(samples, micro_batches, checkpointed)
    return replace(plain, basis=basis, factor=factor, samples=samples, _cache={})
