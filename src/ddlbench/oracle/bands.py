"""A band around a prediction: the range in which the measured step lies with a stated probability.

Split conformal prediction (Vovk et al. 2005): the quantiles of measured / predicted over measurements of the same
class. On GPUs these are published measurements, each predicted with constants that were chosen without its source
(benchmarks/published.py). Classes by strategy and by the number of nodes would be narrower, but they cover less of the
sources that they were not made from (docs/oracle.md). On CPUs these are the measured steps of
docs/measurements/2026-11-22-oracle-cpu.md.
"""

from __future__ import annotations

from itertools import chain

# measured / predicted at the lower and the upper end, of the band of 80 % and of that of 95 %
Ends = tuple[tuple[float, float], tuple[float, float]]
BANDS: dict[str, Ends] = {
    "replicas": ((0.95, 1.13), (0.89, 1.32)),  # 117 measurements, with and without sharded weights
    "layout": ((0.90, 1.07), (0.85, 1.10)),  # 720, on which the constants of layouts.py were chosen
    "layout on several nodes": ((0.85, 1.15), (0.75, 1.30)),  # none: assumed
    "learned": ((0.93, 1.22), (0.83, 1.33)),  # 28, the largest GPU count of each series of at least three
    "cpu": ((1.00, 1.19), (0.98, 1.28)),  # 54
}
LAYOUTS = (
    "tensor", "gpipe", "1f1b", "interleaved", "zero_bubble", "looped_bfs", "zbv", "dualpipev", "pipedream",
    "pipedream_2bw", "hybrid", "spatial", "channel", "megatron",
)  # fmt: skip


def band(framework: str, nodes: int, device: str = "cuda", learned: bool = False) -> Ends:
    """The ends of the bands of both levels, as factors of the predicted seconds. device: cuda | cpu; learned: whether
    the prediction uses runs with several GPU counts"""
    if device == "cpu":
        return BANDS["cpu"]
    if framework in LAYOUTS:
        return BANDS["layout on several nodes" if nodes > 1 else "layout"]
    return BANDS["learned" if learned else "replicas"]


def around(seconds: float, band: Ends) -> dict[str, float]:
    """The ends of a band around predicted seconds, by the names of the columns."""
    names = ("low_80_s", "high_80_s", "low_95_s", "high_95_s")
    return {name: seconds * end for name, end in zip(names, chain(*band), strict=True)}
