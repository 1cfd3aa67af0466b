"""The summary of a run: what follows from its epochs (formulas/summary_formulas.py), its steps and its ranks.

The times of steps do not show which rank is slow by its own work, because synchronous ranks end a step together. A
rank's own step is the step without the wait for data and without the exposed communication, in which it waits for
others. A profiled window shows it exactly. Without a window, on the CPU, the kernel says how long the training thread
computed or waited for a core: this leaves out every wait for another rank, but also a wait for a disk.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddlbench.measure.devices.unknown import largest
from ddlbench.measure.devices.usage import Load
from ddlbench.measure.formulas.summary_formulas import from_epochs
from ddlbench.measure.marks import marks
from ddlbench.measure.rows import EpochRow, OwnStep

EXCESS = 0.1  # of the other ranks' median own step: ranks of equal work on one machine differ by less


def summarize(
    rows: Sequence[EpochRow], world_size: int, tokens_per_sample: int | None, more_doubts: Mapping[str, bool] = {}
) -> dict[str, Any]:
    """Flat metrics named as the table's columns; only what is known. more_doubts: as of `marks`."""
    if not rows:
        return {"epochs_done": 0}
    counted = [row for row in rows if not row.warmup] or list(rows)
    steps = sorted(second for row in counted for second in row.slowest_s[row.steps - row.measured_steps :])
    # Each rank's own step, the median over the epochs; none where an epoch does not know them: its list is empty.
    own_steps = [
        replace(epochs[0], seconds=statistics.median(step.seconds for step in epochs))
        for epochs in zip(*(row.own_steps for row in counted), strict=False)
    ]
    return {
        "epochs_done": len(rows),
        "train_loss": None,  # of a run that diverged
        **from_epochs({"gpus": world_size, "tokens_per_sample": tokens_per_sample}, [row.line() for row in rows]),
        "step_time_median_s": statistics.median(steps),
        "step_time_p95_s": steps[math.ceil(0.95 * len(steps)) - 1],
        "energy_source": rows[0].energy_source,
        **{name.replace("peak", "by_stage"): _by_stage(counted, name) for name in rows[0].stage_memory},
        **_state(rows, counted, more_doubts),
        **own_columns(own_steps, "thread"),
    }


def _state(rows: Sequence[EpochRow], counted: Sequence[EpochRow], more_doubts: Mapping[str, bool]) -> dict[str, Any]:
    """Clock, throttling and load from the run's begin to its end, warm-up epochs included, and the marks."""
    first, last = rows[0], rows[-1]
    reasons = sorted({reason for row in rows for reason in row.throttled})
    loads = load_columns([before for before, _ in first.loads], [after for _, after in last.loads])
    retries = largest(row.memory.get("allocator_retries") for row in counted) or 0
    return {
        "device_clock_start_mhz": first.device_clock_before_mhz,
        "device_clock_end_mhz": last.device_clock_after_mhz,
        "throttle_reasons": ", ".join(reasons) or None,
        **loads,
        "marks": "; ".join(marks(reasons, retries, loads, more_doubts)) or None,
    }


def own_steps_of_window(window: Mapping[str, Any]) -> list[OwnStep]:
    """Every rank's own seconds of a step in a profiled window: a mean over its steps. Empty if they are not known.

    window: the record's section `profile`; empty without one
    """
    lines = window["ranks"] if window.get("status") == "ok" else []
    return [OwnStep(line["rank"], line["host"], line["stage"], line["own_step_s"]) for line in lines]


def own_columns(steps: Sequence[OwnStep], source: str) -> dict[str, Any]:
    """Columns of the tables: own steps and the straggler. steps: every rank's; source: "window" | "thread"."""
    if not steps:
        return {}
    slow = straggler(steps)
    return {
        "own_step_s": max(step.seconds for step in steps),
        "own_step_median_rank_s": statistics.median(step.seconds for step in steps),
        "own_step_source": source,
        "straggler_rank": slow.rank if slow else None,
        "straggler_host": slow.host if slow else None,
    }


def straggler(steps: Sequence[OwnStep]) -> OwnStep | None:
    """The rank that exceeds the median of the others of its stage by more than EXCESS, and by most; None: no rank."""
    slow: list[tuple[float, OwnStep]] = []
    for stage in sorted({step.stage for step in steps}):
        *others, slowest = sorted((step for step in steps if step.stage == stage), key=lambda step: step.seconds)
        median = statistics.median(step.seconds for step in others) if others else 0.0
        if median > 0:
            slow.append((slowest.seconds / median - 1, slowest))
    excess, rank = max(slow, key=lambda pair: pair[0], default=(0.0, None))
    return rank if excess > EXCESS else None


def _by_stage(rows: Sequence[EpochRow], name: str) -> str | None:
    """The peak of each rank of a pipeline, in order; None without a pipeline and where a rank does not know it."""
    by_stage = zip(*(row.stage_memory[name] for row in rows), strict=True)
    stages = [[value for value in values if value is not None] for values in by_stage]
    return " ".join(str(max(values)) for values in stages) if len(stages) > 1 and all(stages) else None


def load_columns(before: Sequence[Load], after: Sequence[Load]) -> dict[str, float | None]:
    """The largest values of all nodes. before, after: one reading of each node, in the same order."""
    shares = [last.shares_since(first) for first, last in zip(before, after, strict=True)]
    return {
        "load_start": largest(load.load for load in before),
        "load_end": largest(load.load for load in after),
        "cpu_pressure_start": largest(load.pressure for load in before),
        "cpu_pressure_end": largest(load.pressure for load in after),
        "cpu_steal_share": largest(steal for steal, _ in shares),
        "cpu_others_share": largest(others for _, others in shares),
    }
