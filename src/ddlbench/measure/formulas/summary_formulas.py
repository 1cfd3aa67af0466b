"""The columns of a run's summary that follow from its epochs. A run writes them, and a report compares them with the
epochs of the record (results/tables/run_rows.py).

The first epoch is left out where there are two or more; with one, its warm-up steps are left out of the rate. Times are
medians of seconds; rates come from summed samples over summed seconds, never from averaged rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

Rule = Callable[..., Any]  # its arguments: a list of values for each of some columns


def _ratio(
    above: list[float], below: list[float], gpus: Sequence[int] = (1,), of_sample: Sequence[float] = (1,)
) -> float | None:
    return sum(above) / sum(below) / gpus[0] * of_sample[0] if sum(below) else None


RATE = ("measured_samples", "measured_time_s")
LARGEST = (
    "data_wait_share", "host_wait_share", "straggler_wait_s", "allocator_retries", "memory_allocated_peak_bytes",
    "memory_reserved_peak_bytes", "memory_device_peak_bytes", "memory_host_peak_bytes",
)  # fmt: skip
PARTLY_KNOWN = ("validation_time_s", *LARGEST)  # the epochs that know it count; the others need every epoch's value
OF_RUN = ("gpus", "tokens_per_sample", "flops_per_sample", "hardware_flops_per_sample", "mfu")
# For columns of runs.csv: the rule, and the columns that it takes from epochs.csv, or from OF_RUN for each epoch again.
# From the measured epochs:
MEASURED: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "epochs_measured": (len, ("warmup",)),
    "epoch_time_s": (statistics.median, ("epoch_time_s",)),
    "epoch_time_min_s": (min, ("epoch_time_s",)),
    "epoch_time_max_s": (max, ("epoch_time_s",)),
    "throughput_samples_per_s": (_ratio, RATE),
    "throughput_samples_per_s_per_gpu": (_ratio, (*RATE, "gpus")),
    "tokens_per_s": (
        lambda samples, time_s, tokens: _ratio(samples, time_s, (1,), tokens),
        (*RATE, "tokens_per_sample"),
    ),
    "model_flops_per_s_per_gpu": (_ratio, (*RATE, "gpus", "flops_per_sample")),
    "cpu_share": (_ratio, ("cpu_time_s", "epoch_time_s", "gpus")),
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
# From all epochs of the attempt, or from the run alone:
ALL: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "warmup_steps": (lambda steps, measured: steps[0] - measured[0], ("steps", "measured_steps")),
    "first_step_s": (itemgetter(0), ("first_step_s",)),
    "hfu": (
        lambda mfu, computed, flops: mfu[0] * computed[0] / flops[0],
        ("mfu", "hardware_flops_per_sample", "flops_per_sample"),
    ),
}
QUALITY = (
    "train_loss", "val_loss", "val_top1", "val_top5", "val_perplexity_token", "val_perplexity_word", "val_samples",
)  # fmt: skip
# From the last epoch, whether or not earlier ones know it:
LAST: dict[str, tuple[Rule, tuple[str, ...]]] = {name: (itemgetter(0), (name,)) for name in QUALITY}


def from_epochs(run: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of a run's summary that at least one epoch has the inputs of. None: another epoch lacks them.

    run: OF_RUN, as far as they are known; epochs: lines of epochs.csv of one attempt
    """
    lines = [{**{name: run.get(name) for name in OF_RUN}, **epoch} for epoch in epochs]
    measured = [line for line in lines if not line["warmup"]] or lines
    summary: dict[str, Any] = {}
    for rules, counted in ((MEASURED, measured), (ALL, lines), (LAST, lines[-1:])):
        for column, (rule, names) in rules.items():
            inputs = [values for line in counted if None not in (values := [line.get(name) for name in names])]
            if inputs:
                enough = len(inputs) == len(counted) or column in PARTLY_KNOWN
                summary[column] = rule(*map(list, zip(*inputs, strict=True))) if enough else None
    return summary
