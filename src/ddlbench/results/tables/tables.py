"""From attempts to tidy tables: runs, epochs, scaling. record/columns.toml says what each cell means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import pandas as pd

from ddlbench.errors import UserError
from ddlbench.foreign import read_bytes
from ddlbench.measure.devices.unknown import or_none
from ddlbench.record.schema import DEVELOPER, RUNS, SCALING, TARGETS
from ddlbench.results.reading.attempts import SEVERAL, LeftOut, Note, Records, read, read_published
from ddlbench.results.reading.cells import epochs_table, frame
from ddlbench.results.rows import Row, group_by
from ddlbench.results.tables.checks import above_ideal, differences, drift, environments
from ddlbench.results.tables.measurement import Measurement, compared_with_others
from ddlbench.results.tables.merge import BY_FRAMEWORK, SEED, AttemptRow, Comparison, measurements
from ddlbench.results.tables.quality import TargetCosts, learning_table
from ddlbench.results.tables.run_rows import attempt_row
from ddlbench.results.tables.scaling import breakdown, scaling_rows
from ddlbench.texts import FORMULA, printable, quoted, shortened

VALUES_SHOWN = 20  # of a column, where --only asks for a value that it lacks


@dataclass(frozen=True)
class Tables:
    """The tables of a report, and warnings about records that could not be used completely.

    run_rows:     of runs.csv, with all columns
    scaling_rows: of scaling.csv, as they were made; `measurements` has them compared with each other
    drift:        over the campaign, in words
    left_out:     counts of what is not in the numbers, in words
    """

    run_rows: list[Row]
    scaling_rows: list[Measurement]
    epochs: pd.DataFrame
    learning: pd.DataFrame
    warnings: list[str]
    drift: str | None = None
    left_out: str | None = None

    @cached_property
    def runs(self) -> pd.DataFrame:
        return frame(RUNS, self.run_rows)

    @cached_property
    def scaling(self) -> pd.DataFrame:
        return frame(SCALING, [measurement.row for measurement in self.scaling_rows])

    @cached_property
    def measurements(self) -> list[Measurement]:
        """scaling.csv as figures and texts show it."""
        return compared_with_others(self.scaling_rows, self.run_rows)

    def write(self, folder: Path, targets: Sequence[TargetCosts] = ()) -> None:
        """Write runs.csv, epochs.csv, scaling.csv, learning.csv, breakdown.csv, and targets.csv if there are targets.
        An unknown cell is empty."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("targets", "explain"):
            (folder / f"{name}.csv").unlink(missing_ok=True)  # of an earlier report
        tables = {name: getattr(self, name) for name in ("runs", "epochs", "scaling", "learning")}
        tables["breakdown"] = breakdown(self.scaling)
        if rows := [row for target in targets for row in target.rows]:
            tables["targets"] = frame(TARGETS, rows)
        for name, table in tables.items():
            write_csv(table, folder / f"{name}.csv")


@dataclass(frozen=True)
class Merged:
    """The attempts in order, without copies, and the groups of repeats.

    warnings: one for each folder, file, copy and value that is not in the numbers
    left_out: the counts of these: "left out: 3 unreadable, 1 of a newer schema, 2 copies"; None if there are none
    """

    runs: list[AttemptRow]
    groups: list[list[AttemptRow]]
    warnings: list[str]
    left_out: str | None


def merge(records: Records) -> Merged:
    """All attempts, each with the name of its measurement."""
    published = (attempt for file in records.published for attempt in read_published(file))
    attempts = chain(map(read, records.folders), published)  # one after the other: all records would fill the memory
    runs, copies = _without_copies(list(map(attempt_row, attempts)))
    groups = measurements(run for run in runs if run.options and run.row["backend"] != DEVELOPER)
    for group in groups:
        name, quality = group[0].measurement_id(), group[0].measurement_id(SEED)
        for run in group:
            alike = run.ok and group[0].ok  # then they agree in all that the names are made of
            run.row.update(measurement=name, learning=quality if alike else run.measurement_id(SEED))
    rows = [run.row for run in runs]
    measured = [row for row in rows if row["status"] == "ok" and row["measurement"] is not None]
    notes = [*records.notes, *copies, *(note for run in runs for note in run.notes)]
    kinds = [
        *(note.kind for note in notes if note.kind),
        *(LeftOut.NO_RATE for row in measured if row["throughput_samples_per_s"] is None),
        *(LeftOut.RUNNING for row in rows if row["status"] == "running"),
        *(LeftOut.SHARED_GPU for row in rows if row["backend"] == DEVELOPER),
    ]
    counts = Counter[str](kinds)
    names = {kind: SEVERAL.get(kind, kind) if counts[kind] > 1 else kind for kind in LeftOut}
    texts = ", ".join(f"{counts[kind]} {name}" for kind, name in names.items() if counts[kind])
    return Merged(runs, groups, [note.text for note in notes], f"left out: {texts}" if texts else None)


def _without_copies(runs: Sequence[AttemptRow]) -> tuple[list[AttemptRow], list[Note]]:
    """The attempts that count, and a note for each copy: a backup, or results that were synchronized twice. If a record
    was copied during its run, the later state counts; among equal copies the first one counts."""
    left: set[Path] = set()
    notes: list[Note] = []
    for same in group_by(runs, lambda run: run.identity).values():
        counted = max(same, key=lambda run: (run.has_end, len(run.epochs)))
        for copy in (run.folder for run in same if run is not counted):
            left.add(copy)
            one, two = (
                [or_none(partial(read_bytes, folder / name)) for name in ("run.json", "epochs.jsonl")]
                for folder in (copy, counted.folder)
            )
            but = "" if one == two else ", though their content differs"
            names = " and ".join(printable(str(path)) for path in (copy, counted.folder))
            text = f"{names} hold the same attempt (run_id, attempt, start){but}: only the latter counts"
            notes.append(Note(text, LeftOut.COPY))
    return [run for run in runs if run.folder not in left], notes


def make_tables(records: Records, how: Comparison = BY_FRAMEWORK) -> Tables:
    """All tables of any number of attempts; how: what rows of scaling.csv are compared by. UserError for a setting of
    `across` that no attempt has."""
    merged = merge(records)
    runs = merged.runs
    how.check(runs)
    scaling = scaling_rows(merged.groups, how)
    rows = [run.row for run in runs]
    epochs = epochs_table(rows, [run.epochs for run in runs])
    shared = [row["path"] for row in rows if row["backend"] == DEVELOPER]
    return Tables(
        run_rows=rows,
        scaling_rows=scaling,
        epochs=epochs,
        learning=learning_table(epochs, runs),
        warnings=[
            *merged.warnings,
            *differences(runs),
            *environments(runs, merged.groups),
            *above_ideal(scaling),
            *(f"{row['path']}: {row['ranks_differ']}" for row in rows if row["ranks_differ"]),
            *(f"{path}: ranks shared a GPU: not in the scaling table" for path in shared),
        ],
        drift=drift(merged.groups),
        left_out=merged.left_out,
    )


def only(tables: Tables, filters: Sequence[str]) -> Tables:
    """A part of the tables, `--only framework=ddp,fsdp model=resnet50`. Ratios keep the bases of the complete tables.

    The part has the attempts whose columns have one of the given values, with their epochs and measurements. UserError
    for columns and values that the tables do not have."""
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
    paths, measured, curves = ({run[name] for run in kept} - {None} for name in ("path", "measurement", "learning"))
    others = [run for run in runs if run["path"] not in paths]
    # Where a filter, such as repeat=0, takes a part of the attempts that are merged:
    counts = {
        "measurements": len(measured.intersection(run["measurement"] for run in others)),
        "learning curves": len(curves.intersection(run["learning"] for run in others)),
    }
    warnings = [summary]
    if divided := " and ".join(f"{count} {name}" for name, count in counts.items() if count):
        merged = "the rows and figures of these are of all their attempts"
        warnings.append(f"a part of the attempts of {divided} is not reported: {merged}")
    return replace(
        tables,
        run_rows=kept,
        scaling_rows=[row for row in tables.scaling_rows if row["measurement"] in measured],
        epochs=tables.epochs.loc[tables.epochs["path"].isin(list(paths)).to_numpy(bool)],
        learning=tables.learning.loc[tables.learning["learning"].isin(list(curves)).to_numpy(bool)],
        warnings=[*warnings, *tables.warnings],
    )


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV with a header. A missing cell is empty. A number has the fewest digits from which it can be
    read back. A text that a spreadsheet would run as a formula gets a ' before it."""
    texts = table.select_dtypes("string")
    odd = [name for name in texts if texts[name].str.startswith(FORMULA).any()]
    safe = {str(name): texts[name].map(quoted, na_action="ignore") for name in odd}
    table.assign(**safe).to_csv(path, index=False)


def records(table: pd.DataFrame) -> list[Row]:
    """The rows of a table as plain objects, None for what is missing."""
    columns = [table[name].array.to_numpy(object, na_value=None).tolist() for name in table]
    return [dict(zip(table.columns, cells, strict=True)) for cells in zip(*columns, strict=True)]
