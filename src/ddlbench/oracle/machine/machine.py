"""The machine that a prediction is for: devices, and links of two levels.

Each YAML file in oracle/clusters/ describes one machine. `cluster=` of ddlbench-predict and `--cluster` of
ddlbench-sweep name such a file. A run's key `cluster.name` is only a label in its record.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddlbench.errors import UserError

FOLDER = Path(__file__).parents[1] / "clusters"
CLUSTERS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
OPTIONAL = ("memory_bytes", "bytes_per_s", "host_bytes_per_s", "tf32_flops_per_s")  # of a device
KEYS = ("name", "device", "devices_per_node", "links", "nccl", "overlap", "cores", "spread")  # of a cluster's file
# For GPUs without another measurement, chosen on the published measurements
# (docs/measurements/2026-11-24-published.md): extra seconds of computing per second of communication that runs beside
# it; standard deviation of a rank's computing in a step; seconds of a kernel beside its work.
GPU_HIDDEN_COST, GPU_SPREAD, GPU_KERNEL_S = 0.4, 0.02, 2.0e-5
# Seconds in which a host starts a kernel, as measured beside an H200 (docs/measurements/2026-11-26-h200.md).
GPU_HOST_S = 3.3e-5
# Bytes that a GPU's memory moves for each byte of a gradient: read and written into a message, and back.
GPU_PACKING = 4.0


@dataclass(frozen=True)
class Link:
    """alpha_s: start-up of a message; bytes_per_s: in one direction, of one device within a node, of one whole node
    between nodes."""

    name: str
    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Device:
    """memory_bytes, bytes_per_s: capacity and bandwidth of its memory; None: unknown.

    type: cuda | cpu; tf32_flops_per_s: peak of fp32 where tensor cores round its inputs
    host_bytes_per_s: of its link to the memory of its host, in one direction; None: unknown
    kernel_s: seconds of a kernel beside its work; host_s: seconds in which the host starts a kernel
    """

    name: str
    type: str
    memory_bytes: float | None = None
    bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    tf32_flops_per_s: float | None = None
    kernel_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True)
class Sweep:
    """Measured seconds of one collective by message size in bytes, in ascending order."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Linear interpolation between two measured sizes. Beyond the largest size the last slope continues."""
        if size > self.sizes[-1]:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
            return self.seconds[-1] + max(0.0, slope) * (size - self.sizes[-1])
        return float(np.interp(size, self.sizes, self.seconds))


@dataclass(frozen=True)
class Machine:
    """A cluster, with the measurements on it.

    devices_per_node: None: one node has all devices
    links: within a node, then between nodes; fewer if they are unknown
    overlap: whether devices compute while they send
    hidden_cost: measured by number of ranks: extra seconds of computing per second of a collective that runs at the
        same time, because on shared cores sending and adding take time from computing
    cores: the cores that all ranks of a node share, if ranks are not devices; None: each rank has its own
    contention: measured by number of ranks: factor by which computing is slower while so many ranks of a node compute
    sweeps: measured collectives by name and number of ranks: of --calibrate-network, or of the file's key `nccl`
    spread: standard deviation of a rank's seconds of computing in a step, as a share of their mean
    packing: bytes that a device's memory moves to copy a byte into a message and back; 0 on CPUs
    algorithm: of all-reduces (collectives.ALGORITHMS)
    """

    name: str
    device: Device
    devices_per_node: int | None
    links: tuple[Link, ...]
    overlap: bool = True
    hidden_cost: Mapping[int, float] = field(default_factory=dict[int, float], hash=False)
    cores: int | None = None
    contention: Mapping[int, float] = field(default_factory=dict[int, float], hash=False)
    sweeps: Mapping[tuple[str, int], Sweep] = field(default_factory=dict[tuple[str, int], "Sweep"], hash=False)
    spread: float = 0.0
    packing: float = 0.0
    algorithm: str = "auto"

    def per_node(self, world: int) -> int:
        return min(world, self.devices_per_node or world)

    def nodes(self, world: int) -> int:
        return -(-world // self.per_node(world))

    def marks(self, *groups: int, largest: float = 0.0) -> list[str]:
        """Remarks for the reader if the collectives were not measured with these numbers of ranks (on one node), or not
        with messages of `largest` bytes."""
        counts = sorted({count for _, count in self.sweeps})
        others = sorted({self.per_node(ranks) for ranks in groups} - {1, *counts})
        marks: list[str] = []
        if counts and others:
            measured, missing = (", ".join(map(str, numbers)) for numbers in (counts, others))
            marks.append(f"collectives measured with {measured} ranks, not {missing}")
        most = max((sweep.sizes[-1] for sweep in self.sweeps.values()), default=inf)
        if largest > most:
            marks.append(f"messages of up to {most:g} bytes measured, not {largest:g}")
        return marks

    def sweep(self, kind: str, ranks: int) -> Sweep | None:
        """Measured seconds of a collective with so many ranks, or with the nearest number of ranks."""
        counts = [count for name, count in self.sweeps if name == kind]
        return self.sweeps[kind, nearest(counts, ranks)] if counts else None

    def hidden_cost_with(self, ranks: int) -> float:
        """The share of hidden communication that delays computing, as measured with the nearest number of ranks. If it
        was not measured: 0 with `overlap`, otherwise 1."""
        if not self.hidden_cost:
            return 0.0 if self.overlap else 1.0
        return self.hidden_cost[nearest(self.hidden_cost, ranks)]

    def slowest(self, ranks: int) -> float:
        """The expected seconds of the slowest of so many ranks, divided by those of a mean rank. All ranks wait for it
        in every step. The largest of n normal variables is near the quantile (n - 0.375) / (n + 0.25) (Blom 1958)."""
        return 1 + self.spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))

    def shared_cores(self, busy: int) -> float:
        """Factor by which computing is slower while so many ranks of a node compute: linear interpolation between two
        measured numbers of ranks. Above the largest number it grows in proportion to the ranks that share the cores."""
        if busy <= 1 or not self.contention:
            return 1.0 if self.cores is None else max(1.0, busy / self.cores)
        factors = sorted({1: 1.0, **self.contention}.items())
        most, slowest = factors[-1]
        if busy > most:
            return slowest if self.cores is None else slowest * max(1.0, busy / max(most, self.cores))
        return max(1.0, float(np.interp(busy, [ranks for ranks, _ in factors], [factor for _, factor in factors])))


def nearest(counts: Iterable[int], ranks: float) -> int:
    return min(counts, key=lambda count: abs(count - ranks))


def described(machine: Machine) -> str:
    """The cluster's name, device, memory of a device and devices per node, as text."""
    device, inside = machine.device, machine.devices_per_node
    memory = f", {device.memory_bytes / 2**30:.3g} GiB" if device.memory_bytes else ""
    return f"{machine.name} ({device.name}{memory}{f', {inside} per node' if inside else ''})"


@cache
def load(name: str) -> Machine:
    """The machine of oracle/clusters/NAME.yaml or of another YAML file. UserError if it does not exist or cannot be
    read."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise UserError(
            f"cluster={name} is not known: choose one of {', '.join(CLUSTERS)}, or give a YAML file with the "
            "keys of these (docs/oracle.md)"
        )
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}): give a YAML file") from error
    return parse(plain, str(path))


def parse(plain: Any, path: str) -> Machine:
    """The machine that a file's content describes. UserError for a missing or impossible value, and an unknown key."""
    try:
        given: dict[str, Any] = {**plain}
        device: dict[str, Any] = {**given["device"]}
        links: list[dict[str, Any]] = [{**link} for link in given["links"]]
        nccl: dict[str, Any] = {**(given.get("nccl") or {})}
        parts = [("", given, KEYS), ("device.", device, Device.__annotations__), ("nccl.", nccl, ("gpu", "scale"))]
        for part, values, keys in [*parts, *(("links.", link, Link.__annotations__) for link in links)]:
            if unknown := ", ".join(f"{part}{key}" for key in values if key not in keys):
                allowed = ", ".join(f"{part}{key}" for key in keys)
                raise UserError(f"{path} is no description of a cluster (it has no key {unknown}): give {allowed}")
        of_gpus: dict[str, Any] = {}
        if device.get("type") == "cuda":
            stated = {key: value for key, value in device.items() if value is not None}
            device = {"kernel_s": GPU_KERNEL_S, "host_s": GPU_HOST_S, **stated}
            of_gpus = {"spread": GPU_SPREAD, "packing": GPU_PACKING}
        others = {key: value for key, value in given.items() if key not in ("device", "links", "nccl")}
        sweeps, lines = nccl_sweeps(**nccl) if nccl else {}, tuple(Link(**link) for link in links)
        machine = Machine(device=Device(**device), links=lines, sweeps=sweeps, **of_gpus | others)
        machine = with_overlap(machine, machine.overlap)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is no description of a cluster ({error}): see {FOLDER / 'abci.yaml'}") from error
    _check(machine, path)
    return machine


@cache
def nccl_sweeps(gpu: str, scale: float = 1.0) -> dict[tuple[str, int], Sweep]:
    """NCCL's collectives within a node, as measured with this GPU. scale: the links are so many times as fast.
    KeyError for a GPU that was not measured"""
    with Path(__file__).with_name("nccl_all_reduce.csv").open() as file:
        rows = [row for row in csv.DictReader(line for line in file if line[0] != "#") if row["gpu"] == gpu]
    if not rows or not scale > 0:
        raise KeyError(f"nccl.gpu={gpu} nccl.scale={scale}")
    sweeps: dict[tuple[str, int], Sweep] = {}
    for ranks in sorted({int(row["gpus"]) for row in rows}):
        measured = [row for row in rows if int(row["gpus"]) == ranks]
        seconds = {float(row["bytes"]): float(row["all_reduce_us"]) * 1e-6 / scale for row in measured}
        sweeps |= all_reduce_sweeps(ranks, seconds)
    return sweeps


def all_reduce_sweeps(ranks: int, seconds: Mapping[float, float]) -> dict[tuple[str, int], Sweep]:
    """Collectives by the seconds of an all-reduce, by bytes in ascending order. An all-gather and a reduce-scatter take
    half of these seconds."""
    shares = {"all_reduce": 1, "all_gather": 2, "reduce_scatter": 2}
    sizes = tuple(seconds)
    return {(kind, ranks): Sweep(sizes, tuple(s / n for s in seconds.values())) for kind, n in shares.items()}


def _check(machine: Machine, path: str) -> None:
    device, links = machine.device, machine.links
    above_0 = [(f"{link.name}.{key}", getattr(link, key)) for link in links for key in ("alpha_s", "bytes_per_s")]
    above_0 += [(f"device.{key}", value) for key in OPTIONAL if (value := getattr(device, key)) is not None]
    may_be_0 = [("device.kernel_s", device.kernel_s), ("device.host_s", device.host_s), ("spread", machine.spread)]
    counts = [(key, value) for key in ("devices_per_node", "cores") if (value := getattr(machine, key)) is not None]
    rules: list[tuple[list[tuple[str, Any]], Callable[[Any], bool], str]] = [
        (above_0, lambda value: type(value) in (int, float) and 0 < value < inf, "a number above 0"),
        (may_be_0, lambda value: type(value) in (int, float) and 0 <= value < inf, "a number of 0 or more"),
        (counts, lambda value: type(value) is int and value > 0, "a whole number above 0"),
        ([("device.type", device.type)], lambda value: value in ("cpu", "cuda"), "cuda or cpu"),
        ([("overlap", machine.overlap)], lambda value: type(value) is bool, "true or false"),
        ([("name", machine.name), ("device.name", device.name)], lambda value: type(value) is str, "a text"),
        ([("links", len(links))], lambda value: value <= 2, "two entries at most: within a node, between nodes"),
    ]
    for values, fits, allowed in rules:
        for key, value in values:
            if not fits(value):
                raise UserError(f"{path}: {key}={value} must be {allowed}")


def with_overlap(machine: Machine, overlap: bool) -> Machine:
    """The machine with or without overlap. What a hidden message costs on it is no longer the measured value."""
    hidden = {1: GPU_HIDDEN_COST} if overlap and machine.device.type == "cuda" else {}
    return replace(machine, overlap=overlap, hidden_cost=hidden)
