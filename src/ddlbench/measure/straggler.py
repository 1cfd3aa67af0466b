"""Which rank is slow of itself. In synchronous training all ranks end a step together, so the steps do not say it.

What a rank does itself in a step is the step less the wait for data and less the exposed communication, in which it
waits for others. A profiled window says it exactly. Without one, on the CPU, the kernel says how long the training
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

    stage: only ranks of one pipeline stage have the same work
    """

    rank: int
    host: str
    stage: int
    seconds: float


def own_steps_of_window(window: Mapping[str, Any], hosts: Sequence[str], stages: Sequence[int]) -> list[OwnStep]:
    """Every rank's own seconds of a step in a profiled window: a mean over its steps.

    window: the record's section `profile`, with window_s, data_s and exposed_s of each rank; empty without one
    hosts, stages: of each rank
    """
    return [
        OwnStep(
            rank, hosts[rank], stages[rank], (each["window_s"] - each["data_s"] - each["exposed_s"]) / window["steps"]
        )
        for rank, each in enumerate(window.get("ranks", []))
    ]


def own_columns(own: Sequence[OwnStep], source: str) -> dict[str, Any]:
    """Columns of the tables: the ranks' own steps and the straggler. own: every rank's; source: "window" | "thread"."""
    if not own:
        return {}
    slow = straggler(own)
    return {
        "own_step_s": max(each.seconds for each in own),
        "own_step_median_rank_s": statistics.median(each.seconds for each in own),
        "own_step_source": source,
        "straggler_rank": slow.rank if slow else None,
        "straggler_host": slow.host if slow else None,
    }


def straggler(own: Sequence[OwnStep]) -> OwnStep | None:
    """The rank that exceeds the median of the others of its stage by more than EXCESS, and by most; None: no rank."""
    found = [_slowest([each for each in own if each.stage == stage]) for stage in sorted({each.stage for each in own})]
    excess, rank = max(found, key=lambda pair: pair[0])
    return rank if excess > EXCESS else None


def _slowest(stage: Sequence[OwnStep]) -> tuple[float, OwnStep]:
    """The slowest rank of a stage, and how much it exceeds the others' median; 0 where it is alone."""
    *others, slowest = sorted(stage, key=lambda each: each.seconds)
    median = statistics.median(each.seconds for each in others) if others else slowest.seconds
    return (slowest.seconds / median - 1 if median > 0 else 0.0), slowest
