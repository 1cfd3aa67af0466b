"""Checks whether the columns of a run's summary follow from its epochs.jsonl, as measure/summary.py computes them. A
summary that differs, or whose epochs are not all there, was changed or damaged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from ddlbench.results.rows import Row

ROUNDING = 1e-6
Rule = Callable[..., Any]  # of the values of some columns, a list each


def _ratio(above: list[float], below: list[float]) -> float:
    return sum(above) / sum(below)


PEAKS = (
    "memory_allocated_peak_bytes", "memory_reserved_peak_bytes", "memory_device_peak_bytes", "memory_host_peak_bytes",
)  # fmt: skip
# Column of runs.csv: the rule, and the columns of epochs.csv that it takes. Of the measured epochs:
MEASURED: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "epoch_time_s": (statistics.median, ("epoch_time_s",)),
    "epoch_time_min_s": (min, ("epoch_time_s",)),
    "epoch_time_max_s": (max, ("epoch_time_s",)),
    "throughput_samples_per_s": (_ratio, ("measured_samples", "measured_time_s")),
    "throughput_steady_samples_per_s": (_ratio, ("steady_samples", "steady_time_s")),
    "epoch_first_step_s": (statistics.median, ("first_step_s",)),
    "validation_time_s": (statistics.median, ("validation_time_s",)),
    "read_bytes_per_s": (_ratio, ("read_bytes", "epoch_time_s")),
    "energy_epoch_j": (statistics.median, ("energy_j",)),
    "energy_sample_j": (_ratio, ("energy_j", "samples")),
    "power_mean_w": (_ratio, ("energy_j", "energy_time_s")),
    **{name: (max, (name,)) for name in ("data_wait_share", "host_wait_share", "straggler_wait_s", *PEAKS)},
}
# Computed from all epochs of the attempt:
LAST: dict[str, tuple[Rule, tuple[str, ...]]] = {
    name: (itemgetter(-1), (name,))
    for name in (
        "train_loss", "val_loss", "val_top1", "val_top5", "val_perplexity_token", "val_perplexity_word", "val_samples",
    )
}  # fmt: skip
READ = sorted({"measured_in_attempt", "warmup", *(name for _, names in (MEASURED | LAST).values() for name in names)})


def contradiction(row: Row, epochs: Any) -> str | None:
    """The first value of a run's summary that does not follow from its epochs, with both values; None if all follow.
    A value whose columns are empty is not checked, because older records lack columns.

    row: of runs.csv; epochs: as `epochs_of` makes them, those of the attempts that this one continued included
    """
    if row["epochs_done"] not in (None, len(epochs)):
        return f"epochs_done = {row['epochs_done']}, epochs.jsonl has {len(epochs)}"
    cells: dict[str, list[Any]] = epochs.select(READ).to_pydict()
    places = [n for n, earlier in enumerate(cells["measured_in_attempt"]) if earlier is None]
    measured = [n for n in places if not cells["warmup"][n]] or places
    for rules, counted in ((MEASURED, measured), (LAST, places)):
        for column, (rule, names) in rules.items():
            inputs = [values for n in counted if None not in (values := [cells[name][n] for name in names])]
            if inputs and row[column] is not None:
                expected = rule(*map(list, zip(*inputs, strict=True)))
                if not math.isclose(row[column], expected, rel_tol=ROUNDING):
                    return f"{column} = {row[column]:.6g}, its epochs give {expected:.6g}"
    return None
