"""The table a person reads first: one line a measurement, as text for the terminal and as cells for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from ddlbench.report.labels import changed_models, marked
from ddlbench.report.marks import numbered, remarks
from ddlbench.report.merge import Row
from ddlbench.report.panels import devices, duration
from ddlbench.report.quantities import GIB, MEMORY
from ddlbench.report.ratios import NONE_SHOWN, base_name
from ddlbench.report.stats import SMALLEST_N
from ddlbench.report.tables import records
from ddlbench.report.texts import aligned
from ddlbench.texts import shortened

WIDTH = 140
FAILURES_SHOWN = 10
LONGEST_NAME = 30
_LEFT = (
    "framework",
    "model",
    "loader",
    "mode",
    "scaling",
    "status",
    "best single",
    "own base",
    "vs own base",
    "settings",
)

INTERVAL_NOTE = (
    "intervals of ratios: each end of the base's over the opposite end of the row's, coverage at least as given; "
    "none shown: 1 is inside"
)

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
    "!": lambda row: row.get("mark", ""),
    "epoch time": lambda row: seconds(row["epoch_time_s"]),
    "samples/s": lambda row: number(row["throughput_samples_per_s"]),
    "peak memory": lambda row: memory(row),
    "top-1/ppl": lambda row: quality(row),
}
VS_SINGLE: Columns = {
    "speedup": lambda row: shown_ratio(row, "speedup"),
    "efficiency": lambda row: percent(row["efficiency"]),
    "best single": lambda row: base(row, "best_single"),
}
VS_OWN: Columns = {
    "speedup vs own base": lambda row: shown_ratio(row, "speedup_vs_own_base"),
    "efficiency vs own base": lambda row: percent(row["efficiency_vs_own_base"]),
    "own base": lambda row: base(row, "own_base"),
}
# A second table of the terminal: ratios with an interval, and those to the own base where nothing ran on one GPU.
RATIOS: Columns = {
    "framework": lambda row: name(row["framework"]),
    "model": lambda row: name(row["model"]),
    "loader": lambda row: name(row["loader"]),
    "gpus": lambda row: str(row["gpus"] or ""),
    "scaling": lambda row: str(row["scaling"]),
    "n": lambda row: str(row["runs_ok"]),
    "speedup interval": lambda row: between(row, "speedup", ratio),
    "efficiency interval": lambda row: between(row, "efficiency", percent),
    "vs own base": lambda row: own_ratio(row) if needs_own(row) else "",
    "its interval": lambda row: between(row, "speedup_vs_own_base", ratio),
    "coverage": lambda row: percent(row["speedup_coverage"] or row["speedup_vs_own_base_coverage"]),
}
# A third table of the terminal, with --predict.
PREDICTED: Columns = {
    "predicted memory": lambda row: gib(row["predicted_memory_bytes"]),
    "memory error": lambda row: signed(row["predicted_memory_error"]),
    "predicted step": lambda row: seconds(row["predicted_step_s"]),
    "prediction error": lambda row: signed(row["predicted_error"]) + ("!" if row["predicted_flag"] else ""),
}
WHICH: Columns = {key: MEASURED[key] for key in ("framework", "model", "loader", "gpus", "scaling")}
SETTINGS: Columns = {"settings": lambda row: settings(row)}


def overview_cells(rows: Sequence[Row], columns: Columns) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; a column that says nothing in any row is left out."""
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    filled = {name: column for name, column in cells.items() if any(column)}
    return list(filled), [list(line) for line in zip(*filled.values(), strict=True)]


def summary_text(scaling: pd.DataFrame) -> str:
    """The table of scaling.csv in at most 140 columns, and below it intervals, and what its ratios start from."""
    rows = numbered(marked(records(scaling)))
    if not rows:
        return "no attempt has a configuration in its record: the report lists the failures"
    numbered_texts = {text: number for number, text in enumerate(dict.fromkeys(filter(None, map(settings, rows))), 1)}
    marks: Columns = {"": lambda row: f"[{numbered_texts[text]}]" if (text := settings(row)) else ""}
    table = text_table(rows, MEASURED | VS_SINGLE | marks)
    numbers = [f"[{number}] {text}" for text, number in numbered_texts.items()]
    below = [*numbers, *base_lines(rows), *notes(rows), *failure_lines(rows)]
    return "\n".join([*table, *ratio_lines(rows, marks), *predicted_lines(rows, marks), "", *below])


def text_table(rows: Sequence[Row], columns: Columns) -> list[str]:
    """Lines with aligned columns under their headers, none longer than WIDTH."""
    headers, lines = overview_cells(rows, columns)
    return [_cut(line) for line in aligned(headers, lines, _LEFT)]


def ratio_lines(rows: Sequence[Row], marks: Columns) -> list[str]:
    known = [row for row in rows if has_interval(row) or needs_own(row)]
    return ["", *text_table(known, RATIOS | marks)] if known else []


def predicted_lines(rows: Sequence[Row], marks: Columns) -> list[str]:
    known = [row for row in rows if row["predicted_step_s"] is not None]
    return ["", *text_table(known, WHICH | PREDICTED | marks)] if known else []


def has_interval(row: Row) -> bool:
    return row["speedup_low"] is not None or row["speedup_vs_own_base_low"] is not None


def needs_own(row: Row) -> bool:
    """Whether its own base is all that the row can be compared with."""
    return row["speedup_vs_own_base"] is not None and not row["best_single_sample_time_s"]


def base_lines(rows: Sequence[Row]) -> list[str]:
    """The bases by name and absolute time: a speedup without them says little."""
    lines: list[str] = []
    for row in rows:
        for kind in ("best_single", "own_base"):
            sample_s, epoch_s = row[f"{kind}_sample_time_s"], row[f"{kind}_epoch_time_s"]
            if sample_s:
                epoch = f", epoch {seconds(epoch_s)}" if epoch_s else ""
                lines.append(f"base {base(row, kind)}, {name(row['model'])}: {duration(sample_s)} a sample{epoch}")
    return list(dict.fromkeys(lines))


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table cannot say in a cell. `rows`: with their models marked."""
    few = any(0 < row["runs_ok"] < SMALLEST_N for row in rows)
    host = any(row["device"] == "cpu" for row in rows)
    return [
        *changed_models(rows),
        *remarks(rows),
        *([INTERVAL_NOTE] if any(map(has_interval, rows)) else []),
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


def signed(value: float | None) -> str:
    """A share with its sign."""
    return "" if value is None else f"{100 * value:+.1f} %"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def shown_ratio(row: Row, column: str) -> str:
    """A speedup; "none shown" where its interval includes 1."""
    return "none shown" if row[f"{column}_verdict"] == NONE_SHOWN else ratio(row[column])


def own_ratio(row: Row) -> str:
    """Speedup and efficiency against the own base, and which that is: "3.20, 80.0 % of ddp@2"."""
    ratios = ", ".join(filter(None, (shown_ratio(row, "speedup_vs_own_base"), percent(row["efficiency_vs_own_base"]))))
    return " of ".join(filter(None, (ratios, base(row, "own_base"))))


def between(row: Row, column: str, text: Callable[[float | None], str]) -> str:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    return "" if low is None else f"{text(low)} to {text(high)}"


def base(row: Row, kind: str) -> str:
    """The base of a row's ratios, "ddp@2"; kind: "own_base" | "best_single"."""
    gpus = 1 if kind == "best_single" else row["own_base_gpus"]
    return f"{name(base_name(row, kind))}@{gpus}" if row[f"{kind}_sample_time_s"] else ""


def memory(row: Row) -> str:
    """The allocator's peak, or the host process's where there is no GPU."""
    return gib(row[MEMORY.get(row["device"] or "", MEMORY["cpu"])])


def gib(value: float | None) -> str:
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
