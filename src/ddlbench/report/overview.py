"""The table a person reads first: one line a measurement, as text for the terminal, and as cells for the page and for
documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from textwrap import wrap

from ddlbench.figures.curves import memory_column
from ddlbench.figures.panels import panel_texts
from ddlbench.report.fastest import best
from ddlbench.results.rows import OWN, PUBLISHED
from ddlbench.results.tables.checks import marks_explained, unknown_stragglers
from ddlbench.results.tables.measurement import Measurement, duration
from ddlbench.results.tables.merge import size
from ddlbench.results.tables.stats import NONE_SHOWN, SMALLEST_N
from ddlbench.texts import aligned, clipped, first_few, gib, number, percent, ratio, seconds, signed

WIDTH = 140
FAILURES_SHOWN = 10
LONGEST_CELL = 30
LONGEST_SETTINGS = 60
LEFT = (  # columns of texts
    "framework", "model", "loader", "mode", "scaling", "source", "status", "best single", "own base", "vs own base",
    "settings",
)  # fmt: skip

INTERVAL_NOTE = (
    "intervals of ratios: each end of the base's over the opposite end of the row's, coverage at least as given; "
    "none shown: 1 is inside"
)


def needs_own(row: Measurement) -> bool:
    """Whether the row can be compared with its own base only."""
    return row.has_ratios(own=True) and not row["best_single_sample_time_s"]


def spread(row: Measurement) -> str:
    """The range of the repeats' epoch times, "4.05 to 6.91 s"; empty for a single run."""
    if row["runs_timed"] < 2 or row["epoch_time_shortest_s"] is None:
        return ""
    return f"{seconds(row['epoch_time_shortest_s']).removesuffix(' s')} to {seconds(row['epoch_time_longest_s'])}"


def shown_ratio(row: Measurement, column: str) -> str:
    """A speedup; "none shown" where its interval includes 1."""
    return "none shown" if row[f"{column}_verdict"] == NONE_SHOWN else ratio(row[column])


def own_ratio(row: Measurement) -> str:
    """Speedup and efficiency against the own base, and which that is: "3.20, 80.0 % of ddp@2"; empty where the row has
    another base."""
    if not needs_own(row):
        return ""
    ratios = ", ".join(filter(None, (shown_ratio(row, "speedup_vs_own_base"), percent(row["efficiency_vs_own_base"]))))
    return " of ".join(filter(None, (ratios, base(row, own=True))))


def between(row: Measurement, column: str, text: Callable[[float | None], str]) -> str:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    return "" if low is None else f"{text(low)} to {text(high)}"


def base(row: Measurement, own: bool) -> str:
    """The base of a row's ratios, "ddp@2"."""
    start = row.base(own)
    return f"{start.name}@{start.gpus}" if start else ""


def quality(row: Measurement) -> str:
    """Top-1 of images or perplexity per token of text."""
    if row["val_perplexity_token"] is not None:
        return f"ppl {number(row['val_perplexity_token'])}"
    return percent(row["val_top1"])


Columns = dict[str, Callable[[Measurement], str]]
MEASURED: Columns = {
    "framework": lambda row: row["framework"] or "",
    "model": lambda row: row.model or "",
    "loader": lambda row: row["loader"] or "",
    "mode": lambda row: "" if row["mode"] == "train" else row["mode"] or "",
    "gpus": lambda row: str(row["gpus"] or ""),
    "scaling": lambda row: str(row["scaling"]),
    "status": lambda row: str(row["status"]),
    "n": lambda row: str(row["runs_timed"]),
    "!": lambda row: row.marks_number,
    "epoch time": lambda row: seconds(row["epoch_time_s"]),
    "range": spread,
    "samples/s": lambda row: number(row["throughput_samples_per_s"]),
    "peak memory": lambda row: gib(row[memory_column(row["device"])]),
    "top-1/ppl": quality,
    "source": lambda row: row["source"] or "",
}
VS_SINGLE: Columns = {
    "speedup": lambda row: shown_ratio(row, "speedup"),
    "efficiency": lambda row: percent(row["efficiency"]),
    "best single": lambda row: base(row, own=False),
}
VS_OWN: Columns = {
    "speedup vs own base": lambda row: shown_ratio(row, "speedup_vs_own_base"),
    "efficiency vs own base": lambda row: percent(row["efficiency_vs_own_base"]),
    "own base": lambda row: base(row, own=True),
}
WHICH: Columns = {key: MEASURED[key] for key in ("framework", "model", "loader", "gpus", "scaling")}
# The second table of the terminal: ratios to the best single GPU, or to the own base if nothing ran on one GPU.
RATIOS: Columns = {
    **WHICH,
    **VS_SINGLE,
    "speedup interval": lambda row: between(row, "speedup", ratio),
    "efficiency interval": lambda row: between(row, "efficiency", percent),
    "vs own base": own_ratio,
    "its interval": lambda row: between(row, "speedup_vs_own_base", ratio) if needs_own(row) else "",
    "coverage": lambda row: percent(row["speedup_coverage"] or row["speedup_vs_own_base_coverage"]),
}
# The third table of the terminal, with --predict.
PREDICTED: Columns = {
    "predicted memory": lambda row: gib(row["predicted_memory_bytes"]),
    "memory error": lambda row: signed(row["predicted_memory_error"]),
    "predicted step": lambda row: seconds(row["predicted_step_s"]),
    "prediction error": lambda row: signed(row["predicted_error"]) + ("!" if row["predicted_flag"] else ""),
}
# The last table of the terminal, of published measurements: their names are long.
OF_OTHERS: Columns = {
    **{key: MEASURED[key] for key in ("framework", "model", "gpus", "n", "source", "samples/s")},
    "efficiency": lambda row: percent(row["efficiency_vs_own_base"]),
    "of base": lambda row: f"@{row['own_base_gpus']}" if row["efficiency_vs_own_base"] else "",
    **{key: PREDICTED[key] for key in ("predicted step", "prediction error")},
}
SETTINGS: Columns = {"settings": lambda row: row.other_settings}


def overview_cells(rows: Sequence[Measurement], columns: Columns) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; a column that says nothing in any row is left out."""
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    filled = {name: column for name, column in cells.items() if any(column)}
    return list(filled), [list(line) for line in zip(*filled.values(), strict=True)]


def summary_text(rows: Sequence[Measurement]) -> str:
    """The measurements in at most 140 columns, their ratios, which framework is the fastest and how certain that is,
    and what the ratios start from."""
    if not rows:
        return "no attempt has a configuration in its record: the report lists the failures"
    texts = dict.fromkeys(row.other_settings for row in rows if row.other_settings)
    numbers = {text: f"[{number}]" for number, text in enumerate(texts, 1)}
    footnotes: Columns = {"": lambda row: numbers.get(row.other_settings, "")}
    measured, published = ([row for row in rows if row["origin"] == origin] for origin in (OWN, PUBLISHED))
    compared = [row for row in measured if row.has_ratios(own=False) or needs_own(row)]
    predicted = [row for row in measured if row["predicted_step_s"] is not None]
    tables = ((measured, MEASURED), (compared, RATIOS), (predicted, WHICH | PREDICTED), (published, OF_OTHERS))
    lines: list[str] = []
    for shown, columns in tables:
        if shown:
            headers, cells = overview_cells(shown, columns | footnotes)
            short = [[clipped(cell, LONGEST_CELL) for cell in line] for line in cells]
            lines += [*(clipped(line, WIDTH) for line in aligned(headers, short, LEFT)), ""]
    fastest = [
        line for subject, sentences in best(rows)[0] for line in wrap(f"{subject}. {' '.join(sentences)}", WIDTH)
    ]
    below = [f"{number} {text}" for text, number in numbers.items()] + base_lines(rows) + notes(rows)
    failed = [row for row in rows if row["status"] != "ok"]
    failures = list[str]()
    for row in failed:  # "oom: ddp resnet50 on 8 GPUs, batch=256 (try train.micro_batch=4): out of memory"
        batch, settings = str(row["global_batch"] or "unknown"), row.other_settings
        named = settings if row.axes.get("batch") == batch else f"batch={batch} {settings}".strip()
        where = f"{row['framework']} {row.model} on {row.devices}, {clipped(named, LONGEST_SETTINGS)}"
        where += remedy(row["status"], row["mode"], row["micro_batch"])
        failures.append(clipped(": ".join(filter(None, (row["status"], where, row["reason"]))), WIDTH))
    more = "more that did not end ok: see the report"
    return "\n".join([*lines, *fastest, *below, *first_few(failures, FAILURES_SHOWN, more)])


def ratio_columns(rows: Sequence[Measurement]) -> Columns:
    """The columns of the ratios to each kind of base with which some row is compared."""
    kinds = ((False, VS_SINGLE), (True, VS_OWN))
    shown = [columns for own, columns in kinds if any(row.has_ratios(own) for row in rows)]
    return {name: cell for columns in shown for name, cell in columns.items()}


def base_lines(rows: Sequence[Measurement]) -> list[str]:
    """The bases by name and absolute time: a speedup without them says little. Bases of one name may differ in loader,
    batch or cluster."""
    lines, texts = list[str](), panel_texts(rows)
    for row, own in product(rows, (False, True)):
        start = row.base(own)
        if start and row.has_ratios(own):
            epoch = f", epoch {seconds(start.epoch_s)}" if start.epoch_s else ""
            names = [row.model, texts[row["measurement"]], row.axes.get("cluster") if own else None]
            # A published base and one of any scaling may have another batch than its row.
            if (batch := size(row.row)) and row["origin"] == OWN and not row.any_scaling:
                names.append(f"{batch * (start.gpus if row['scaling'] == 'weak' else 1):g} samples an update")
            where = ", ".join(filter(None, names))
            lines.append(f"base {base(row, own)}, {where}: {duration(start.seconds)} a sample{epoch}")
    return list(dict.fromkeys(lines))


def notes(rows: Sequence[Measurement]) -> list[str]:
    """Notes that do not fit into a cell."""
    models = {row.model: row["model_changed"] for row in rows if row.model and row["model_changed"]}
    few = any(0 < row["runs_timed"] < SMALLEST_N for row in rows)
    repeated = any(row["runs_timed"] > 1 for row in rows)
    host = any(row["device"] == "cpu" for row in rows)
    intervals = any(row["speedup_low"] is not None or row["speedup_vs_own_base_low"] is not None for row in rows)
    return [
        *(f"{model}: {text}, not as published" for model, text in sorted(models.items())),
        *marks_explained(rows),
        *unknown_stragglers(rows),
        *(["range: the shortest and the longest epoch time of the n repeats"] if repeated else []),
        *([INTERVAL_NOTE] if intervals else []),
        *(["peak memory on CPU is the fullest rank's process on the host"] if host else []),
        *([f"n < {SMALLEST_N}: no 95 % CI of the median; every repeat is in the figures"] if few else []),
    ]


def remedy(status: str, mode: str | None, size: int | None) -> str:
    """The key to try next where a run was out of memory, " (try train.micro_batch=4)": half the micro batch, which
    divides the same batch. size: of a micro batch"""
    if status != "oom":
        return ""
    if mode == "loader":
        return " (try a smaller loader.prefetch or loader.workers)"
    if not size:  # it ended before its first step
        return " (try a smaller train.micro_batch, or a framework that shards the weights)"
    half = f"train.micro_batch={1 if size % 2 else size // 2}"
    return f" (try {half if size > 1 else 'train.checkpoint_activations=true'})"
