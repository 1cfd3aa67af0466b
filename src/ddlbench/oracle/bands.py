"""How far a prediction may be off: a band around its seconds, and the error of its memory formula.

The measured step lies in a band with a stated probability, by split conformal prediction (Vovk et al. 2005): the ends
of a band are quantiles of measured / predicted over measurements of the same class. On GPUs these are published
measurements of 15 sources (benchmarks/published.py); the constants of machine.py were chosen on eight of them.
Classes by strategy and by the number of nodes would be narrower, but they cover less of the sources that they were not
made from (docs/oracle.md). On CPUs these are runs of docs/papers.md, predicted from one process.
"""

from __future__ import annotations

from itertools import chain

from ddlbench.results.rows import FAMILIES

# measured / predicted at the lower and the upper end of the band of 80 % and of the band of 95 %
Ends = tuple[tuple[float, float], tuple[float, float]]
BANDS: dict[str, Ends] = {
    "replicas": ((0.96, 1.15), (0.92, 1.27)),  # 365 measurements, with and without sharded weights
    "layout": ((0.89, 1.07), (0.85, 1.11)),  # 720, on which the constants of layouts.py were chosen
    "layout on several nodes": ((0.85, 1.15), (0.75, 1.30)),  # none: assumed
    "learned": ((0.96, 1.14), (0.84, 1.29)),  # 90, the largest GPU count of each series of at least three
    "cpu": ((1.01, 1.56), (0.53, 1.72)),  # 60 of results/papers, without Horovod
    "horovod on cpu": ((1.56, 14.18), (1.56, 14.18)),  # 6 of results/papers: its waits have no equations
}
LAYOUTS = FAMILIES["tensor"] + FAMILIES["pipeline"] + FAMILIES["hybrid"]

# The largest |formula / rehearsal - 1| of each framework, rounded up: in the grid of tests/oracle/memory_grid.py, and
# for the plans of tests/predict/test_planner.py, which have large micro batches. These numbers were set after the
# results were known: another job can have a larger error.
WORST_ERRORS = {
    "parameter_server": 0.0,  # has no formula: a rehearsal counts its memory
    **dict.fromkeys(("zero0", "spatial"), 0.02),
    **dict.fromkeys(("single", "horovod", "local_sgd"), 0.03),  # selective recomputation in bf16; without it 0.02
    "channel": 0.04,
    **dict.fromkeys(("ddp", "pipedream_2bw"), 0.05),
    **dict.fromkeys(("gpipe", "1f1b", "interleaved", "looped_bfs", "hybrid"), 0.06),
    **dict.fromkeys(("zero1", "zero2", "pipedream"), 0.08),
    **dict.fromkeys(("fsdp", "tensor"), 0.09),
    "zero3": 0.11,
    "megatron": 0.25,  # measured on an H200: +24.2 % (docs/measurements/2026-11-27-h200.md)
    **dict.fromkeys(("zero_bubble", "zbv", "dualpipev"), 0.23),
}

# DeepSpeed's ZeRO with weights and gradients in 16 bits: GPT-2 and VGG-16 in bf16 on 2 and 4 ranks. The largest error
# is that of VGG-16 with zero2, checkpointed: 17.9 % too little.
CAST_ERROR = 0.18


def band(seconds: float, framework: str, nodes: int, device: str = "cuda", learned: bool = False) -> dict[str, float]:
    """The ends of both bands around predicted seconds, by the names of the columns. device: cuda | cpu; learned:
    whether the prediction uses runs with several GPU counts"""
    if device == "cpu":
        kind = "horovod on cpu" if framework == "horovod" else "cpu"
    elif framework in LAYOUTS:
        kind = "layout on several nodes" if nodes > 1 else "layout"
    else:
        kind = "learned" if learned else "replicas"
    names = ("low_80_s", "high_80_s", "low_95_s", "high_95_s")
    return {name: seconds * end for name, end in zip(names, chain(*BANDS[kind]), strict=True)}


def worst_error(framework: str) -> float:
    """The relative error of a framework's formula: the largest error for a strategy that cannot be rehearsed."""
    return WORST_ERRORS.get(framework, max(WORST_ERRORS.values()))


def fits(bytes_: float, error: float, capacity: float | None) -> bool | None:
    """Whether so many bytes fit into the device's memory. None: its capacity is unknown, or the difference is smaller
    than the error."""
    if capacity is None:
        return None
    if error < 1 and bytes_ / (1 - error) <= capacity:
        return True
    return None if bytes_ / (1 + error) <= capacity else False
