"""Energy of a node's CPU packages, from the counters of Linux' powercap framework (Intel RAPL; AMD's since Zen).

A counter of package-0, package-1, ... in microjoules restarts at 0 after its range, about 20 minutes at 200 W: it is
read at least once a minute. It counts the package, whoever uses it, without memory and GPUs. It is readable
for root alone on kernels since 5.10 (CVE-2020-8694), unless the site has opened it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
READ_EVERY_S = 60.0


@dataclass
class Rapl:
    """Joules of all packages since it was opened.

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
