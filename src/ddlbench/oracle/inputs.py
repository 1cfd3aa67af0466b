"""What the seconds of computing come from: measured runs, one number, a calibration, or the device's peaks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.job import Job
from ddlbench.oracle import computation
from ddlbench.oracle.calibrate import calibration, this_device
from ddlbench.oracle.computation import Computation, Speeds
from ddlbench.oracle.counts import Counts, count
from ddlbench.oracle.machine import Machine
from ddlbench.report.read import Attempt, read_all

ONE_NUMBER = "one GPU's step"
# Keys of a run's `train` section that change how fast one process computes.
ALIKE = ("precision", "tf32", "checkpoint_activations", "compile", "channels_last", "threads_per_rank")


@dataclass(frozen=True)
class OneStep:
    """A measured step of one process. samples: of its batch; None: the batch of one GPU in the configuration."""

    seconds: float
    samples: int | None = None


def counts_of(config: Config, machine: Machine) -> Counts:
    return count(config.model, config.train.precision, machine.device.type, config.recipe.label_smoothing)


def speeds_of(config: Config, machine: Machine) -> Speeds | None:
    return Speeds.of(machine.device, config.train.precision, config.train.tf32)


def from_roofline(config: Config, machine: Machine) -> Computation:
    counts, speeds = counts_of(config, machine), speeds_of(config, machine)
    return computation.roofline(counts, speeds, config.recipe.optimizer.name, machine.device.name)


def from_one_step(config: Config, machine: Machine, step: OneStep, basis: str = ONE_NUMBER) -> Computation:
    """UserError where the micro batch does not divide the batch."""
    train = config.train
    samples = step.samples or train.samples_per_update(1)
    micro = min(train.micro_batch or samples, samples)
    return computation.spread(
        counts_of(config, machine), speeds_of(config, machine), config.recipe.optimizer.name,
        step.seconds, micro, samples // micro, basis, train.checkpoint_activations,
    )  # fmt: skip


def from_calibration(config: Config, machine: Machine) -> Computation:
    """Blocks of at most twice one GPU's batch: more might not fit."""
    device = this_device(machine.device)
    largest = 2 * config.train.samples_per_update(1)
    measure = partial(calibration, config, device)
    counts, speeds = counts_of(config, machine), speeds_of(config, machine)
    return computation.calibrated(counts, speeds, config.recipe.optimizer.name, measure, largest)


@dataclass(frozen=True)
class Base:
    """A measured run on one device that others are predicted from."""

    framework: str
    seconds: float
    samples: int
    path: Path


@dataclass
class Results:
    """The records of a folder."""

    folder: Path
    attempts: list[Attempt]

    @classmethod
    def read(cls, folder: Path) -> Results:
        return cls(folder, read_all([folder]).attempts)

    def computation(self, config: Config, machine: Machine, job: Job) -> Computation:
        """From the run of the same framework on one device, else of any. UserError without one."""
        framework: Any = config.framework
        bases = self.bases(config, machine)
        own = [base for base in bases if base.framework == framework.name]
        plain = [base for base in bases if base.framework == "single"]
        chosen = (own or plain or bases)[-1:]
        if not chosen:
            raise UserError(
                f"{self.folder} has no complete run of {config.model.name} on one {machine.device.name} with "
                f"train.precision={config.train.precision} and the same sizes: measure one with +framework=single, or "
                "give --one-gpu-step-s SECONDS"
            )
        basis = f"{chosen[0].framework} on one device ({chosen[0].path.parent.name})"
        return from_one_step(config, machine, OneStep(chosen[0].seconds, chosen[0].samples), basis)

    def bases(self, config: Config, machine: Machine) -> list[Base]:
        """Complete runs of this model on one such device; the last of each framework counts."""
        found = [self._base(attempt, config, machine) for attempt in self.attempts]
        return [base for base in found if base is not None]

    def _base(self, attempt: Attempt, config: Config, machine: Machine) -> Base | None:
        record = attempt.record
        launch, summary, settings = _section(record, "launch"), _section(record, "summary"), _section(record, "config")
        rate, batch = summary.get("throughput_samples_per_s"), _section(record, "ledger").get("global_batch")
        if record.get("status") != "ok" or launch.get("world_size") != 1 or settings.get("mode", "train") != "train":
            return None
        if not rate or not batch or not _same(settings, config) or not _on(record, machine):
            return None
        seconds = batch / rate * (1 - (summary.get("data_wait_share") or 0.0))
        return Base(_section(settings, "framework").get("name", ""), seconds, batch, attempt.path)

    def loader_rate(self, config: Config) -> float | None:
        """Samples a second that one rank loads, of the last mode=loader run of the same data."""
        found = [
            summary["throughput_samples_per_s"] / launch["world_size"]
            for record in (attempt.record for attempt in self.attempts)
            if (settings := _section(record, "config")).get("mode") == "loader"
            and _section(settings, "data").get("name") == config.data.name
            and (summary := _section(record, "summary")).get("throughput_samples_per_s")
            and (launch := _section(record, "launch")).get("world_size")
        ]
        return found[-1] if found else None

    def samples(self, config: Config) -> int | None:
        """Training samples of the same data."""
        found = [_section(attempt.record, "dataset") for attempt in self.attempts]
        counts = [each.get("train_samples") for each in found if each.get("name") == config.data.name]
        return next((each for each in reversed(counts) if isinstance(each, int)), None)


def _section(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def _same(settings: Mapping[str, Any], config: Config) -> bool:
    """Whether a record's run computes what this configuration does, for a sample."""
    resolved = config.resolved
    model = {key: value for key, value in resolved["model"].items() if key != "_target_"}
    there = {key: value for key, value in _section(settings, "model").items() if key != "_target_"}
    train, own = _section(settings, "train"), resolved["train"]
    optimizer = _section(_section(settings, "recipe"), "optimizer").get("name")
    same = all(train.get(key, own[key]) == own[key] for key in ALIKE)
    return same and model == there and optimizer == config.recipe.optimizer.name


def _on(record: Mapping[str, Any], machine: Machine) -> bool:
    launch, environment = _section(record, "launch"), _section(record, "environment")
    if launch.get("device_type") != machine.device.type:
        return False
    return machine.device.type == "cpu" or environment.get("gpu_model") == machine.device.name


def own_cores() -> int:
    return len(os.sched_getaffinity(0))
