"""How busy the node is with other work: load average, pressure on the cores, and time that the hypervisor took."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ddlbench.measure.environment import known

PROC = Path("/proc")


@dataclass(frozen=True)
class Load:
    """One node at one moment; None for what its kernel does not report.

    load:     load average of one minute / cores of the node
    pressure: share of the last 10 s in which some process waited for a core
    stolen, ticks: time that the hypervisor gave to others, and all time, of all cores since the node's start
    """

    load: float | None
    pressure: float | None
    stolen: int | None
    ticks: int | None

    @classmethod
    def now(cls, proc: Path = PROC) -> Load:
        ticks = known(lambda: _ticks(proc / "stat"))
        return cls(
            load=known(lambda: float((proc / "loadavg").read_text().split()[0]) / (os.cpu_count() or 1)),
            pressure=known(lambda: _some_avg10(proc / "pressure" / "cpu")),
            stolen=ticks[7] if ticks else None,
            ticks=sum(ticks[:8]) if ticks else None,
        )

    def steal_share(self, earlier: Load) -> float | None:
        """Of the cores' time since `earlier`."""
        if self.ticks is None or earlier.ticks is None or self.stolen is None or earlier.stolen is None:
            return None
        passed = self.ticks - earlier.ticks
        return max(0, self.stolen - earlier.stolen) / passed if passed > 0 else None


def _ticks(stat: Path) -> list[int]:
    """user nice system idle iowait irq softirq steal guest guest_nice (proc(5)); guests' time is in user and nice."""
    return [int(word) for word in stat.read_text().splitlines()[0].split()[1:]]


def _some_avg10(pressure: Path) -> float:
    """The line `some avg10=1.23 avg60=... avg300=... total=...`, in percent."""
    words = pressure.read_text().splitlines()[0].split()
    assert words[0] == "some"
    return float(words[1].removeprefix("avg10=")) / 100
