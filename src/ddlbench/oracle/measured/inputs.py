"""The inputs of a prediction that come from measurements: the seconds of computing, and terms of the cluster.

The source of the seconds of computing is one measured step, a calibration, or the device's peaks.

Terms of a cluster are learned from steps that were measured with several GPU counts. Each of TERMS is multiplied by a
factor. The logarithms of the factors have a normal distribution around 0 with the standard deviations of TERMS, and a
measured step differs from its prediction by NOISE. The most probable factors follow by Gauss-Newton steps (Tarantola
2005, Inverse Problem Theory, section 3.2). The difference that remains at the largest measured count also applies to
larger counts.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from ddlbench.config.schema import Config
from ddlbench.cores import allowed_cores
from ddlbench.counts.counting import count
from ddlbench.counts.counts import Share
from ddlbench.data.feed import Request
from ddlbench.data.home import home
from ddlbench.data.loaders.synthetic import random_batch
from ddlbench.errors import UserError
from ddlbench.frameworks.shared.checkpointing import keep_costly_outputs_of
from ddlbench.job import Place
from ddlbench.measure.block_seconds import REPEATS, block_seconds
from ddlbench.measure.clock import idle
from ddlbench.offloading import plan_of
from ddlbench.oracle.machine import machine as machines
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured import network
from ddlbench.oracle.timing.computation import ANY, Computation, Pass, Speeds
from ddlbench.recipe.optimizers import make_optimizer
from ddlbench.recipe.recipe import CrossEntropy
from ddlbench.recomputation import SELECTIVE
from ddlbench.run.settings import set_switches
from ddlbench.texts import digest

ALIKE = ("precision", "tf32", "channels_last", "cudnn_benchmark", "deterministic")  # of a run: speed of its kernels
ROOFLINE = "roofline"  # the basis without any measurement
# The 10 and 90 % quantiles of measured / predicted seconds (docs/oracle.md).
SLOWER = "four of five steps measured on one H100 or H200 took 1.1 to 2.4 times as long"
NOISE = 0.02  # standard deviation of the logarithm of a measured step
TERMS = {"link within a node": 0.3, "links between nodes": 0.3, "cost of hidden communication": 0.5, "spread": 0.5}
ROUNDS, DIFFERENCE, LARGEST = 8, 1e-3, 0.5  # of the logarithms: difference for a slope, and largest change in a round
LEARNED = 0.9  # of the standard deviation of TERMS: a factor that stays above it was not learned


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
    share = Share(selective=config.train.checkpoint_activations == SELECTIVE)
    counts = count(config.model, precision, device.type, config.recipe.label_smoothing, share)
    speeds = Speeds.of(device, precision, config.train.tf32) or ANY
    return Computation(counts, speeds, config.recipe.optimizer.costs, ROOFLINE)


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
    """blocks: measured blocks; the step is divided in their proportions. None: in the proportions of the roofline.
    UserError if the samples of the step are not a multiple of the micro batch."""
    train = config.train
    samples = step.samples or train.samples_per_update(1)
    micro = min(step.micro or train.micro_batch or samples, samples)
    if samples % micro:
        raise UserError(
            f"a step of {samples} samples is no whole number of micro batches of {micro} (train.micro_batch): "
            f"choose a micro batch that divides {samples}"
        )
    plain = blocks or proportions(config, machine)
    choices = train.checkpoint_activations, train.offload_activations, train.flops_per_host_byte
    counted = plain.counts.blocks
    plan = plan_of(*choices, [block.name for block in counted], lambda: [block.link(micro) for block in counted])
    return plain.scaled_to(step.seconds, micro, samples // micro, basis, plan)


def from_calibration(config: Config, machine: Machine) -> Computation:
    """Measured blocks, of at most twice one GPU's batch, because more might not fit. UserError on another device."""
    require_gpu("--calibrate", machine, ", or give --one-gpu-step-s SECONDS")
    device = torch.device("cuda", 0) if machine.device.type == "cuda" else torch.device("cpu")
    largest, measure = 2 * config.train.samples_per_update(1), partial(calibration, config, device)
    return replace(proportions(config, machine), basis="calibration", measure=measure, largest=largest)


def calibration(config: Config, device: torch.device, samples: int) -> tuple[tuple[Pass, ...], float]:
    """Passes of the blocks, and seconds of the update, measured on this machine's device. They are measured once for
    each model, micro batch, precision, optimizer and version of torch, and stored in $DDLBENCH_HOME/oracle."""
    train, optimizer = config.train, config.recipe.optimizer
    key = {name: getattr(train, name) for name in ALIKE} | {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu of {platform.node()}",
        "model": repr(config.model),
        "samples": samples,
        "threads": train.threads_per_rank,
        "optimizer": optimizer.name,
        "momentum": optimizer.momentum > 0,
        "torch": str(torch.__version__),
        **({SELECTIVE: True} if train.checkpoint_activations == SELECTIVE else {}),
    }
    path = home() / "oracle" / f"blocks-{digest(key, 16)}.json"
    kept: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        kept = dict(json.loads(path.read_text()))
    if kept.get("key") != key:
        try:
            passes, update_s = measure(config, device, samples)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"--calibrate: {samples} samples do not fit {key['device']}: give train.micro_batch"
            ) from error
        kept = {"key": key, "passes": passes, "update_s": update_s}
        network.keep(path, kept)
    return tuple(Pass(*seconds) for seconds in kept["passes"]), kept["update_s"]


def measure(config: Config, device: torch.device, samples: int) -> tuple[list[tuple[float, float]], float]:
    """Seconds of every block, forward and backward, and of the update: the medians of the repeats."""
    set_switches(config.train, device)
    torch.manual_seed(0)
    model = config.model.build().to(device)
    model.to(memory_format=torch.channels_last if config.train.channels_last else torch.contiguous_format)
    request = Request(config.model, Place(0, 1), device, 0, samples, channels_last=config.train.channels_last)
    batch = random_batch(request, samples)
    loss = CrossEntropy(config.recipe.label_smoothing)
    prepare = [keep_costly_outputs_of] if config.train.checkpoint_activations == SELECTIVE else []
    passes = block_seconds(model, batch, loss, config.train.precision, *prepare)
    optimizer = make_optimizer(config.recipe.optimizer, model.named_parameters())
    updates: list[float] = []
    for _ in range(REPEATS + 1):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        idle(device)
        began = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        idle(device)
        updates.append(time.perf_counter() - began)
    return passes, median(updates[1:])


def local_gpu() -> str | None:
    """The name of the first GPU; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def require_gpu(option: str, machine: Machine, alternative: str = "") -> None:
    """UserError if the option measures a machine whose GPUs this machine does not have."""
    if machine.device.type == "cuda" and machine.device.name != local_gpu():
        raise UserError(
            f"{option} measures this machine, which has {local_gpu() or 'no GPU'}, not {machine.device.name}: run it "
            f"there{alternative}"
        )


def machine_of(name: str, overlap: bool | None = None) -> Machine:
    """The machine of a description. It has the values measured here if it describes this machine or one of its nodes.

    name: of the description, or its file
    overlap: whether communication is hidden; None: as the file says, or as it was measured
    """
    machine = machines.load(name)
    device = machine.device
    if machine.name == "local":
        memory = device.memory_bytes or float(psutil.virtual_memory().total)
        device = replace(device, memory_bytes=memory)
        machine = replace(network.calibrated(machine), device=device, cores=machine.cores or len(allowed_cores()))
    elif device.type == "cuda" and device.name == local_gpu():
        measured = network.calibrated(machine)
        machine = measured if machine.overlap else replace(measured, hidden_cost={})  # nothing is hidden there
    return machine if overlap is None else machines.with_overlap(machine, overlap)


@dataclass(frozen=True)
class Learned:
    """The machine with the learned terms.

    gpus: the largest measured GPU count; rest: measured over predicted seconds at this count, with the learned terms
    factors: of each term; None if the steps do not determine it
    """

    machine: Machine
    gpus: int
    rest: float
    factors: Mapping[str, float | None]

    def lines(self) -> list[str]:
        """The terms that were learned, and those that were not, as text."""
        values = [f"{name} x{factor:.2f}" for name, factor in self.factors.items() if factor is not None]
        missing = [name for name, factor in self.factors.items() if factor is None]
        lines = [f"learned: {', '.join((*values, f'other differences x{self.rest:.3f}'))}"]
        return [*lines, f"not learned, because no run depends on it enough: {', '.join(missing)}"] if missing else lines


def learn(
    machine: Machine, predicted: Callable[[Machine], Sequence[float]], measured: Sequence[float], gpus: int
) -> Learned:
    """The terms that bring predicted and measured seconds together.

    predicted: seconds of the measured steps on a machine, in ascending order of their GPU counts, as `measured`
        UserError for a machine on which the communication of their base takes longer than the base
    gpus: the largest of these counts
    """
    deviations, logs = np.array(list(TERMS.values())), np.zeros(len(TERMS))
    precision = np.diag(deviations**-2)
    wanted, steps = np.log(measured), DIFFERENCE * np.eye(len(TERMS))

    def at(logs: np.ndarray) -> np.ndarray:
        return np.log(predicted(_with_factors(machine, np.exp(logs))))

    def reached(logs: np.ndarray, change: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """After the change, or after a half, a quarter, ... of it if the base does not allow all of it."""
        try:
            return logs + change, at(logs + change)
        except UserError:
            return reached(logs, change / 2)

    now = at(logs)
    for _ in range(ROUNDS):
        slopes = np.stack([(at(logs + step) - now) / DIFFERENCE for step in steps], axis=1)
        precision = slopes.T @ slopes / NOISE**2 + np.diag(deviations**-2)
        change = np.linalg.solve(precision, slopes.T @ (wanted - now) / NOISE**2 - logs / deviations**2)
        logs, now = reached(logs, np.clip(change, -LARGEST, LARGEST))
        if np.abs(change).max() < DIFFERENCE:
            break
    left = np.sqrt(np.diag(np.linalg.inv(precision))) / deviations
    factors = np.exp(logs)
    learned = {name: float(factors[i]) if left[i] <= LEARNED else None for i, name in enumerate(TERMS)}
    return Learned(_with_factors(machine, factors), gpus, float(np.exp(wanted[-1] - now[-1])), learned)


def _with_factors(machine: Machine, factors: np.ndarray) -> Machine:
    """The machine with each of TERMS multiplied. A factor of a link multiplies its bandwidth."""
    inner, outer, hidden, spread = map(float, factors)
    rates = zip(machine.links, (inner, outer), strict=False)  # a machine may lack a link
    links = [replace(link, bytes_per_s=link.bytes_per_s * rate) for link, rate in rates]
    sweeps = {
        key: replace(sweep, seconds=tuple(seconds / inner for seconds in sweep.seconds))
        for key, sweep in machine.sweeps.items()
    }
    costs = {ranks: cost * hidden for ranks, cost in machine.hidden_cost.items()}
    return replace(machine, links=tuple(links), sweeps=sweeps, hidden_cost=costs, spread=machine.spread * spread)
