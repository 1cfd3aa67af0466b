"""The summary as tables for documents, Markdown and LaTeX, and all warnings as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddlbench.report.overview import LEFT, MEASURED, SETTINGS, notes, overview_cells, ratio_columns
from ddlbench.results.tables.measurement import Measurement

_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "µ": r"\textmu{}",
})  # fmt: skip
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\`*_{}[]<>#|$~!&="})


def write_documents(rows: Sequence[Measurement], folder: Path) -> None:
    """summary.md and summary.tex."""
    headers, lines = overview_cells(rows, MEASURED | ratio_columns(rows) | SETTINGS)
    (folder / "summary.md").write_text(markdown(headers, lines, notes(rows)), encoding="utf-8")
    (folder / "summary.tex").write_text(latex(headers, lines, notes(rows)), encoding="utf-8")


def write_warnings(warnings: Sequence[str], folder: Path) -> None:
    """warnings.txt, where there are warnings: the page and the terminal show the first ones."""
    path = folder / "warnings.txt"
    if warnings:
        path.write_text("".join(f"{warning}\n" for warning in warnings), encoding="utf-8")
    else:
        path.unlink(missing_ok=True)  # of an earlier report


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
