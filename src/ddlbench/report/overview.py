"""The table a person reads first: one line a measurement, as text for the terminal and as cells for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap

from ddlbench.figures.panels import devices, duration
from ddlbench.figures.quantities import MEMORY
from ddlbench.report.best import best
from ddlbench.results.rows import Row
from ddlbench.results.tables.labels import changed_models
from ddlbench.results.tables.marks import remarks
from ddlbench.results.tables.ratios import NONE_SHOWN, base_name
from ddlbench.results.tables.stats import SMALLEST_N
from ddlbench.texts import aligned, first_few, gib, number, percent, ratio, seconds, shortened, signed

WIDTH = 140
FAILURES_SHOWN = 10
LONGEST_NAME = 30
LONGEST_CELL = 60
LEFT = (  # columns of texts
    "framework", "model", "loader", "mode", "scaling", "status", "best single", "own base", "vs own base", "settings",
)  # fmt: skip

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
    "range": lambda row: spread(row),
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
WHICH: Columns = {key: MEASURED[key] for key in ("framework", "model", "loader", "gpus", "scaling")}
# A second table of the terminal: to the best single GPU, and to the own base where nothing ran on one GPU.
RATIOS: Columns = {
    **WHICH,
    **VS_SINGLE,
    "speedup interval": lambda row: between(row, "speedup", ratio),
    "efficiency interval": lambda row: between(row, "efficiency", percent),
    "vs own base": lambda row: own_ratio(row) if needs_own(row) else "",
    "its interval": lambda row: between(row, "speedup_vs_own_base", ratio) if needs_own(row) else "",
    "coverage": lambda row: percent(row["speedup_coverage"] or row["speedup_vs_own_base_coverage"]),
}
# A third table of the terminal, with --predict.
PREDICTED: Columns = {
    "predicted memory": lambda row: gib(row["predicted_memory_bytes"]),
    "memory error": lambda row: signed(row["predicted_memory_error"]),
    "predicted step": lambda row: seconds(row["predicted_step_s"]),
    "prediction error": lambda row: signed(row["predicted_error"]) + ("!" if row["predicted_flag"] else ""),
}
SETTINGS: Columns = {"settings": lambda row: settings(row)}


def overview_cells(rows: Sequence[Row], columns: Columns) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; a column that says nothing in any row is left out."""
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    filled = {name: column for name, column in cells.items() if any(column)}
    return list(filled), [list(line) for line in zip(*filled.values(), strict=True)]


def summary_text(rows: Sequence[Row]) -> str:
    """The measurements in at most 140 columns, their ratios, which framework is the fastest and how certain that is,
    and what the ratios start from. rows: `Tables.shown_rows`"""
    if not rows:
        return "no attempt has a configuration in its record: the report lists the failures"
    numbered_texts = {text: number for number, text in enumerate(dict.fromkeys(filter(None, map(settings, rows))), 1)}
    marks: Columns = {"": lambda row: f"[{numbered_texts[text]}]" if (text := settings(row)) else ""}
    compared = [row for row in rows if compared_with(row, "best_single") or needs_own(row)]
    predicted = [row for row in rows if row["predicted_step_s"] is not None]
    tables = ((rows, MEASURED), (compared, RATIOS), (predicted, WHICH | PREDICTED))
    lines: list[str] = []
    for shown, columns in tables:
        if shown:
            headers, cells = overview_cells(shown, columns | marks)
            lines += [*map(_cut, aligned(headers, cells, LEFT)), ""]
    fastest = [
        line
        for paragraph in best(rows)[0]
        for line in wrap(f"{paragraph.subject}. {' '.join(paragraph.sentences)}", WIDTH)
    ]
    numbers = [f"[{number}] {text}" for text, number in numbered_texts.items()]
    return "\n".join([*lines, *fastest, *numbers, *base_lines(rows), *notes(rows), *failure_lines(rows)])


def ratio_columns(rows: Sequence[Row]) -> Columns:
    """The columns of the ratios to each kind of base with which some row is compared."""
    kinds = {"best_single": VS_SINGLE, "own_base": VS_OWN}
    shown = [columns for kind, columns in kinds.items() if any(compared_with(row, kind) for row in rows)]
    return {name: cell for columns in shown for name, cell in columns.items()}


def compared_with(row: Row, kind: str) -> bool:
    """Whether the row has ratios to this base, and is not the base itself: those are 1 by definition."""
    suffix = "" if kind == "best_single" else "_vs_own_base"
    return not {row[f"speedup{suffix}"], row[f"efficiency{suffix}"]} <= {None, 1.0}


def needs_own(row: Row) -> bool:
    """Whether the row can be compared with its own base only."""
    return compared_with(row, "own_base") and not row["best_single_sample_time_s"]


def base_lines(rows: Sequence[Row]) -> list[str]:
    """The bases by name and absolute time: a speedup without them says little."""
    lines: list[str] = []
    for row in rows:
        for kind in ("best_single", "own_base"):
            sample_s, epoch_s = row[f"{kind}_sample_time_s"], row[f"{kind}_epoch_time_s"]
            if compared_with(row, kind):
                epoch = f", epoch {seconds(epoch_s)}" if epoch_s else ""
                lines.append(f"base {base(row, kind)}, {name(row['model'])}: {duration(sample_s)} a sample{epoch}")
    return list(dict.fromkeys(lines))


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes that do not fit into a cell. `rows`: with their models marked."""
    few = any(0 < row["runs_ok"] < SMALLEST_N for row in rows)
    repeated = any(row["runs_ok"] > 1 for row in rows)
    host = any(row["device"] == "cpu" for row in rows)
    intervals = any(row["speedup_low"] is not None or row["speedup_vs_own_base_low"] is not None for row in rows)
    return [
        *changed_models(rows),
        *remarks(rows),
        *(["range: the shortest and the longest epoch time of the n repeats"] if repeated else []),
        *([INTERVAL_NOTE] if intervals else []),
        *(["peak memory on CPU is the fullest rank's process on the host"] if host else []),
        *([f"n < {SMALLEST_N}: no 95 % CI of the median; every repeat is in the figures"] if few else []),
    ]


def failure_lines(rows: Sequence[Row]) -> list[str]:
    """The runs that did not end ok, in a few lines; the report has them all."""
    failed = [row for row in rows if row["status"] != "ok"]
    lines = [_cut(": ".join(filter(None, (row["status"], _cell(row), row["reason"])))) for row in failed]
    return first_few(lines, FAILURES_SHOWN, "more that did not end ok: see the report")


def _cell(row: Row) -> str:
    """The settings of a failed run, and after an out-of-memory error a setting that may fit: "ddp resnet50 on 8 GPUs,
    batch=256 (try ...)"."""
    batch, options = f"batch={row['global_batch'] or 'unknown'}", settings(row)
    named = options if batch in options.split(" ") else f"{batch} {options}".strip()
    where = f"{row['framework']} {row['model']} on {devices(row['gpus'] or 0, row['device'])}"
    next_key = f" (try {less_memory(row)})" if row["status"] == "oom" else ""
    return f"{where}, {shortened(named, LONGEST_CELL)}{next_key}"


def less_memory(row: Row) -> str:
    """The key to try next where a run was out of memory: half the micro batch, which divides the same batch."""
    if row["mode"] == "loader":
        return "a smaller loader.prefetch or loader.workers"
    size = row["micro_batch"]
    if not size:  # it ended before its first step
        return "a smaller train.micro_batch, or a framework that shards the weights"
    return f"train.micro_batch={1 if size % 2 else size // 2}" if size > 1 else "train.checkpoint_activations=true"


def name(value: str | None) -> str:
    """What a column is narrow enough for."""
    return shortened(value or "", LONGEST_NAME)


def spread(row: Row) -> str:
    """The range of the repeats' epoch times, "4.05 to 6.91 s"; empty for a single run."""
    if row["runs_ok"] < 2 or row["epoch_time_shortest_s"] is None:
        return ""
    return f"{seconds(row['epoch_time_shortest_s']).removesuffix(' s')} to {seconds(row['epoch_time_longest_s'])}"


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


def quality(row: Row) -> str:
    """Top-1 of images or perplexity per token of text."""
    if row["val_perplexity_token"] is not None:
        return f"ppl {number(row['val_perplexity_token'])}"
    return percent(row["val_top1"])


def settings(row: Row) -> str:
    """The other settings that distinguish the row from others in the table."""
    return " ".join(row[name] for name in ("axes", "layout", "knobs", "variant") if row.get(name))


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
