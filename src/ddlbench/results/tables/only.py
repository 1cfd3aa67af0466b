"""`--only framework=ddp,fsdp model=resnet50`: a part of the tables. Ratios keep the bases that they have in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from ddlbench.errors import UserError
from ddlbench.record.schema import RUNS
from ddlbench.results.rows import Row
from ddlbench.results.tables.tables import Tables
from ddlbench.texts import printable, shortened

VALUES_SHOWN = 20


def only(tables: Tables, filters: Sequence[str]) -> Tables:
    """The attempts whose columns have one of the given values, with their epochs and measurements. UserError for
    columns and values that the tables do not have."""
    if not filters:
        return tables
    runs = kept = tables.run_rows
    for text in filters:
        column, _, values = text.partition("=")
        if column not in {existing.name for existing in RUNS} or not values:
            raise UserError(
                f"--only {printable(text)}: write COLUMN=VALUE[,VALUE] with a column of runs.csv, such as "
                "framework, model, loader, gpus, recipe or precision"
            )
        wanted, existing = values.split(","), sorted({str(run[column]) for run in runs} - {"None"})
        unknown = [value for value in wanted if value not in existing]
        if unknown:
            shown = ", ".join(shortened(value, 40) for value in existing[:VALUES_SHOWN]) or "no value"
            raise UserError(
                f"--only {column}={printable(','.join(unknown))}: no attempt has it; the results have {shown}"
            )
        kept = [run for run in kept if str(run[column]) in wanted]
    summary = f"only {' '.join(map(printable, filters))}: {len(kept)} of {len(runs)} attempts are reported"
    if not kept:
        raise UserError(f"{summary}: no attempt has all of these values; leave one filter out")
    measured = _values(kept, "measurement")
    return replace(
        tables,
        run_rows=kept,
        scaling_rows=[row for row in tables.scaling_rows if row["measurement"] in measured],
        epochs=_with(tables.epochs, "path", kept),
        learning=_with(tables.learning, "learning", kept),
        warnings=[summary, *_merged_with_others(runs, kept), *tables.warnings],
    )


def _merged_with_others(runs: Sequence[Row], kept: Sequence[Row]) -> list[str]:
    """A warning where a filter, such as repeat=0, takes a part of the attempts that are merged."""
    paths = {run["path"] for run in kept}
    others = [run for run in runs if run["path"] not in paths]
    both = {"measurements": "measurement", "learning curves": "learning"}
    counts = {name: len(_values(kept, column) & _values(others, column)) for name, column in both.items()}
    texts = [f"{count} {name}" for name, count in counts.items() if count]
    merged = "the rows and figures of these are of all their attempts"
    return [f"a part of the attempts of {' and '.join(texts)} is not reported: {merged}"] if texts else []


def _values(rows: Sequence[Row], column: str) -> set[str]:
    return {row[column] for row in rows if row[column] is not None}


def _with(table: pd.DataFrame, column: str, kept: Sequence[Row]) -> pd.DataFrame:
    """The rows of the table that belong to the runs."""
    return table.loc[table[column].isin(list(_values(kept, column))).to_numpy(bool)]
