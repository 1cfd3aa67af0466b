"""Seconds of computing: of each block forward and backward, and of the weight update.

Each operation takes the longer of its FLOPs at the device's peak and its bytes at the memory's bandwidth (the roofline
of Williams et al. 2009). A measurement replaces that where there is one: a whole step's seconds are spread over the
operations in proportion to their roofline, seconds of single blocks are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ddlbench.errors import UserError
from ddlbench.oracle.counts.counts import Block, Counts, Numbers, Work
from ddlbench.oracle.machine.machine import Device
from ddlbench.recipe.optimizers import costs

# FLOPs a byte of a device whose peaks are not known: they only spread a measured number over the blocks.
UNKNOWN_BALANCE = 10.0


@dataclass(frozen=True)
class Pass:
    """Seconds of one block for one micro batch."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Speeds:
    """What a device does in a second at most."""

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, device: Device, precision: str, tf32: bool) -> Speeds | None:
        flops = device.flops_per_s(precision, tf32)
        return None if flops is None or device.bytes_per_s is None else cls(flops, device.bytes_per_s)

    def operations(self, work: Work, samples: float) -> Numbers:
        """Seconds of each operation."""
        return np.maximum(work.flops * samples / self.flops_per_s, work.bytes_at(samples) / self.bytes_per_s)

    def seconds(self, work: Work, samples: float) -> float:
        return float(self.operations(work, samples).sum())


ANY = Speeds(UNKNOWN_BALANCE, 1.0)  # of which only the proportions count


@dataclass(frozen=True)
class Blocks:
    """Measured seconds of each block at one micro batch size."""

    samples: int
    passes: tuple[Pass, ...]


@dataclass
class Computation:
    """The seconds of computing of one model on one kind of device.

    basis: what the seconds come from, for the reader
    factor: seconds of a measured step over those of its blocks and its update, by the roofline or measured one by one
    measured: seconds of blocks by micro batch size; update_s: of one parameter, None: by its bytes
    samples: the micro batch of the measured step, None if there is none; remarks: further notes on the basis
    measure: measures blocks, and the update in seconds, of a micro batch of at most `largest` samples
    """

    counts: Counts
    speeds: Speeds
    optimizer: str
    basis: str
    factor: float = 1.0
    samples: float | None = None
    remarks: tuple[str, ...] = ()
    measured: dict[int, Blocks] = field(default_factory=dict[int, Blocks])
    update_s: float | None = None
    measure: Callable[[int], tuple[Blocks, float]] | None = None
    largest: int = 0
    _cache: dict[tuple[float, int], list[Pass]] = field(default_factory=dict[tuple[float, int], list[Pass]])

    def blocks(self, samples: float, tp: int = 1) -> list[Pass]:
        """Seconds of each block for a micro batch. tp: ranks that share each block as far as it can be shared."""
        key = samples, tp
        if key not in self._cache:
            self._cache[key] = [self._block(index, samples, tp) for index in range(len(self.counts.blocks))]
        return self._cache[key]

    def _block(self, index: int, samples: float, tp: int) -> Pass:
        block = self.counts.blocks[index]
        shared = self.shared(block, samples) if tp > 1 else 0.0
        factor = self.factor * (1 - shared + shared / tp)
        seconds = self._unscaled(index, block, samples)
        return Pass(seconds.forward * factor, seconds.backward * factor)

    def _unscaled(self, index: int, block: Block, samples: float) -> Pass:
        """Seconds of a block by the roofline, or as measured at the nearest micro batch."""
        plain = self._roofline(block, samples)
        if self.measure is not None:
            self._calibrate(samples)
        if not self.measured:
            return plain
        near = min(self.measured, key=lambda size: abs(size - samples))
        base, there = self._roofline(block, near), self.measured[near].passes[index]
        return Pass(
            there.forward * plain.forward / base.forward if base.forward else there.forward,
            there.backward * plain.backward / base.backward if base.backward else there.backward,
        )

    def _calibrate(self, samples: float) -> None:
        """Measure this micro batch, if it has not been measured and is not too large."""
        assert self.measure is not None
        size = min(int(samples), self.largest)
        if size not in self.measured:
            self.measured[size], update_s = self.measure(size)
            self.update_s = self.update_s or update_s / self.counts.numbers

    def _roofline(self, block: Block, samples: float) -> Pass:
        return Pass(self.speeds.seconds(block.forward, samples), self.speeds.seconds(block.backward, samples))

    def shared(self, block: Block, samples: float) -> float:
        """The share of a block's time that tensor parallelism divides."""
        seconds = self.speeds.operations(block.forward, samples)
        total = float(seconds.sum())
        return float(seconds[block.forward.shared].sum()) / total if total else 0.0

    def update(self, numbers: float) -> float:
        """Seconds of the update of so many parameters."""
        parameter_s = self.update_s
        if parameter_s is None:
            parameter_s = costs(self.optimizer).bytes_ / self.speeds.bytes_per_s
        return self.factor * numbers * parameter_s

    def step(self, samples: float, micro_batches: int = 1, checkpointed: bool = False) -> float:
        """Seconds of a step of a single process."""
        blocks = self.blocks(samples)
        once = sum(block.forward * (2 if checkpointed else 1) + block.backward for block in blocks)
        return micro_batches * once + self.update(self.counts.numbers)

    def marks(self, samples: float) -> list[str]:
        """Remarks on the basis, and one if this micro batch is outside of the measured ones."""
        measured = sorted(self.measured) if self.samples is None else [self.samples]
        if not measured or samples in measured:
            return [*self.remarks]
        sizes = ", ".join(f"{size:g}" for size in measured)
        return [*self.remarks, f"{self.basis} at a micro batch of {sizes}, not {samples:g}"]


def roofline(counts: Counts, speeds: Speeds | None, optimizer: str, device: str) -> Computation:
    """Seconds by the roofline. UserError if the device's peaks are not known."""
    if speeds is None:
        raise UserError(
            f"nothing is known of how fast {device} computes: give --one-gpu-step-s SECONDS, --from RESULTS with a "
            "measured run, or --calibrate on that device"
        )
    return Computation(counts, speeds, optimizer, "roofline")


def spread(
    plain: Computation, step_s: float, samples: float, micro_batches: int, basis: str, checkpointed: bool = False
) -> Computation:
    """One process's measured step, spread over blocks and update in the proportions of `plain`."""
    factor = step_s / plain.step(samples, micro_batches, checkpointed)
    return replace(plain, basis=basis, factor=factor, samples=samples, _cache={})


def proportions(counts: Counts, speeds: Speeds | None, optimizer: str) -> Computation:
    """Seconds by the roofline; if the device's peaks are not known, only their proportions count."""
    return Computation(counts, speeds or ANY, optimizer, "proportions")


def calibrated(
    counts: Counts,
    speeds: Speeds | None,
    optimizer: str,
    measure: Callable[[int], tuple[Blocks, float]],
    largest: int,
) -> Computation:
    """Seconds of blocks that are measured when they are asked for. largest: samples of a micro batch that surely
    fits."""
    return Computation(counts, speeds or ANY, optimizer, "calibration", measure=measure, largest=largest)
