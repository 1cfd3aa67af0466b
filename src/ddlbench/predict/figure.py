"""The predictions as a figure in the report's style: samples a second over GPUs, and the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddlbench.errors import UserError
from ddlbench.figures import plotting
from ddlbench.figures.plotting import PALETTE, looks_of
from ddlbench.oracle.predictor import Prediction
from ddlbench.predict.ranking import fitting, separated, which
from ddlbench.results.rows import group_by

PARTS = {
    "computing": "compute_s",
    "exposed communication": "comm_exposed_s",
    "bubble": "bubble_s",
    "waiting for data": "data_s",
    "explained by no term": "unexplained_s",
}
MOST = 6  # frameworks whose steps are drawn


def draw(rows: Sequence[Prediction], path: Path, plan: bool, memory: float | None, device: str) -> None:
    """Write the figure as PNG and SVG: with `plan` the map of the best plans, else the steps of each framework.
    UserError if they cannot be written or nothing was predicted. memory: a limit in bytes; None: the device's;
    device: its type"""
    fine = [row for row in rows if row.status == "ok"]
    if not fine and not plan:
        raise UserError(f"--figure={path}: nothing was predicted")
    name = path.name.removesuffix(".png").removesuffix(".svg")
    with plotting.style():
        figure = _map(rows, memory, device) if plan else _steps(fine, device)
        try:
            for kind in ("png", "svg"):
                figure.savefig(path.with_name(f"{name}.{kind}"))
        except (OSError, ValueError) as error:  # a name that is empty or a folder's
            why = getattr(error, "strerror", None) or error
            raise UserError(f"--figure={path} cannot be written ({why}): choose another file") from error


def _steps(rows: Sequence[Prediction], device: str) -> Figure:
    """Samples a second over GPUs, and the parts of the steps of each framework. rows: with status ok"""
    names = list(dict.fromkeys(row.framework for row in rows))
    bands = ["with the bands of 80 %"] if any(row.low_80_s for row in rows) else []
    shown = [f"steps of {MOST} of {len(names)} frameworks are drawn"] if len(names) > MOST else []
    first = (f"{rows[0].model} on {rows[0].cluster}", [f"from: {rows[0].basis}", *bands, *shown])
    figure = plotting.grid([first, *((name, []) for name in names[:MOST])])
    axes, *panels = figure.axes
    looks, values = looks_of((name, name) for name in names), list[float]()
    for name in names:
        steps = [row for row in rows if row.framework == name]
        gpus, rates = [row.gpus for row in steps], [row.samples_per_s or 0.0 for row in steps]
        look = looks[name, name]
        axes.plot(gpus, rates, color=look.color, label=plotting.label(name), **look.shape)
        values += rates
        ends = [
            (row.gpus, samples / row.high_80_s, samples / row.low_80_s)
            for row, rate in zip(steps, rates, strict=True)
            if row.low_80_s and row.high_80_s and (samples := rate * (row.step_s or 0.0))
        ]
        if ends:
            places, slow, fast = zip(*ends, strict=True)
            axes.fill_between(places, slow, fast, color=look.color, alpha=0.12, linewidth=0)
            values += slow + fast
    plotting.gpu_axis(axes, [row.gpus for row in rows], device, log=True)
    plotting.value_axis(axes, values, "samples/s (predicted)", percents=False, log=True)
    for panel, name in zip(panels, names, strict=False):
        steps = [row for row in rows if row.framework == name]
        places, below = [str(row.gpus) for row in steps], [0.0] * len(steps)
        for color, (part, key) in zip(PALETTE, PARTS.items(), strict=False):
            heights = [getattr(row, key) or 0.0 for row in steps]
            panel.bar(places, heights, bottom=below, color=color, label=part)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        for place, row in zip(places, steps, strict=True):
            if row.low_80_s and row.high_80_s:
                panel.vlines(place, row.low_80_s, row.high_80_s, color="black")
        panel.set(xlabel=plotting.counted(device), ylabel="s a step (predicted)")
    plotting.arrange(figure)
    return figure


def _map(rows: Sequence[Prediction], memory: float | None, device: str) -> Figure:
    """The best plan over the number of GPUs and the samples of an update. memory, device: as for `draw`"""
    plans = (row for row in rows if row.settings)  # a framework that has none is a row without them
    cells = group_by(plans, lambda row: (row.gpus, row.settings.get("train.global_batch") or 0))
    best, tied = dict[tuple[int, int], Prediction | None](), set[tuple[int, int]]()
    for place, same in cells.items():
        row, *others = fitting(same, max_memory=memory) or [None]
        best[place] = row
        if row and any(other and other.framework != row.framework and not separated(row, other) for other in others):
            tied.add(place)
    gpus, batches = (sorted({place[axis] for place in best}) for axis in (0, 1))
    looks = looks_of((row.framework, row.framework) for row in best.values() if row)
    lines = ["the fastest plan that fits, predicted", "*: not separated from those of other frameworks"]
    figure = plotting.grid([(f"{rows[0].model} on {rows[0].cluster}", lines)])
    (axes,) = figure.axes
    for (count, batch), row in best.items():
        x, y = gpus.index(count), batches.index(batch)
        color = looks[row.framework, row.framework].color if row else "#eeeeee"
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, alpha=0.35, edgecolor="white"))
        layout = "\n".join(which(row)[1].split(" ", 1)) if row else ""
        name = f"{row.framework}{'*' if (count, batch) in tied else ''}" if row else "nothing fits"
        axes.annotate(f"{name}\n{layout}", (x, y), ha="center", va="center", fontsize=6)
    axes.set_xticks(range(len(gpus)), list(map(str, gpus)))
    axes.set_yticks(range(len(batches)), [str(batch) if batch else "" for batch in batches])
    limits = {"xlim": (-0.5, len(gpus) - 0.5), "ylim": (-0.5, len(batches) - 0.5)}
    axes.set(**limits, xlabel=plotting.counted(device), ylabel="samples an update")
    axes.grid(visible=False)
    plotting.arrange(figure)
    width, height = figure.get_size_inches()  # a cell needs so much
    figure.set_size_inches(max(width, 1.5 + 1.1 * len(gpus)), max(height, 1.7 + 0.6 * len(batches)))
    return figure
