"""`python -m ddlbench.report RESULTS`: any number of runs become tidy tables, figures and one page."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from ddlbench.command import ended, given_path
from ddlbench.errors import UserError, reporting
from ddlbench.figures.figures import Drawing, make_figures, save
from ddlbench.report.compare import SLOWER, UNDECIDED, versus
from ddlbench.report.documents import render, write_documents, write_metrics
from ddlbench.report.explain import explain
from ddlbench.report.overview import summary_text
from ddlbench.report.study import comparison, draw_study
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.rows import OWN
from ddlbench.results.tables.merge import BY_FRAMEWORK, FACTORS, AttemptRow, Comparison
from ddlbench.results.tables.quality import TargetCosts, target, target_costs
from ddlbench.results.tables.tables import Tables, make_tables, merge, only
from ddlbench.sweep.study import load
from ddlbench.texts import first_few, say

WARNINGS_SHOWN = 50


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary and the path of the page. Exit code 2 for errors of the user."""
    given = _parser().parse_args(arguments)
    return ended("ddlbench.report", lambda: (_compare if given.compare else _report)(given))


def _report(given: argparse.Namespace) -> int:
    results: list[Path] = given.results
    if not results or given.fail_if_slower is not None:
        raise UserError("give RESULTS for a report, or --compare BEFORE AFTER (--help shows all options)")
    if len(results) > 1 and not given.out:  # it would replace the first one's report
        raise UserError(f"a report of {len(results)} results folders needs a folder of its own: give --out DIR")
    out = given.out or results[0] / "report"
    targets = [target(text) for text in given.target]
    study, how = None, Comparison(given.by, given.across)
    if given.study is not None:
        if how != BY_FRAMEWORK:
            raise UserError("--study has its own --by and --across: leave them out")
        if given.baseline or targets:
            raise UserError("--study draws the figures of its paper alone: leave --baseline and --target out")
        study = load(given.study)
        how = comparison(study)
    records = read_all(results)

    @cache
    def compared(how: Comparison) -> Tables:
        tables = make_tables(records, how)
        if given.predict is None:
            return tables
        from ddlbench.report.predicted import with_predictions  # torch comes with it

        return with_predictions(tables, records, given.predict)

    explanation = explain(compared(how), records, given.explain) if given.explain is not None else None
    complete = compared(how)
    tables = only(complete, given.only)
    costs = [target_costs(wanted, complete.epochs, complete.run_rows, tables.run_rows) for wanted in targets]
    lines = list[str]()
    for cost in costs:
        of_runs = [row for row in cost.rows if row["measurement"]]  # the others are over several seeds
        reached, count = (sum(row[name] for row in of_runs) for name in ("reached", "runs"))
        if not count:
            lines.append(f"--target {cost.target.text}: no reported run that ended ok has {cost.target.metric}")
        elif reached < count:
            lines.append(f"--target {cost.target.text}: {reached} of {count} runs reach it (targets.csv)")
    tables = replace(tables, warnings=[*lines, *tables.warnings])
    _warn(tables.warnings, "the report (tables/warnings.txt)")  # before figures: why one cannot be drawn
    if study:
        drawing = draw_study(study, lambda how: only(compared(how), given.only))
    else:
        drawing = make_figures(tables, costs, given.baseline == "published")
    page = write_report(tables, out, drawing, costs, given.pdf)
    if explanation:
        explanation.write(out, given.pdf)
    if given.openmetrics is not None:
        write_metrics(given.openmetrics, tables.run_rows)
    say(*summary_text(tables.measurements).split("\n"), *filter(None, (tables.drift, tables.left_out)))
    say(*(drawing.notes if study else ()), *(explanation.lines() if explanation else ()))
    say("", f"report: {page}")
    return 0


def _compare(given: argparse.Namespace) -> int:
    """Print what changed between two sets of results; the exit code of the gate. UserError for options of a report,
    which would have no effect."""
    options = {"RESULTS": given.results, "--by": given.by != BY_FRAMEWORK.by}
    others = ("across", "study", "out", "only", "baseline", "pdf", "target", "predict", "explain", "openmetrics")
    options |= {f"--{name}": getattr(given, name) for name in others}
    useless = [name for name, value in options.items() if value]
    if useless:
        raise UserError(f"--compare makes no report: leave {', '.join(useless)} out")
    sides = list[list[list[AttemptRow]]]()
    for name, folder in zip(("before", "after"), given.compare, strict=True):  # what is not in the numbers is printed
        merged = merge(read_all([folder]))
        _warn(merged.warnings, "a report of this set")
        if merged.left_out:
            say(f"{name}: {merged.left_out}", stream=sys.stderr)
        compared = [group for group in merged.groups if group[0].row["origin"] == OWN]
        if published := len(merged.groups) - len(compared):
            say(f"{name}: {published} published measurements are not compared", stream=sys.stderr)
        sides.append(compared)
    comparison = versus(sides[0], sides[1], given.fail_if_slower)
    say(*comparison.lines)
    return SLOWER if comparison.slower else UNDECIDED if comparison.undecided else 0


def _warn(warnings: Sequence[str], others: str) -> None:
    """Print the first warnings. others: the place of the remaining ones"""
    shown = first_few(warnings, WARNINGS_SHOWN, f"more warnings are in {others}")
    say(*(f"warning: {warning}" for warning in shown), stream=sys.stderr)


def share(text: str) -> float:
    """ "5%" or "0.05" -> 0.05. ValueError for "5", which would be 500 %, and for what is no share."""
    percent = text.endswith("%")
    value = float(text.removesuffix("%")) / (100 if percent else 1)
    if not 0 <= value < (math.inf if percent else 1):
        raise ValueError(text)
    return value


def names(text: str) -> tuple[str, ...]:
    """ "framework,loader" -> ("framework", "loader")."""
    return tuple(dict.fromkeys(text.split(",")))


def write_report(
    tables: Tables, out: Path, drawing: Drawing, targets: Sequence[TargetCosts] = (), pdf: bool = False
) -> Path:
    """Tables (CSV, Markdown, LaTeX), figures (PNG, SVG) and report.html below `out`; returns the page's path. pdf: as
    `save` takes it"""
    figures, page = out / "figures", out / "report.html"
    with reporting(f"{out} cannot be written", "choose another folder with --out"):
        earlier = page.read_text("utf-8", "replace") if page.is_file() else ""
        for name in ("explain", *re.findall(r'href="figures/([^"/]+)\.png"', earlier)):  # of an earlier report
            for kind in ("png", "svg", "pdf"):
                (figures / f"{name}.{kind}").unlink(missing_ok=True)
        for name, figure in drawing.figures.items():
            save(figures, name, figure, pdf)
        tables.write(out / "tables", targets)
        write_documents(tables.measurements, tables.warnings, out / "tables")
        page.write_text(render(tables, drawing, figures), encoding="utf-8")
    return page


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddlbench.report", description=__doc__)
    add = parser.add_argument
    # fmt: off
    add("results", nargs="*", type=given_path, metavar="RESULTS", help="results_dir of runs")
    add("--out", type=given_path, metavar="DIR",
        help="folder of the report (default: RESULTS/report; several RESULTS need it)")
    add("--by", type=names, default=BY_FRAMEWORK.by, metavar="FACTOR[,FACTOR]",
        help=f"what the curves of a figure differ in, of {', '.join(FACTORS)} (default: framework)")
    add("--across", type=names, default=(), metavar="SETTING[,SETTING]",
        help="settings in which rows that share a table and a base may differ, too: recipe, precision, data, scaling, "
        "or keys of the configuration. What differs is named, and no verdict is given between such rows")
    add("--study", metavar="NAME",
        help="draw the figures of its paper that this study lists, and say which cells each one lacks; NAME as in "
        "python -m ddlbench.sweep, or the path of a YAML file")
    add("--only", nargs="+", default=[], metavar="COLUMN=VALUE[,VALUE]",
        help="report the attempts with these values in columns of runs.csv: --only framework=ddp,fsdp model=resnet50")
    add("--baseline", choices=["published"], help="draw the printed numbers of papers beside one's own")
    add("--pdf", action="store_true", help="write the figures as PDF, too, beside PNG and SVG")
    add("--target", nargs="+", default=[], metavar="METRIC=NUMBER",
        help="epochs, updates, samples and seconds until a metric reaches a value: --target val_top1=0.7")
    add("--predict", metavar="CLUSTER",
        help="put beside each measurement what the oracle predicts from the runs on one device, and beside a published "
        "one what it predicts from its base; CLUSTER as in python -m ddlbench.predict cluster=CLUSTER, or `published` "
        "for published ones alone")
    add("--explain", metavar="RUN",
        help="why is it slow: a waterfall from the ideal to the measured step of the run with this run_id or path")
    add("--openmetrics", type=given_path, metavar="FILE",
        help="also write the numbers of the last run as OpenMetrics text, for node_exporter's textfile collector")
    add("--compare", nargs=2, type=given_path, metavar=("BEFORE", "AFTER"),
        help="instead of a report: what changed between two sets of results, in configuration, environment and time")
    add("--fail-if-slower", type=share, metavar="5%",
        help=f"with --compare: exit code {SLOWER} where a measurement is shown to be slower by more than this (5%% or "
        f"0.05) or no longer ends ok, {UNDECIDED} where n is too small to decide or a measurement is missing after")
    # fmt: on
    return parser


if __name__ == "__main__":
    sys.exit(main())
