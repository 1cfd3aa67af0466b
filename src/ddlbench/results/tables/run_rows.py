"""From an attempt to its row of runs.csv and its epochs, without the values that cannot be used.

The columns of a run's summary are used only if they follow from its epochs.jsonl, by the formulas of
measure/formulas/summary_formulas.py. A summary that differs, or whose epochs are not all there, was changed or damaged.
epochs.jsonl cannot confirm step_time_*, own_step_*, straggler_rank, straggler_host and memory_*_by_stage_bytes, which
come from steps and ranks; startup_s; load_*, cpu_pressure_*, cpu_steal_share, cpu_others_share and marks; and mfu,
because a record lacks the device's peak: only hfu is compared with it. Clocks, throttle_reasons and energy_source
describe the device and are not compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any, cast

from pyarrow.parquet import read_metadata

from ddlbench.config import choices
from ddlbench.config.keys import BATCH_PER_GPU
from ddlbench.foreign import open_regular, section
from ddlbench.measure.formulas.summary_formulas import ALL, LAST, MEASURED, OF_RUN, from_epochs
from ddlbench.measure.marks import NOTHING_SENT
from ddlbench.record.fingerprint import fingerprint, noted
from ddlbench.record.schema import RUNS
from ddlbench.results.reading.attempts import Attempt, LeftOut, Note, reason_of, unreadable
from ddlbench.results.reading.cells import cell, epochs_of, fit
from ddlbench.results.rows import OWN, PUBLISHED, Row, Settings
from ddlbench.results.tables.labels import settings_text, value_text
from ddlbench.results.tables.merge import AttemptRow, RankPasses, measured_options
from ddlbench.texts import digest, first_few, printable, shortened

VALUES_SHOWN = 3  # of those that are left out, in one warning
PARQUET = ("steps.parquet", "ranks.parquet")
PARQUET_REASON = 200  # letters
_NO_SUMMARY = {column.name: None for column in RUNS if column.source.startswith("summary.")}
_GLOBAL_BATCH = next(column for column in RUNS if column.name == "global_batch")


def attempt_row(attempt: Attempt) -> AttemptRow:
    """The row and the epochs of an attempt. If the values of its record cannot be used, the attempt is unreadable."""
    identity = attempt.identity
    try:
        return _usable(attempt, identity)
    except Exception as error:  # whatever one record holds, the others are reported
        name = "the line" if attempt.record.get("origin") == PUBLISHED else "run.json"
        return _usable(unreadable(attempt.path, f"the values of {name} cannot be used ({reason_of(error)})"), identity)


def _usable(attempt: Attempt, identity: Hashable) -> AttemptRow:
    left_out: list[str] = []
    record = attempt.record
    added_later = section(record, "config_added_later")
    measured = measured_options(section(record, "config"), added_later)
    environment = section(record, "environment")
    row = run_row(attempt, left_out)
    if measured and row["origin"] == PUBLISHED:
        measured["origin"] = PUBLISHED  # neither a repeat nor a base of an own run, whatever its configuration
    if row["reference"]:
        measured["reference"] = row["reference"]  # not compared with results
    lines, unread = attempt.read_epochs()
    epochs = epochs_of(lines, left_out)
    notes = [*attempt.notes, *unread]
    if not measured and record["status"] != "unreadable":
        text = f"{attempt.name}: run.json has no configuration: the attempt is in no measurement"
        notes.append(Note(text, LeftOut.NO_CONFIGURATION))
    if row["status"] == "ok" and row["origin"] != PUBLISHED and (wrong := contradiction(row, epochs)):
        notes.append(Note(f"{attempt.name}: the summary is left out: {wrong}"))
        row |= _NO_SUMMARY
    if left_out:
        values = ", ".join(first_few(left_out, VALUES_SHOWN))
        notes.append(Note(f"{attempt.name}: left out of the tables: {values}"))
    return AttemptRow(
        row,
        options=measured,
        environment=fingerprint(environment),
        noted=noted(environment),
        added_later=added_later,
        sizes=_changed_sizes(record),
        epochs=epochs,
        folder=attempt.path,
        identity=identity,
        has_end=attempt.has_end,
        notes=[*notes, *map(Note, damaged_parquet(attempt.path))],
        passes=_passes(record),
    )


def damaged_parquet(attempt: Path) -> list[str]:
    """A warning for each incomplete Parquet file of an attempt, for people who open it later: no table is made of these
    files here. Only the footers are read. A run that has not ended, or was killed, has a folder with a file for each
    epoch."""
    warnings: list[str] = []
    for path in (attempt / name for name in PARQUET):
        folder = os.path.isdir(path)  # noqa: PTH112  # False where it may not be looked at, unlike Path.is_dir
        for file in sorted(path.glob("epoch-*.parquet")) if folder else [path] if os.path.lexists(path) else []:
            try:
                with open_regular(file) as opened:
                    read_metadata(opened)
            except NotADirectoryError:  # the run has just ended, and the folder is a file
                break
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or shortened(printable(str(error).strip()), PARQUET_REASON)
                warnings.append(f"{printable(str(file))} cannot be read ({reason})")
    return warnings


def _passes(record: Row) -> dict[int, RankPasses]:
    """The valid passes of each rank of a pipeline in its profiled window."""
    ranks = dict[int, RankPasses]()
    for rank in _list(_dig(record, "profile.ranks")):
        passes = [values for item in _list(_dig(rank, "passes")) if len(values := _list(item)) == 3]
        valid = [(cell(part, "text"), cell(begin, "float"), cell(end, "float")) for part, begin, end in passes]
        complete = [(part, begin, end) for part, begin, end in valid if part and begin is not None and end]
        number = cell(_dig(rank, "stage"), "int")
        if complete and number is not None:
            ranks[number] = complete
    return ranks


def run_row(attempt: Attempt, left_out: list[str]) -> Row:
    """One row of runs.csv. `measurement` and `learning`, which depend on other runs, are still None. `left_out` gets a
    note for each value that does not fit its column."""
    row: Row = {}
    for column in RUNS:
        if column.source:  # the first source with a value counts
            values = (fit(_dig(attempt.record, keys), column, left_out) for keys in column.source.split("|"))
            row[column.name] = next((value for value in values if value is not None), None)
    if not row["global_batch"] and row["gpus"]:  # it failed before it wrote its ledger: take what is configured
        configured = section(section(attempt.record, "config"), "train").get("batch_per_gpu", 0)
        batch = BATCH_PER_GPU if configured is None else cell(configured, "int")
        row["global_batch"] = fit(batch * row["gpus"], _GLOBAL_BATCH, left_out) if batch else None
    row["batch_per_gpu"] = row["global_batch"] / row["gpus"] if row["global_batch"] and row["gpus"] else None
    if _dig(attempt.record, "config.framework.comm_hook") == "noop":  # also of a run that failed in its setup
        row["reference"] = NOTHING_SENT
    if not row["micro_batch"] and row["replica_batch"] and row["micro_batches"]:
        row["micro_batch"] = cell(row["replica_batch"] / row["micro_batches"], "int")
    row["model_changed"] = settings_text(_changed_sizes(attempt.record)) or None
    model = {"cuda": "gpu_model", "cpu": "cpu_model"}.get(row["device"] or "")
    row["device_model"] = cell(_dig(attempt.record, f"environment.{model}"), "text") if model else None
    environment = fingerprint(section(attempt.record, "environment"))
    row["environment_id"] = digest(environment) if environment else None
    row["origin"] = PUBLISHED if attempt.record.get("origin") == PUBLISHED else OWN
    for key in ("staleness", "staleness_theoretical"):  # one number, or one for each stage
        recorded = _dig(attempt.record, f"framework.{key}")
        numbers = [cell(value, "int") for value in _list(recorded) or [recorded]]
        row[f"{key}_max"] = max((number for number in numbers if number is not None and number >= 0), default=None)
    return row | {"measurement": None, "learning": None, "path": attempt.name}


def _changed_sizes(record: Row) -> Settings:
    """The sizes of the model that differ from the published ones, in the order of their names."""
    changed = _dig(record, "model.changed")
    if not isinstance(changed, dict):  # a record of an older version
        changed = choices.changed("model", section(section(record, "config"), "model"))
    return {key: value_text(value) for key, value in sorted(cast(Row, changed).items()) if value is not None}


def _dig(record: Any, keys: str) -> Any:
    """The value at keys such as "a.b"; None where there is none."""
    try:
        for key in keys.split("."):
            record = record.get(key)
    except AttributeError:  # not a JSON object
        return None
    return record


def _list(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return cast(list[Any], value) if isinstance(value, list) else []


ROUNDING = 1e-6
TAKEN = {name for _, names in (MEASURED | ALL | LAST).values() for name in names}
READ = sorted({"measured_in_attempt", "warmup", *TAKEN} - {*OF_RUN})


def contradiction(row: Row, epochs: Any) -> str | None:
    """The first value of a run's summary that does not follow from its epochs, with both values; None if all follow.
    A value whose columns are empty is not checked, because older records lack columns.

    row: of runs.csv; epochs: as `epochs_of` makes them, with those of the attempts that this one continued
    """
    if row["epochs_done"] not in (None, len(epochs)):
        return f"epochs_done = {row['epochs_done']}, epochs.jsonl has {len(epochs)}"
    lines = [line for line in epochs.select(READ).to_pylist() if line["measured_in_attempt"] is None]
    for column, value in from_epochs(row, lines).items():
        if row[column] is not None and (value is None or not math.isclose(row[column], value, rel_tol=ROUNDING)):
            others = "mfu gives" if column == "hfu" else "epochs give"
            return f"{column} = {row[column]:.6g}, its {others} {'nothing' if value is None else f'{value:.6g}'}"
    return None
