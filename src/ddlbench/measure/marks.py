"""The reasons to doubt the timing of a run, and their meanings. A report reads them, and needs no torch for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

NOTHING_SENT = "gradients are not sent"  # why a run with comm_hook=noop is a reference
MOST_OTHERS, MOST_PRESSURE, MOST_STEAL = 0.1, 0.1, 0.01
# The meaning of each mark, by its name. The last four are those of tables (results/tables/checks.py).
MARKS = {
    "throttled": "the driver lowered the clock of a GPU",
    "allocator retries": "the allocator ran out of memory and freed its cache",
    "load": "programs that are not of the run computed on the host",
    "cpu pressure": "processes waited for a core",
    "steal": "the hypervisor gave the cores to other machines",
    "one visible GPU": "each rank sees one GPU of its node: NCCL may not have used NVLink (docs/clusters.md)",
    "read ahead": "the loader may have read the batches before the measured time: neither its rate nor the data wait "
    "is that of a long epoch (more train.steps, or fewer loader.workers)",
    "cold epoch": "the attempt continued another one and had one epoch left, in which workers start and memory is "
    "allocated: that of other repeats is a later epoch",
    "ranks differ": "the ranks' environments are not the same: see ranks_differ in runs.csv",
    "reference": "not a result: it leaves out a part of the training (reference in runs.csv), and has no ratios",
    "other updates": "late, averaged or compressed, as chosen: a faster step may train worse: see the quality",
    "straggler": "its own step takes over a tenth longer than that of the other ranks of its stage",
}


def other_updates(framework: str) -> bool:
    """Whether a framework averages weights after several steps, compresses gradients, or combines them in another way
    (adasum). Late updates show in the staleness. framework: JSON of its options, or of its facts, which may be cut"""
    words = '"local_steps"|"comm_hook": "(powersgd|topk|sign|int8)"|"adasum": true'
    return re.search(words, framework) is not None


def marks(
    throttled: Sequence[str], retries: int, loads: Mapping[str, float | None], more: Mapping[str, bool] = {}
) -> list[str]:
    """What makes the timing of a run doubtful, in words. A marked run stays in every table; the reader judges.

    The limits, on the node where a figure is largest:
    - load: processes that are not of the run computed in more than a tenth of the cores' time, from the begin of epoch
      0 to the end of the last one. Load averages say less: the run before this one is in them, and this run itself.
    - cpu pressure: in more than a tenth of the last 10 s, at the begin of epoch 0 or after the last epoch, some process
      waited for a core. Ranks and loader workers that are more than the cores do this themselves.
    - steal: the hypervisor gave more than a hundredth of the cores' time to others.

    throttled: why a GPU's clock had been lowered; retries: of the allocator; loads: as `load_columns`
    more: marks that do not come from measured values, and whether they hold
    """
    pressure = max(loads["cpu_pressure_start"] or 0.0, loads["cpu_pressure_end"] or 0.0)
    doubts = {
        "throttled": bool(throttled),
        "allocator retries": retries > 0,
        "load": (loads["cpu_others_share"] or 0.0) > MOST_OTHERS,
        "cpu pressure": pressure > MOST_PRESSURE,
        "steal": (loads["cpu_steal_share"] or 0.0) > MOST_STEAL,
        **more,
    }
    assert doubts.keys() <= MARKS.keys(), "a report explains every mark"
    return [name for name, holds in doubts.items() if holds]
