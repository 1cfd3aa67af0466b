"""`--only framework=ddp,fsdp model=resnet50`: a part of the tables. Ratios keep the bases that they have in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from ddlbench.errors import UserError
from ddlbench.record.schema import RUNS
from ddlbench.report.merge import Row
from ddlbench.report.tables import Tables
from ddlbench.texts import printable, shortened

VALUES_SHOWN = 20


def only(tables: Tables, filters: Sequence[str]) -> Tables:
    """The attempts whose columns have one of the given values, with their epochs and measurements. UserError for
    columns and values that the tables do not have."""
    if not filters:
        return tables
    runs = kept = tables.run_rows
    for text in filters:
        column, wanted = _parsed(text)
        _check(column, wanted, sorted({str(run[column]) for run in runs} - {"None"}))
        kept = [run for run in kept if str(run[column]) in wanted]
    summary = f"only {' '.join(map(printable, filters))}: {len(kept)} of {len(tables.runs)} attempts are reported"
    if not kept:
        raise UserError(f"{summary}: no attempt has all of these values; leave one filter out")
    return replace(
        tables,
        runs=_with(tables.runs, "path", kept),
        epochs=_with(tables.epochs, "path", kept),
        scaling=_with(tables.scaling, "measurement", kept),
        learning=_with(tables.learning, "learning", kept),
        warnings=[summary, *tables.warnings],
    )


def _with(table: pd.DataFrame, column: str, kept: Sequence[Row]) -> pd.DataFrame:
    """The rows of the table that belong to the runs."""
    wanted = {run[column] for run in kept if run[column] is not None}
    return table.loc[table[column].isin(list(wanted)).to_numpy(bool)]


def _parsed(text: str) -> tuple[str, list[str]]:
    column, _, values = text.partition("=")
    names = [known.name for known in RUNS]
    if column not in names or not values:
        raise UserError(
            f"--only {printable(text)}: write COLUMN=VALUE[,VALUE] with a column of runs.csv, such as "
            "framework, model, loader, gpus, recipe or precision"
        )
    return column, values.split(",")


def _check(column: str, wanted: Sequence[str], known: Sequence[str]) -> None:
    unknown = [value for value in wanted if value not in known]
    if unknown:
        values = ", ".join(shortened(value, 40) for value in known[:VALUES_SHOWN]) or "no value"
        raise UserError(f"--only {column}={printable(','.join(unknown))}: no attempt has it; the results have {values}")
