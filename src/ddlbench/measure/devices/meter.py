"""What one rank reads before and after an epoch, outside its times: energy, device clock, throttling, its own thread's
time, load of its node. Nothing is read at a step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ddlbench.measure.devices.nvml import GpuState, gpu_state_reader, joules, throttling
from ddlbench.measure.devices.unknown import difference, least, or_none, total
from ddlbench.measure.devices.usage import Load, SentBytes, process_tree_seconds, thread_seconds

POWERCAP = Path("/sys/class/powercap")
READ_EVERY_S = 60.0


@dataclass(frozen=True)
class Use:
    """What one rank used between two readings; None for what cannot be read.

    seconds:   between the readings
    counts_energy: whether this rank reads a counter: each rank that of its GPU; on the CPU one rank a node
    energy_j:  of the rank's GPU, or of the node's CPU packages
    thread_s:  in which the training thread computed or waited for a core; on device cpu only
    clock_before_mhz, clock_after_mhz: of the rank's GPU
    throttled: why the GPU's clock had been lowered
    cpu_before_s, cpu_after_s: seconds of a core that the rank's processes had computed
    before, after: the node's load, on one rank a node
    sent_bytes: through TCP; on device cpu only, because NCCL sends through NVLink and InfiniBand
    """

    seconds: float
    counts_energy: bool
    energy_j: float | None = None
    energy_source: str | None = None
    thread_s: float | None = None
    clock_before_mhz: int | None = None
    clock_after_mhz: int | None = None
    throttled: tuple[str, ...] | None = None
    cpu_before_s: float | None = None
    cpu_after_s: float | None = None
    before: Load | None = None
    after: Load | None = None
    sent_bytes: int | None = None


def over_ranks(uses: Sequence[Use | None], hosts: Sequence[str]) -> dict[str, Any]:
    """The fields of a row (measure/rows.py) that say what all ranks used together. hosts: of each rank, by name"""
    read = [use for use in uses if use is not None]
    counting = [use for use in read if use.counts_energy]
    energy_j = total(use.energy_j for use in counting)
    complete = energy_j is not None
    of_host: dict[str, list[Use | None]] = {}
    for use, host in zip(uses, hosts, strict=True):
        of_host.setdefault(host, []).append(use)
    loads: list[tuple[Load, Load]] = []
    for ranks in of_host.values():  # with what all ranks of the node computed
        totals = [total(getattr(use, name, None) for use in ranks) for name in ("cpu_before_s", "cpu_after_s")]
        for use in ranks:
            if use and use.before and use.after:
                loads.append((replace(use.before, own_s=totals[0]), replace(use.after, own_s=totals[1])))
    return {
        "energy_j": energy_j,
        "energy_source": counting[0].energy_source if complete else None,
        "energy_time_s": max(use.seconds for use in counting) if complete else None,
        "cpu_time_s": total(difference(use.cpu_before_s, use.cpu_after_s) if use else None for use in uses),
        "sent_bytes": total(use.sent_bytes if use else None for use in uses),
        "device_clock_before_mhz": least(use.clock_before_mhz for use in read),
        "device_clock_after_mhz": least(use.clock_after_mhz for use in read),
        "throttled": tuple(sorted({reason for use in read for reason in use.throttled or ()})),
        "loads": tuple(loads),
    }


@dataclass
class Rapl:
    """Joules of a node's CPU packages since it was opened, from the counters of Linux' powercap framework (Intel RAPL;
    AMD's since Zen).

    A counter of package-0, package-1, ... in microjoules restarts at 0 after its range, about 20 minutes at 200 W: it
    is read at least once a minute. It counts the package, whoever uses it, without memory and GPUs. It is readable for
    root alone on kernels since 5.10 (CVE-2020-8694), unless the site has opened it.

    ranges: folder of each package -> microjoules at which its counter restarts at 0
    """

    ranges: dict[Path, int]
    last: dict[Path, int] = field(default_factory=dict[Path, int])
    counted: int = 0  # microjoules

    @classmethod
    def open(cls, powercap: Path = POWERCAP) -> Rapl | None:
        """None where there is no package, or one that may not be read."""
        try:
            # intel-rapl:0 is a package or the platform, intel-rapl:0:0 a part of a package.
            zones = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if zone.name.count(":") == 1]
            packages = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
            meter = cls({zone: int((zone / "max_energy_range_uj").read_text()) for zone in packages})
            meter.joules()
        except (OSError, ValueError):
            return None
        return meter if packages else None

    def joules(self) -> float:
        """Raises OSError where a counter cannot be read any more."""
        for zone, size in self.ranges.items():
            now = int((zone / "energy_uj").read_text())
            then = self.last.get(zone, now)
            self.counted += now - then if now >= then else now + size - then
            self.last[zone] = now
        return self.counted / 1e6


@dataclass(frozen=True)
class Reading:
    at: float
    gpu: GpuState | None
    package_j: float | None
    cpu_s: float | None
    load: Load | None
    sent: SentBytes | None
    thread_s: float | None


class Meter:
    """leader: this rank makes the readings that exist once per node"""

    def __init__(self, device: torch.device, leader: bool) -> None:
        self.cuda = device.type == "cuda"
        self.leader = leader
        self.gpu = gpu_state_reader(device)
        self.rapl = Rapl.open() if leader and not self.cuda else None
        self.next_tick = math.inf

    def begin(self) -> None:
        self.first = self._read()
        self.next_tick = self.first.at + READ_EVERY_S if self.rapl else math.inf

    def tick(self, now: float) -> None:
        """Called at every step; reads the CPU's energy counter once a minute, before it could pass its range twice."""
        if now >= self.next_tick and self.rapl:
            or_none(self.rapl.joules)
            self.next_tick = now + READ_EVERY_S

    def end(self) -> Use:
        # Read first, as `begin` reads it last: the other readings are no work of a step.
        thread_s = None if self.cuda else or_none(thread_seconds)
        first, last = self.first, self._read()
        gpus = (first.gpu, last.gpu) if first.gpu and last.gpu else None
        energy = joules(*gpus) if gpus else difference(first.package_j, last.package_j)
        return Use(
            seconds=last.at - first.at,
            counts_energy=self.cuda or self.leader,
            energy_j=energy,
            energy_source=None if energy is None else "nvml" if gpus else "rapl",
            thread_s=difference(first.thread_s, thread_s),
            clock_before_mhz=first.gpu.clock_mhz if first.gpu else None,
            clock_after_mhz=last.gpu.clock_mhz if last.gpu else None,
            throttled=throttling(*gpus) if gpus else None,
            cpu_before_s=first.cpu_s,
            cpu_after_s=last.cpu_s,
            before=first.load,
            after=last.load,
            sent_bytes=last.sent.since(first.sent) if first.sent and last.sent else None,
        )

    def _read(self) -> Reading:
        return Reading(
            at=time.perf_counter(),
            gpu=self.gpu() if self.gpu else None,
            package_j=or_none(self.rapl.joules) if self.rapl else None,
            cpu_s=or_none(process_tree_seconds),
            load=Load.now() if self.leader else None,
            sent=None if self.cuda else or_none(SentBytes.now),
            thread_s=None if self.cuda else or_none(thread_seconds),
        )
