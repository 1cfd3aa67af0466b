"""The source of the seconds of computing: measured runs, one number, a calibration, or the device's peaks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import psutil
import torch

from ddlbench.config.schema import Config
from ddlbench.cores import allowed_cores
from ddlbench.errors import UserError
from ddlbench.oracle.counts.counting import count
from ddlbench.oracle.machine import machine as machines
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured import network
from ddlbench.oracle.measured.calibrate import calibration
from ddlbench.oracle.setting import kind_of
from ddlbench.oracle.timing.computation import ANY, Computation, Speeds

ROOFLINE = "roofline"  # the basis without any measurement


@dataclass(frozen=True)
class OneStep:
    """A measured step of one process, or of several GPUs.

    samples, micro: of the global batch and of a micro batch; None: those of one GPU in the configuration
    """

    seconds: float
    samples: int | None = None
    micro: int | None = None
    gpus: int = 1


def proportions(config: Config, machine: Machine) -> Computation:
    """Seconds by the roofline; if the device's peaks are unknown, only their proportions count."""
    precision, device = config.train.precision, machine.device
    counts = count(config.model, precision, device.type, config.recipe.label_smoothing)
    speeds = Speeds.of(device, precision, config.train.tf32) or ANY
    return Computation(counts, speeds, kind_of(config.recipe.optimizer), ROOFLINE)


def from_roofline(config: Config, machine: Machine) -> Computation:
    """UserError if the device's peaks are unknown."""
    computation = proportions(config, machine)
    if computation.speeds is ANY:
        raise UserError(
            f"nothing is known of how fast {machine.device.name} computes: give --one-gpu-step-s SECONDS, --from "
            "RESULTS with a measured run, or --calibrate on that device"
        )
    return computation


def from_one_step(
    config: Config, machine: Machine, step: OneStep, basis: str = "one GPU's step", blocks: Computation | None = None
) -> Computation:
    """blocks: measured blocks; the step is divided in their proportions. None: in those of the roofline. UserError if
    the samples of the step are not a multiple of the micro batch."""
    train = config.train
    samples = step.samples or train.samples_per_update(1)
    micro = min(step.micro or train.micro_batch or samples, samples)
    if samples % micro:
        raise UserError(
            f"a step of {samples} samples is no whole number of micro batches of {micro} (train.micro_batch): "
            f"choose a micro batch that divides {samples}"
        )
    plain = blocks or proportions(config, machine)
    offload = train.offload_activations, train.flops_per_host_byte
    plan = plain.counts.plan(train.checkpoint_activations, micro, 0, None, 1, *offload)
    return plain.scaled_to(step.seconds, micro, samples // micro, basis, plan)


def from_calibration(config: Config, machine: Machine) -> Computation:
    """Measured blocks, of at most twice one GPU's batch, because more might not fit. UserError on another device."""
    require_gpu("--calibrate", machine, ", or give --one-gpu-step-s SECONDS")
    device = torch.device("cuda", 0) if machine.device.type == "cuda" else torch.device("cpu")
    largest, measure = 2 * config.train.samples_per_update(1), partial(calibration, config, device)
    return replace(proportions(config, machine), basis="calibration", measure=measure, largest=largest)


def own_gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def require_gpu(option: str, machine: Machine, alternative: str = "") -> None:
    """UserError if the option measures a machine whose GPUs this machine does not have."""
    if machine.device.type == "cuda" and machine.device.name != own_gpu():
        raise UserError(
            f"{option} measures this machine, which has {own_gpu() or 'no GPU'}, not {machine.device.name}: run it "
            f"there{alternative}"
        )


def machine_of(name: str, overlap: bool | None = None) -> Machine:
    """The machine of a description; if it describes this machine or one of its nodes, with the values measured here.

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
