"""The summary in Markdown and LaTeX for documents; the last record as OpenMetrics text, for the textfile collector of
Prometheus' node_exporter (https://prometheus.io/docs/specs/om/open_metrics_spec/)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddlbench.errors import UserError, importing, reporting
from ddlbench.files import replacing
from ddlbench.record.schema import RUNS
from ddlbench.report.overview import LEFT, MEASURED, SETTINGS, notes, overview_cells, ratio_columns
from ddlbench.results.rows import OWN, Row, latest
from ddlbench.results.tables.measurement import Measurement

LABELS = ("run_id", "attempt", "status", "framework", "model", "gpus", "precision", "device_model")  # of metrics
_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "µ": r"\textmu{}",
})  # fmt: skip
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\`*_{}[]<>#|$~!&="})


def write_documents(rows: Sequence[Measurement], warnings: Sequence[str], folder: Path) -> None:
    """summary.md and summary.tex; warnings.txt, where there are any: the page and the terminal show the first ones."""
    headers, lines = overview_cells(rows, MEASURED | ratio_columns(rows) | SETTINGS)
    (folder / "summary.md").write_text(markdown(headers, lines, notes(rows)), encoding="utf-8")
    (folder / "summary.tex").write_text(latex(headers, lines, notes(rows)), encoding="utf-8")
    (folder / "warnings.txt").unlink(missing_ok=True)  # of an earlier report
    if warnings:
        (folder / "warnings.txt").write_text("".join(f"{warning}\n" for warning in warnings), encoding="utf-8")


def markdown(headers: Sequence[str], lines: Sequence[Sequence[str]], below: Sequence[str]) -> str:
    """A table of GitHub's Markdown; numbers are aligned to the right."""
    rule = ["---" if header in LEFT else "---:" for header in headers]
    first, *others = ([cell.translate(_MARKDOWN) for cell in line] for line in (headers, *lines))
    table = [f"| {' | '.join(cells)} |" for cells in (first, rule, *others)]
    return "\n".join([*table, "", *(f"- {note.translate(_MARKDOWN)}" for note in below)]) + "\n"


def latex(headers: Sequence[str], lines: Sequence[Sequence[str]], below: Sequence[str]) -> str:
    r"""A tabular with the rules of the package booktabs, to \input into a document."""
    columns = "".join("l" if header in LEFT else "r" for header in headers)
    rows = [" & ".join(map(_latex, line)) + r" \\" for line in lines]
    lines_below = [f"% {_latex(note)}" for note in below]
    head = [r"% needs \usepackage{booktabs,textcomp} and an input encoding of UTF-8", *lines_below]
    begin = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(map(_latex, headers)) + r" \\", r"\midrule"]
    return "\n".join([*head, *begin, *rows, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex(text: str) -> str:
    r"""A cell. LaTeX takes a [ or * at the start of a row for an argument of the \\ or \midrule before it."""
    start = "{}" if text.startswith(("[", "*")) else ""
    return start + text.translate(_LATEX)


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
