"""The table a person reads first: one line a measurement, as text for the terminal and as cells for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from ddlbench.report.labels import changed_models, marked
from ddlbench.report.merge import Row
from ddlbench.report.panels import devices, duration
from ddlbench.report.quantities import GIB, MEMORY
from ddlbench.report.stats import SMALLEST_N
from ddlbench.report.tables import records
from ddlbench.report.texts import shortened

WIDTH = 140
FAILURES_SHOWN = 10
LONGEST_NAME = 30
_LEFT = ("framework", "model", "loader", "mode", "scaling", "status", "base", "settings")

Columns = dict[str, Callable[[Row], str]]
MEASURED: Columns = {
    "framework": lambda row: name(row["framework"]),
    "model": lambda row: name(row["model"]),
    "loader": lambda row: name(row["loader"]),
    "mode": lambda row: "" if row["mode"] == "train" else name(row["mode"]),
    "gpus": lambda row: str(row["gpus"] or ""),
    "scaling": lambda row: str(row["scaling"]),
    "status": lambda row: name(row["status"]),
    "n": lambda row: str(row["runs_ok"]),
    "epoch time": lambda row: seconds(row["epoch_time_s"]),
    "samples/s": lambda row: number(row["throughput_samples_per_s"]),
    "peak memory": lambda row: memory(row),
    "top-1/ppl": lambda row: quality(row),
}
# The base of the figures: the best single GPU where there is one, else the framework's own fewest GPUs.
FROM_BASE: Columns = {
    "speedup": lambda row: ratio(row["speedup_vs_best_single"] or row["speedup"]),
    "efficiency": lambda row: percent(row["efficiency_vs_best_single"] or row["efficiency"]),
    "base": lambda row: base(row, "best_single") or base(row, "base"),
}
OWN: Columns = {
    "speedup": lambda row: ratio(row["speedup"]),
    "efficiency": lambda row: percent(row["efficiency"]),
    "own base": lambda row: base(row, "base"),
}
VS_SINGLE: Columns = {
    "speedup vs best single": lambda row: ratio(row["speedup_vs_best_single"]),
    "efficiency vs best single": lambda row: percent(row["efficiency_vs_best_single"]),
    "best single": lambda row: base(row, "best_single"),
}
SETTINGS: Columns = {"settings": lambda row: settings(row)}


def overview_cells(rows: Sequence[Row], columns: Columns) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; a column that says nothing in any row is left out."""
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    told = {name: column for name, column in cells.items() if any(column)}
    return list(told), [list(line) for line in zip(*told.values(), strict=True)]


def summary_text(scaling: pd.DataFrame) -> str:
    """The table of scaling.csv in at most 140 columns, and below it what its ratios start from."""
    rows = marked(records(scaling))
    if not rows:
        return "no attempt has a configuration in its record: the report lists the failures"
    told = list(dict.fromkeys(text for row in rows if (text := settings(row))))
    marks: Columns = {"": lambda row: f"[{told.index(text) + 1}]" if (text := settings(row)) else ""}
    headers, lines = overview_cells(rows, MEASURED | FROM_BASE | marks)
    widths = [max(len(line[n]) for line in [headers, *lines]) for n in range(len(headers))]
    align = [str.ljust if header in _LEFT else str.rjust for header in headers]
    texts = [
        "  ".join(pad(cell, width) for pad, cell, width in zip(align, line, widths, strict=True)).rstrip()
        for line in [headers, ["-" * width for width in widths], *lines]
    ]
    explained = [f"[{number}] {text}" for number, text in enumerate(told, 1)]
    return "\n".join([*map(_cut, texts), "", *explained, *base_lines(rows), *notes(rows), *failure_lines(rows)])


def base_lines(rows: Sequence[Row]) -> list[str]:
    """The bases by name and absolute time: a speedup without them says little."""
    told: list[str] = []
    for row in rows:
        for kind in ("best_single", "base"):
            sample_s, epoch_s = row[f"{kind}_sample_time_s"], row[f"{kind}_epoch_time_s"]
            if sample_s:
                epoch = f", epoch {seconds(epoch_s)}" if epoch_s else ""
                told.append(f"base {base(row, kind)}, {name(row['model'])}: {duration(sample_s)} a sample{epoch}")
    return list(dict.fromkeys(told))


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table cannot say in a cell. `rows`: with their models marked."""
    few = any(0 < row["runs_ok"] < SMALLEST_N for row in rows)
    host = any(row["device"] == "cpu" for row in rows)
    return [
        *changed_models(rows),
        *(["peak memory on CPU is the fullest rank's process on the host"] if host else []),
        *([f"n < {SMALLEST_N}: no 95 % CI of the median; every repeat is in the figures"] if few else []),
    ]


def failure_lines(rows: Sequence[Row]) -> list[str]:
    """What did not end ok, in a few lines; the report has them all."""
    failed = [row for row in rows if row["status"] != "ok"]
    lines = [
        f"{row['status']}: {row['framework']} {row['model']} on {devices(row['gpus'] or 0, row['device'])}"
        + (f": {row['reason']}" if row["reason"] else "")
        for row in failed[:FAILURES_SHOWN]
    ]
    more = len(failed) - len(lines)
    return [*map(_cut, lines), *([f"and {more} more that did not end ok: see the report"] if more else [])]


def name(value: str | None) -> str:
    """What a column is narrow enough for."""
    return shortened(value or "", LONGEST_NAME)


def seconds(value: float | None) -> str:
    """A time with the digits it deserves: "123.4 s", "1.23 s", "0.0123 s"."""
    if value is None:
        return ""
    return f"{value:,.1f} s" if value >= 10 else f"{value:#.3g} s"


def number(value: float | None) -> str:
    """A rate: "12,345", "123.4", "1.23"."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:#.3g}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def base(row: Row, kind: str) -> str:
    """The base of a row's ratios, "ddp@2"; kind: "base" | "best_single"."""
    gpus = 1 if kind == "best_single" else row["base_gpus"]
    return f"{name(row[f'{kind}_framework'])}@{gpus}" if row[f"{kind}_sample_time_s"] else ""


def memory(row: Row) -> str:
    """The allocator's peak, or the host process's where there is no GPU."""
    value = row[MEMORY.get(row["device"] or "", MEMORY["cpu"])]
    return "" if value is None else f"{value / GIB:.2f} GiB"


def quality(row: Row) -> str:
    """Top-1 of images or perplexity per token of text."""
    if row["val_perplexity_token"] is not None:
        return f"ppl {number(row['val_perplexity_token'])}"
    return percent(row["val_top1"])


def settings(row: Row) -> str:
    """What else distinguishes the row from others in the table."""
    return " ".join(row[name] for name in ("layout", "knobs", "variant") if row[name])


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
