"""Which rank is slow by its own work. The times of steps do not show it, because synchronous ranks end a step together.

What a rank does itself in a step is the step less the wait for data and less the exposed communication, in which it
waits for others. A profiled window shows it exactly. Without one, on the CPU, the kernel says how long the training
thread computed or waited for a core, which leaves out every wait for another rank, but a wait for a disk too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EXCESS = 0.1  # of the other ranks' median: ranks of equal work on one machine differ by less


@dataclass(frozen=True)
class OwnStep:
    """One rank's own seconds of a step, a mean or median over steps.

    stage: rank in its pipeline; only ranks with the same one have the same work
    """

    rank: int
    host: str
    stage: int
    seconds: float


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
