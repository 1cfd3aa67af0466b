"""How far the oracle is off published measurements, with constants that were chosen without their source.

python -m benchmarks.published POINTS.csv [LAYOUTS.csv] [--out FILE.md] [--figure FILE.png]      # make oracle-published

Three constants are common to all GPUs (oracle/machine/machine.py): GPU_HIDDEN_COST, GPU_SPREAD and GPU_KERNEL_S. The
first table has the errors with them, and the bands of oracle/bands.py that these errors give. Then each source is
predicted with the constants of a grid that have the smallest mean error on all other sources. There each source
counts once, however many points it has, and an error counts as CAP at most: none of these terms makes a step twice as
long as predicted, as a slow loader does. The table of ablations leaves out one term at a time. The constants of
layouts.py were chosen on these layouts, so the band of their errors is no forecast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from math import exp, floor, log
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, cast

import matplotlib as mpl
from matplotlib import pyplot as plt

from ddlbench.errors import RunError
from ddlbench.figures import plotting
from ddlbench.figures.plotting import PALETTE
from ddlbench.oracle import bands
from ddlbench.oracle.machine.machine import GPU_HIDDEN_COST, GPU_KERNEL_S, GPU_SPREAD, Machine
from ddlbench.predict.grading import layouts
from ddlbench.predict.grading.grade import error_statistics, learned_rows, predicted_s
from ddlbench.predict.grading.machines import NETWORK_SHARE
from ddlbench.predict.grading.points import Point, points
from ddlbench.results.reading.published import read_csv
from ddlbench.results.rows import group_by
from ddlbench.texts import markdown_table

LEVELS = (0.80, 0.95)
ROUNDING = 1e-9  # of products of floating-point numbers


class Constants(NamedTuple):
    hidden_cost: float
    spread: float
    kernel_s: float


CHOSEN = Constants(GPU_HIDDEN_COST, GPU_SPREAD, GPU_KERNEL_S)
GRID = [Constants(*values) for values in product((0.2, 0.4, 0.7), (0.01, 0.02, 0.03), (1.5e-5, 2.0e-5, 2.5e-5))]
CAP = 0.2
WITHIN_NODE_SHARE = 0.77  # of the nominal bandwidth, in predict/grading/gpus.yaml


def shares_a_path(machine: Machine) -> bool:
    """Whether the devices of a node send through the host, all on one path (predict/grading/machines.py)."""
    return machine.hidden_cost == {1: 1.0}


def with_constants(machine: Machine, constants: Constants) -> Machine:
    kept = shares_a_path(machine) or not machine.overlap  # nothing hides there
    hidden = machine.hidden_cost if kept else {1: constants.hidden_cost}
    device = replace(machine.device, kernel_s=constants.kernel_s)
    return replace(machine, device=device, hidden_cost=hidden, spread=constants.spread)


def prompt_host(machine: Machine) -> Machine:
    return replace(machine, device=replace(machine.device, host_s=0.0))


def nominal(machine: Machine) -> Machine:
    """The links within a node and between nodes with the bandwidth of their data sheets, without measured tables."""
    if shares_a_path(machine):
        return machine
    shares = (WITHIN_NODE_SHARE, NETWORK_SHARE)
    links = zip(machine.links, shares, strict=False)
    faster = tuple(replace(link, bytes_per_s=link.bytes_per_s / share) for link, share in links)
    return replace(machine, links=faster, sweeps={})


ABLATIONS: dict[str, Callable[[Machine], Machine]] = {
    "all terms": lambda machine: machine,
    "communication hides behind computing for free": lambda machine: with_constants(
        machine, CHOSEN._replace(hidden_cost=0.0)
    ),
    "no communication hides": lambda machine: with_constants(machine, CHOSEN._replace(hidden_cost=1.0)),
    "all ranks equally fast": lambda machine: with_constants(machine, CHOSEN._replace(spread=0.0)),
    "kernels take no time beside their work": lambda machine: with_constants(machine, CHOSEN._replace(kernel_s=0.0)),
    "hosts start kernels in no time": prompt_host,
    "gradients are packed in no time": lambda machine: replace(machine, packing=0.0),
    "links as their data sheets": nominal,
    "none of these": lambda machine: nominal(
        prompt_host(with_constants(replace(machine, packing=0.0), Constants(0.0, 0.0, 0.0)))
    ),
}

OF_LAYOUTS = {
    "all constants": layouts.A100,
    "large matrix products reach the peak": layouts.A100._replace(flops_share=1.0),
    "kernels take no time beside their work": layouts.A100._replace(kernel_s=0.0),
    "the host starts kernels in no time": layouts.A100._replace(host_s=0.0),
    "attention is fused": layouts.A100._replace(scores=0.0),
    "the head takes as long as its FLOPs say": layouts.A100._replace(head_factor=1.0),
    "none of these": layouts.Kernels(1.0, 0.0, 0.0, 0.0, 1.0),
}


def errors(all_points: Iterable[Point], change: Callable[[Machine], Machine]) -> dict[int, float]:
    """The error of each point on its changed machine, by its line in the file."""
    return {
        point.stated.line: predicted_s(point, change(point.machine)) / point.measured.seconds - 1
        for point in all_points
    }


def left_out_errors(all_points: Sequence[Point]) -> tuple[dict[int, float], dict[str, Constants]]:
    """The error of each point with the constants that were chosen without its source, and these constants."""
    grid = {
        constants: errors(all_points, lambda machine, constants=constants: with_constants(machine, constants))
        for constants in GRID
    }
    by_source = group_by(all_points, lambda point: point.stated.source)

    def mean_error(constants: Constants, without: str) -> float:
        capped = {line: min(abs(error), CAP) for line, error in grid[constants].items()}
        others = (group for source, group in by_source.items() if source != without)
        return mean(mean(capped[point.stated.line] for point in group) for group in others)

    chosen = {source: min(grid, key=partial(mean_error, without=source)) for source in by_source}
    return {point.stated.line: grid[chosen[point.stated.source]][point.stated.line] for point in all_points}, chosen


def ends(ratios: Sequence[float]) -> bands.Ends:
    """The bands that ratios of measured to predicted seconds give: of n ratios the k-th smallest and largest, with
    k = (n + 1)(1 - level) / 2. With fewer than 39 the smallest and largest ratio end the band of 95 %."""
    sorted_logs, n = sorted(map(log, ratios)), len(ratios)
    pairs = list[tuple[float, float]]()
    for level in LEVELS:
        outside = (n + 1) * (1 - level) / 2
        below = max(1, floor(outside + ROUNDING)) - 1
        above = n - 1 - below
        pairs.append((round(exp(sorted_logs[below]), 2), round(exp(sorted_logs[above]), 2)))
    return pairs[0], pairs[1]


def coverage(all_points: Sequence[Point], error: Mapping[int, float]) -> tuple[float, float]:
    """The shares of points within the bands of 80 and 95 % that all other sources give."""
    ratios = {point.stated.line: 1 / (1 + error[point.stated.line]) for point in all_points}
    inside = list[list[bool]]()
    for source, group in group_by(all_points, lambda point: point.stated.source).items():
        pairs = ends([ratios[p.stated.line] for p in all_points if p.stated.source != source])
        inside += [[low <= ratios[point.stated.line] <= high for low, high in pairs] for point in group]
    return mean(within for within, _ in inside), mean(within for _, within in inside)


def figure(all_points: Sequence[Point], error: Mapping[int, float], path: Path) -> None:
    """Predicted over measured seconds of a step: a mark for each point, its color and shape by source."""
    with mpl.rc_context(cast(Any, plotting.STYLE)):
        drawing, axes = plt.subplots(figsize=(6.4, 5.2), layout="constrained")
        groups = group_by(all_points, lambda point: point.stated.source)
        for color, marker, (source, group) in zip(cycle(PALETTE), cycle("osv^"), groups.items(), strict=False):
            measured = [point.measured.seconds for point in group]
            predicted = [point.measured.seconds * (1 + error[point.stated.line]) for point in group]
            axes.scatter(
                measured, predicted, s=18, color=color, marker=marker, label=f"{source} ({len(group)})", alpha=0.8
            )
        ends = [0.8 * min(p.measured.seconds for p in all_points), 1.25 * max(p.measured.seconds for p in all_points)]
        for factor, style in ((0.9, ":"), (1.0, "-"), (1.1, ":")):
            axes.plot(ends, [factor * end for end in ends], color="gray", linestyle=style, linewidth=1, zorder=0)
        axes.set(xscale="log", yscale="log", xlabel="measured seconds of a step", ylabel="predicted seconds of a step")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(plotting.plain)
        axes.set_title("Published steps, predicted from another GPU count\n(dotted: 10 % off)")
        axes.legend(fontsize=7)
        drawing.savefig(path, dpi=110)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return markdown_table(head, (list(map(str, row)) for row in rows))


def summary(values: Sequence[float]) -> list[str]:
    rows, *sizes, within, signed = error_statistics(values).values()
    return [str(rows), *(f"{size:.1%}" for size in sizes), f"{within:.0%}", f"{signed:+.1%}"]


def by(groups: Mapping[str, list[float]], name: str) -> str:
    head = [name, "points", "mean error", "median", "within 10 %", "mean of signed errors"]
    return table(head, ([group, *summary(values)] for group, values in groups.items()))


def grouped(all_points: Sequence[Point], error: Mapping[int, float], name: str) -> dict[str, list[float]]:
    groups = group_by(all_points, lambda point: str({"GPUs": point.measured.gpus, **point.stated._asdict()}[name]))
    return {value: [error[point.stated.line] for point in group] for value, group in groups.items()}


def report(
    all_points: Sequence[Point],
    error: Mapping[int, float],
    without_source: Mapping[int, float],
    chosen: Mapping[str, Constants],
    all_layouts: Sequence[layouts.Layout],
) -> str:
    """error: with the constants of machine.py; without_source: with those of `chosen`"""
    both = {"of machine.py": error, "chosen without the source": without_source}
    parts = [by({name: list(errors.values()) for name, errors in both.items()}, "constants")]
    parts += [by(grouped(all_points, error, name), name) for name in ("source", "model", "strategy", "gpu", "GPUs")]
    parts.append(table(["source", *Constants._fields], ([source, *values] for source, values in chosen.items())))
    without = {name: list(errors(all_points, change).values()) for name, change in ABLATIONS.items()}
    parts.append(by(without, "terms"))
    in_layouts = {
        name: [layouts.predicted_s(layout, kernels) / layout.measured_s - 1 for layout in all_layouts]
        for name, kernels in OF_LAYOUTS.items()
    }
    if all_layouts:
        unused = [error for row, error in enumerate(in_layouts["all constants"]) if row % 6]
        parts.append(by(in_layouts | {"all constants, rows that did not choose them": unused}, "constants of layouts"))
    last = list(learned_rows(all_points, []))
    ratios = {
        "replicas": [1 / (1 + error[point.stated.line]) for point in all_points],
        "learned": [row["measured_s"] / row["predicted_s"] for row in last],
        "layout": [1 / (1 + error) for error in in_layouts["all constants"]],
    }
    learned = {"base alone": [error[row["line"]] for row in last]}
    learned["learned from all smaller counts"] = [row["error"] for row in last]
    parts.append(by(learned, "largest GPU count of a series"))
    rows = ([name, len(values), *ends(values)] for name, values in ratios.items() if values)
    parts.append(table(["class", "points", "band of 80 %", "band of 95 %"], rows))
    shares = [str(len(all_points)), *(f"{share:.0%}" for share in coverage(all_points, error))]
    parts.append(table(["points in bands of other sources", "band of 80 %", "band of 95 %"], [shares]))
    lines = (
        [*point.stated[:5], point.measured.gpus, point.base.gpus,
         f"{point.measured.seconds * 1e3:.4g}", f"{(1 + error[point.stated.line]) * point.measured.seconds * 1e3:.4g}",
         f"{error[point.stated.line]:+.1%}"]
        for point in all_points
    )  # fmt: skip
    head = ["line", "source", "model", "strategy", "GPU", "GPUs", "base", "measured ms", "predicted ms", "error"]
    return "\n".join([*parts, table(head, lines)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("layouts", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, help="also write the tables into this file")
    parser.add_argument("--figure", type=Path, help="also draw predicted over measured seconds into this file")
    arguments = parser.parse_args()
    gradable, all_layouts, left_out = list[Point](), list[layouts.Layout](), list[str]()
    for point in points(read_csv(arguments.points)[1], left_out):
        try:
            predicted_s(point)
        except RunError as error:
            left_out.append(f"line {point.stated.line}: {error}")
        else:
            gradable.append(point)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    if arguments.layouts:
        all_layouts = list(layouts.layouts(read_csv(arguments.layouts)[1], []))
    error = errors(gradable, lambda machine: machine)
    text = report(gradable, error, *left_out_errors(gradable), all_layouts)
    if arguments.figure:
        figure(gradable, error, arguments.figure)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
