"""What the seconds of computing come from: measured runs, one number, a calibration, or the device's peaks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import psutil
import torch

from ddlbench.config.schema import Config
from ddlbench.cores import allowed_cores
from ddlbench.errors import UserError
from ddlbench.oracle.counts.counting import count
from ddlbench.oracle.counts.counts import Counts
from ddlbench.oracle.machine import machine as machines
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured import network
from ddlbench.oracle.measured.calibrate import calibration, this_device
from ddlbench.oracle.setting import kind_of
from ddlbench.oracle.timing import computation
from ddlbench.oracle.timing.computation import Computation, Speeds

ONE_NUMBER = "one GPU's step"


@dataclass(frozen=True)
class OneStep:
    """A measured step of one process.

    samples, micro: of its batch and of a micro batch; None: those of one GPU in the configuration
    """

    seconds: float
    samples: int | None = None
    micro: int | None = None


def counts_of(config: Config, machine: Machine) -> Counts:
    return count(config.model, config.train.precision, machine.device.type, config.recipe.label_smoothing)


def speeds_of(config: Config, machine: Machine) -> Speeds | None:
    return Speeds.of(machine.device, config.train.precision, config.train.tf32)


def from_roofline(config: Config, machine: Machine) -> Computation:
    counts, speeds = counts_of(config, machine), speeds_of(config, machine)
    return computation.roofline(counts, speeds, kind_of(config.recipe.optimizer), machine.device.name)


def from_one_step(
    config: Config, machine: Machine, step: OneStep, basis: str = ONE_NUMBER, blocks: Computation | None = None
) -> Computation:
    """blocks: measured ones, which say how the step is spread over them; None: the roofline does. UserError where the
    samples of the step are no whole number of micro batches."""
    train = config.train
    samples = step.samples or train.samples_per_update(1)
    micro = min(step.micro or train.micro_batch or samples, samples)
    if samples % micro:
        raise UserError(
            f"a step of {samples} samples is no whole number of micro batches of {micro} (train.micro_batch): "
            f"choose a micro batch that divides {samples}"
        )
    if blocks is None:
        counts, speeds = counts_of(config, machine), speeds_of(config, machine)
        blocks = computation.proportions(counts, speeds, kind_of(config.recipe.optimizer))
    return computation.spread(blocks, step.seconds, micro, samples // micro, basis, train.checkpoint_activations)


def from_calibration(config: Config, machine: Machine) -> Computation:
    """Blocks of at most twice one GPU's batch: more might not fit."""
    device = this_device(machine.device)
    largest = 2 * config.train.samples_per_update(1)
    measure = partial(calibration, config, device)
    counts, speeds = counts_of(config, machine), speeds_of(config, machine)
    return computation.calibrated(counts, speeds, kind_of(config.recipe.optimizer), measure, largest)


def own_gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def machine_of(name: str, overlap: bool | None = None) -> Machine:
    """The machine of a description; if it describes this machine or one of its nodes, with what was measured here.

    name: of the description, or its file
    overlap: whether communication is hidden; None: as the file says, or as it was measured
    """
    machine = machines.load(name)
    device = machine.device
    if machine.name == "local":
        memory = device.memory_bytes or float(psutil.virtual_memory().total)
        device = replace(device, memory_bytes=memory)
        machine = replace(network.calibrated(machine), device=device, cores=machine.cores or len(allowed_cores()))
    elif device.type == "cuda" and device.name == own_gpu():
        machine = network.calibrated(machine)
    return machines.with_overlap(machine, overlap)
