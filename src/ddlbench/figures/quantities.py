"""The quantities over GPU counts: the value of a row of scaling.csv, its repeats, its interval and its ideal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from ddlbench.figures.panels import Panel
from ddlbench.results.tables.measurement import Base, Measurement
from ddlbench.results.tables.quality import TargetCosts
from ddlbench.texts import GIB


@dataclass(frozen=True)
class Values:
    """The drawn values of one row: the merged value, the interval around it if there is one, every repeat."""

    merged: float | None
    repeats: list[float] = field(default_factory=list[float])
    interval: tuple[float, float] | None = None


ValuesOf = Callable[[Panel, Measurement], Values]


@dataclass(frozen=True)
class Quantity:
    """Something drawn over GPU counts.

    label:        of its axis; a function where it depends on the panel
    values:       of a row of a panel
    ideal:        its value at a GPU count if scaling from the base were perfect; None where there is none
    theory:       what a formula expects of a row; None where there is none. theory_name: in the legend
    theory_band:  the range in which the formula expects 95 % of the measured values; None without one
    proportional: whether it grows with the GPU count if scaling is ideal
    integers:     whether it is counted, so that its axis has integers only
    """

    label: str | Callable[[Panel], str]
    values: ValuesOf
    ideal: Callable[[Base, float], float] | None = None
    percent: bool = False
    proportional: bool = False
    integers: bool = False
    theory: Callable[[Measurement], float | None] | None = None
    theory_name: str = "theory"
    theory_band: Callable[[Measurement], tuple[float, float] | None] = lambda _: None

    def name(self, panel: Panel) -> str:
        return self.label if isinstance(self.label, str) else self.label(panel)


def memory_column(device: str | None) -> str:
    """The allocator's peak on a GPU, the process's own on a CPU."""
    return "memory_allocated_peak_bytes" if device == "cuda" else "memory_host_peak_bytes"


def _memory_name(panel: Panel) -> str:
    """ "peak allocated memory (GiB)"; with --across device a panel may have GPUs and CPUs."""
    kinds = sorted({"allocated" if row["device"] == "cuda" else "host" for row in panel.rows})
    return f"peak {' or '.join(kinds)} memory (GiB)"


def _of_seconds(value: Callable[[Measurement, float, Base], float], ratio: str = "") -> ValuesOf:
    """Values computed from a row's seconds a sample and its repeats'.

    ratio: the column of scaling.csv with the same value, whose interval also counts that of the base; "": the interval
           is that of the seconds, and the value needs no base
    """

    def values(panel: Panel, row: Measurement) -> Values:
        seconds, low, high = (row[f"sample_time_{end}s"] for end in ("", "low_", "high_"))
        base = row.base(panel.on_own_bases)
        if not seconds or (ratio and base is None):
            return Values(None)
        base = cast(Base, base)
        rates = (run["throughput_samples_per_s"] for run in row.runs)
        if ratio:
            name = f"{ratio}_vs_own_base" if panel.on_own_bases else ratio
            ends = (row[f"{name}_low"], row[f"{name}_high"]) if row[f"{name}_low"] else None
        else:
            ends = (value(row, high, base), value(row, low, base)) if low else None  # shorter times are larger values
        return Values(value(row, seconds, base), [value(row, 1 / rate, base) for rate in rates if rate], ends)

    return values


def of_column(column: str, unit: float = 1.0, interval: tuple[str, str] | None = None) -> ValuesOf:
    """Values of a column of both runs.csv and scaling.csv. interval: the columns of its ends."""

    def values(panel: Panel, row: Measurement) -> Values:
        repeats = [run[column] / unit for run in row.runs if run[column] is not None]
        ends = [row[name] for name in interval or ()]
        bounds = (ends[0] / unit, ends[1] / unit) if ends and None not in ends else None
        return Values(row[column] / unit if row[column] is not None else None, repeats, bounds)

    return values


THROUGHPUT = Quantity(
    "throughput (samples/s)",
    _of_seconds(lambda row, seconds, base: 1 / seconds),
    lambda base, gpus: gpus / (base.gpus * base.seconds),
    proportional=True,
)
SPEEDUP = Quantity(
    lambda panel: "speedup over own base" if panel.on_own_bases else "speedup",
    _of_seconds(lambda row, seconds, base: base.seconds / seconds, "speedup"),
    lambda base, gpus: gpus / base.gpus,
    proportional=True,
)
EFFICIENCY = Quantity(
    lambda panel: "efficiency over own base (%)" if panel.on_own_bases else "efficiency (% of ideal speedup)",
    _of_seconds(lambda row, seconds, base: base.seconds * base.gpus / (seconds * row["gpus"]), "efficiency"),
    lambda base, gpus: 1.0,
    percent=True,
)
EPOCH_TIME = Quantity(
    "time of an epoch (s)", of_column("epoch_time_s", interval=("epoch_time_low_s", "epoch_time_high_s"))
)
ENERGY = Quantity("energy of a sample, all devices (J)", of_column("energy_sample_j"))
BUBBLE = Quantity(
    "bubble (% of the ranks' time)", of_column("bubble"), percent=True, theory=lambda row: row["bubble_theoretical"]
)
STALENESS = Quantity(
    "staleness (updates)",
    of_column("staleness_max"),
    theory=lambda row: row["staleness_theoretical_max"],
    integers=True,
)
# The peak of the fullest rank, the largest of the repeats.
MEMORY = Quantity(_memory_name, lambda panel, row: of_column(memory_column(row["device"]), GIB)(panel, row))
# Beside what --predict says. Waiting for data is on neither side.
PREDICTED = Quantity(
    "time of a step (s)",
    _of_seconds(lambda row, seconds, base: row.busy_step_s(seconds)),
    theory=lambda row: row["predicted_step_s"],
    theory_name="predicted, with its band of 95 %",
    theory_band=lambda row: (row["predicted_low_s"], row["predicted_high_s"]) if row["predicted_low_s"] else None,
)


def to_target(costs: TargetCosts, cost: str) -> Quantity:
    """Epochs or seconds until a metric reached its target."""
    merged = {row["measurement"]: row[f"{cost}_to_target"] for row in costs.rows}

    def values(panel: Panel, row: Measurement) -> Values:
        repeats = (costs.by_path.get(run["path"], {}).get(cost) for run in row.runs)
        return Values(merged.get(row["measurement"]), [value for value in repeats if value is not None])

    name = "time since the first step (s)" if cost == "seconds" else cost
    return Quantity(f"{name} to {costs.target.text}", values)
