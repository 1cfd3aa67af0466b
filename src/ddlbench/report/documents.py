"""What a report writes beside its tables and figures: the page, report.html, which needs no other file and no network;
the summary in Markdown and LaTeX; the last record as OpenMetrics text, for the textfile collector of Prometheus'
node_exporter (https://prometheus.io/docs/specs/om/open_metrics_spec/)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from ddlbench.errors import UserError, importing, reporting
from ddlbench.figures.figures import Drawing, pictures
from ddlbench.files import replacing
from ddlbench.record.schema import CLOCKS, EPOCHS, RANKS, RUNS, SCALING, Column
from ddlbench.report import overview
from ddlbench.report.fastest import best, comparisons
from ddlbench.results.rows import OWN, Row, latest
from ddlbench.results.tables.measurement import Measurement, model_names
from ddlbench.results.tables.tables import Tables, records
from ddlbench.texts import first_few, limited, shortened

# Rows of each table on the page; the files beside the page have all rows.
ROWS_SHOWN = 300
LINES_SHOWN = 100  # of warnings, comparisons and notes
LONGEST_CELL = 300
LONGEST_REASON = 4 * LONGEST_CELL  # of a failure; also of a warning or a note
MADE_WITH = ("device_model", "nodes", "torch", "cuda", "cudnn", "nccl", "driver", "python", "git_commit", "git_dirty")
DATASET = ("data", "dataset_hash", "dataset_train_samples", "dataset_val_samples")
NUMBERS = ("nodes", "dataset_train_samples", "dataset_val_samples", "attempts")  # of these columns
EXPLAINED = (
    "epoch_time_s", "throughput_samples_per_s", "tokens_per_s", "validation_time_s", "startup_s", "first_step_s",
    "data_wait_share", "straggler_wait_s", "val_top1", "val_perplexity_token", "memory_allocated_peak_bytes",
    "memory_host_peak_bytes", "mfu",
)  # fmt: skip
# The first lines, shortened, and how many there are more.
first_lines = partial(first_few, limit=LINES_SHOWN, text=partial(shortened, longest=LONGEST_REASON))
LABELS = ("run_id", "attempt", "status", "framework", "model", "gpus", "precision", "device_model")  # of metrics
_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "µ": r"\textmu{}",
})  # fmt: skip
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\`*_{}[]<>#|$~!&="})


def render(tables: Tables, drawing: Drawing, folder: Path) -> str:
    """The page with the figures, which are files in `folder`."""
    runs, scaling = tables.run_rows, tables.measurements
    shown = overview.MEASURED | overview.ratio_columns(scaling) | overview.PREDICTED | overview.SETTINGS
    headers, lines = overview.overview_cells(scaling[:ROWS_SHOWN], shown)
    paragraphs, more = best(scaling)
    names = model_names(runs)
    failed = [run for run in runs if run["status"] != "ok"]
    failures = list[Row]()
    for run in failed[:ROWS_SHOWN]:
        remedy = overview.remedy(run["status"], run["mode"], run["micro_batch"])
        model = names.get((run["model"], run["model_changed"]), run["model"])
        failures.append(run | {"model": model, "reason": shortened(run["reason"] or "", LONGEST_REASON) + remedy})
    loader = jinja2.PackageLoader("ddlbench.report", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html.j2").render(
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        attempts=len(runs),
        ok=len(runs) - len(failed),
        headers=headers,
        left=overview.LEFT,
        paragraphs=paragraphs,
        more_paragraphs=more,
        lines=[(row["status"], cells) for row, cells in zip(scaling, lines, strict=False)],
        measurements=len(scaling),
        notes=first_lines(
            [*overview.base_lines(scaling), *overview.notes(scaling), *([tables.drift] if tables.drift else [])]
        ),
        left_out=tables.left_out,
        cautions=first_lines([*tables.warnings, *cautions(runs, scaling)]),
        more_warnings=len(tables.warnings) > LINES_SHOWN,
        pictures=pictures(drawing.figures, folder),
        plots=drawing.plots,
        folded=first_lines(drawing.notes),
        comparisons=first_lines(comparisons(scaling)),
        failures=failures,
        failed=len(failed),
        explained=[column for column in RUNS if column.name in EXPLAINED],
        over_ranks=RANKS,
        clocks=CLOCKS,
        versions=counted(runs, MADE_WITH),
        datasets=counted(runs, DATASET),
        tables={
            "Scaling": grid(SCALING, [row.row for row in scaling]),
            "Runs": grid(RUNS, runs),
            "Epochs": grid(EPOCHS, records(tables.epochs.head(ROWS_SHOWN)), len(tables.epochs)),
        },
    )


def cautions(runs: Sequence[Row], scaling: Sequence[Measurement]) -> list[str]:
    """Warnings about the trustworthiness of the numbers."""
    dirty = sum(bool(run["git_dirty"]) for run in runs)
    warnings = [f"{dirty} attempt(s) ran with uncommitted changes of ddlbench's code"] if dirty else []
    for row in scaling:
        name = f"{row['framework']}, {row.model}, {row.devices}"
        if row["allocator_retries"]:
            warnings.append(f"{name}: {row['allocator_retries']} allocator retries made the timing unreliable")
    return list(dict.fromkeys(warnings))


def counted(runs: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """The first distinct combinations of some columns as a table, each with its number of attempts, and the number of
    further combinations."""
    counts = Counter(tuple(run[name] for name in names) for run in runs)
    counts.pop((None,) * len(names), None)
    shown, more = limited(list(counts.items()), ROWS_SHOWN)
    lines = [[*map(cell_text, names, values), str(count)] for values, count in shown]
    return {"columns": [(name, "", name in NUMBERS) for name in (*names, "attempts")], "lines": lines, "more": more}


def grid(columns: Sequence[Column], rows: Sequence[Row], total: int | None = None) -> dict[str, Any]:
    """The first rows of a table: its columns (name, meaning, whether they are numbers) and its cells as text. total:
    the number of rows, if `rows` has not all of them."""
    shown = [column for column in columns if any(row[column.name] is not None for row in rows[:ROWS_SHOWN])]
    lines = [[cell_text(column.name, row[column.name]) for column in shown] for row in rows[:ROWS_SHOWN]]
    heads = [
        (column.name, column.meaning + f" ({column.unit})" * bool(column.unit), column.kind in ("int", "float"))
        for column in shown
    ]
    empty = [column.name for column in columns if column not in shown]
    return {"columns": heads, "lines": lines, "total": total or len(rows), "empty": empty}


def cell_text(name: str, value: Any) -> str:
    """A cell for reading: six digits of a number, twelve of a hash; the CSV file has all."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if name.endswith(("_hash", "git_commit", "hash_start")):
        return str(value)[:12]
    return shortened(str(value), LONGEST_CELL)


def write_documents(rows: Sequence[Measurement], warnings: Sequence[str], folder: Path) -> None:
    """summary.md and summary.tex; warnings.txt, where there are any: the page and the terminal show the first ones."""
    headers, lines = overview.overview_cells(rows, overview.MEASURED | overview.ratio_columns(rows) | overview.SETTINGS)
    (folder / "summary.md").write_text(markdown(headers, lines, overview.notes(rows)), encoding="utf-8")
    (folder / "summary.tex").write_text(latex(headers, lines, overview.notes(rows)), encoding="utf-8")
    (folder / "warnings.txt").unlink(missing_ok=True)  # of an earlier report
    if warnings:
        (folder / "warnings.txt").write_text("".join(f"{warning}\n" for warning in warnings), encoding="utf-8")


def markdown(headers: Sequence[str], lines: Sequence[Sequence[str]], below: Sequence[str]) -> str:
    """A table of GitHub's Markdown; numbers are aligned to the right."""
    rule = ["---" if header in overview.LEFT else "---:" for header in headers]
    first, *others = ([cell.translate(_MARKDOWN) for cell in line] for line in (headers, *lines))
    table = [f"| {' | '.join(cells)} |" for cells in (first, rule, *others)]
    return "\n".join([*table, "", *(f"- {note.translate(_MARKDOWN)}" for note in below)]) + "\n"


def latex(headers: Sequence[str], lines: Sequence[Sequence[str]], below: Sequence[str]) -> str:
    r"""A tabular with the rules of the package booktabs, to \input into a document."""
    columns = "".join("l" if header in overview.LEFT else "r" for header in headers)
    # LaTeX takes a [ or * at the start of a row for an argument of the \\ or \midrule before it.
    table = [
        ["{}" * cell.startswith(("[", "*")) + cell.translate(_LATEX) for cell in line] for line in (headers, *lines)
    ]
    first, *rows = (" & ".join(line) + r" \\" for line in table)
    head = [
        r"% needs \usepackage{booktabs,textcomp} and an input encoding of UTF-8",
        *(f"% {note.translate(_LATEX)}" for note in below),
    ]
    begin = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", first, r"\midrule"]
    return "\n".join([*head, *begin, *rows, r"\bottomrule", r"\end{tabular}"]) + "\n"


def write_metrics(file: Path, rows: Sequence[Row]) -> None:
    """The own attempt that started last, among rows of runs.csv. UserError if there is none or the file cannot be
    written; Unavailable without prometheus-client."""
    started = [row for row in rows if row["origin"] == OWN and row["start"]]
    if not started:
        raise UserError(f"--openmetrics: none of {len(rows)} records is an own run that says when it started")
    content = metrics(latest(started))
    with reporting(f"{file} cannot be written", "choose another --openmetrics FILE"), replacing(file) as stream:
        stream.write(content)  # at once: the collector may read at any time


def metrics(row: Row) -> bytes:
    """A gauge for each number that a row of runs.csv has, and the names of the run as `ddlbench_run_info`. That is a
    gauge, too: node_exporter refuses a file with the type info."""
    with importing("prometheus-client, which --openmetrics needs,", "pip install 'ddlbench[tools]'"):
        from prometheus_client import CollectorRegistry, Gauge
        from prometheus_client.openmetrics.exposition import generate_latest
    registry = CollectorRegistry()
    names = ["" if row[name] is None else str(row[name]) for name in LABELS]
    Gauge("ddlbench_run_info", "The last run.", LABELS, registry=registry).labels(*names).set(1)
    for column in RUNS:
        if column.kind in ("int", "float") and row.get(column.name) is not None:
            # A metric has a unit only if its name ends with it, as OpenMetrics demands.
            unit = column.unit if column.name.endswith(f"_{column.unit}") else ""
            Gauge(f"ddlbench_{column.name}", column.meaning, unit=unit, registry=registry).set(row[column.name])
    return generate_latest(registry)
