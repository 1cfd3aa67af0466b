"""Checks whether the columns of a run's summary follow from its epochs.jsonl, as measure/summary.py computes them. A
summary that differs, or whose epochs are not all there, was changed or damaged.

What epochs.jsonl cannot confirm: step_time_*, own_step_*, straggler_rank, straggler_host and memory_*_by_stage_bytes,
which come from steps and ranks; startup_s; load_*, cpu_pressure_*, cpu_steal_share, cpu_others_share and marks; and
mfu, because a record lacks the device's peak: only hfu is compared with it. Clocks, throttle_reasons and energy_source,
which describe the device, are not compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from ddlbench.results.rows import Row

ROUNDING = 1e-6
Rule = Callable[..., Any]  # of the values of some columns, a list each


def _ratio(above: list[float], below: list[float]) -> float:
    return sum(above) / sum(below) if sum(below) else math.nan


def _per_gpu(above: list[float], below: list[float], gpus: list[int], of_sample: Sequence[float] = (1,)) -> float:
    return _ratio(above, below) / gpus[0] * of_sample[0]


RATE = ("measured_samples", "measured_time_s")
LARGEST = (
    "data_wait_share", "host_wait_share", "straggler_wait_s", "allocator_retries", "memory_allocated_peak_bytes",
    "memory_reserved_peak_bytes", "memory_device_peak_bytes", "memory_host_peak_bytes",
)  # fmt: skip
OF_RUN = ("gpus", "tokens_per_sample", "flops_per_sample", "hardware_flops_per_sample", "mfu")
# Column of runs.csv: the rule, and the columns that it takes, of epochs.csv or OF_RUN: those repeat for each epoch.
# Of the measured epochs:
MEASURED: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "epochs_measured": (len, ("warmup",)),
    "epoch_time_s": (statistics.median, ("epoch_time_s",)),
    "epoch_time_min_s": (min, ("epoch_time_s",)),
    "epoch_time_max_s": (max, ("epoch_time_s",)),
    "throughput_samples_per_s": (_ratio, RATE),
    "throughput_samples_per_s_per_gpu": (_per_gpu, (*RATE, "gpus")),
    "tokens_per_s": (lambda above, below, tokens: _ratio(above, below) * tokens[0], (*RATE, "tokens_per_sample")),
    "model_flops_per_s_per_gpu": (_per_gpu, (*RATE, "gpus", "flops_per_sample")),
    "cpu_share": (_per_gpu, ("cpu_time_s", "epoch_time_s", "gpus")),
    "throughput_steady_samples_per_s": (_ratio, ("steady_samples", "steady_time_s")),
    "epoch_first_step_s": (statistics.median, ("first_step_s",)),
    "validation_time_s": (statistics.median, ("validation_time_s",)),
    "read_bytes_per_s": (_ratio, ("read_bytes", "epoch_time_s")),
    "sent_step_bytes": (_ratio, ("sent_bytes", "steps")),
    "energy_epoch_j": (statistics.median, ("energy_j",)),
    "energy_sample_j": (_ratio, ("energy_j", "samples")),
    "power_mean_w": (_ratio, ("energy_j", "energy_time_s")),
    "data_wait_mean_share": (statistics.fmean, ("data_wait_share", "measured_time_s")),
    **{name: (max, (name,)) for name in LARGEST},
}
LAST = ("train_loss", "val_loss", "val_top1", "val_top5", "val_perplexity_token", "val_perplexity_word", "val_samples")
# Of all epochs of the attempt, and of the run alone:
ALL: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "warmup_steps": (lambda steps, measured: steps[0] - measured[0], ("steps", "measured_steps")),
    "first_step_s": (itemgetter(0), ("first_step_s",)),
    **{name: (itemgetter(-1), (name,)) for name in LAST},
    "hfu": (
        lambda mfu, computed, flops: mfu[0] * _ratio(computed, flops),
        ("mfu", "hardware_flops_per_sample", "flops_per_sample"),
    ),
}
TAKEN = {name for _, names in (MEASURED | ALL).values() for name in names}
READ = sorted({"measured_in_attempt", "warmup", *TAKEN} - {*OF_RUN})


def following(run: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any, str]]:
    """Columns of a run's summary with the values that follow, and from what. Without those that the run does not have,
    and those whose inputs are empty.

    run: its summary, and OF_RUN; epochs: lines of epochs.csv of one attempt
    """
    lines = [{**{name: run.get(name) for name in OF_RUN}, **epoch} for epoch in epochs]
    measured = [line for line in lines if not line["warmup"]] or lines
    for rules, counted in ((MEASURED, measured), (ALL, lines)):
        for column, (rule, names) in rules.items():
            inputs = [values for line in counted if None not in (values := [line.get(name) for name in names])]
            if inputs and run.get(column) is not None:
                others = "mfu gives" if "mfu" in names else "epochs give"
                yield column, rule(*map(list, zip(*inputs, strict=True))), others


def contradiction(row: Row, epochs: Any) -> str | None:
    """The first value of a run's summary that does not follow from its epochs, with both values; None if all follow.
    A value whose columns are empty is not checked, because older records lack columns.

    row: of runs.csv; epochs: as `epochs_of` makes them, those of the attempts that this one continued included
    """
    if row["epochs_done"] not in (None, len(epochs)):
        return f"epochs_done = {row['epochs_done']}, epochs.jsonl has {len(epochs)}"
    lines = [line for line in epochs.select(READ).to_pylist() if line["measured_in_attempt"] is None]
    for column, value, others in following(row, lines):
        if not math.isclose(row[column], value, rel_tol=ROUNDING):
            return f"{column} = {row[column]:.6g}, its {others} {value:.6g}"
    return None
