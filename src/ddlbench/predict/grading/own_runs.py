"""--grade RESULTS: own runs as measurements. Of each curve with at least three numbers of devices the largest one is
predicted, from the run on the fewest devices alone and from all smaller numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddlbench.config.compose import recorded_configuration
from ddlbench.errors import RunError, Unsupported
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.predictor import Inputs, Prediction, predict
from ddlbench.oracle.runs import Results
from ddlbench.results.reading.attempts import Records, read_all
from ddlbench.results.rows import OWN, group_by
from ddlbench.results.tables.measurement import Measurement
from ddlbench.results.tables.tables import make_tables


class Largest(NamedTuple):
    """The measurement with the most devices of a curve, and its predictions. counts: the smaller numbers of devices"""

    row: Measurement
    counts: tuple[int, ...]
    from_base: Prediction
    learned: Prediction


def largest_runs(folder: Path, machine: Machine) -> Iterator[Largest | str]:
    """The largest measurement of each curve, or why it has no prediction. UserError for a folder without records."""
    records = read_all([folder])
    rows = [row for row in make_tables(records).measurements if row["origin"] == OWN and row["mode"] == "train"]
    timed = [row for row in rows if row["status"] == "ok" and row["sample_time_s"] and row["gpus"]]
    for curve in group_by(timed, lambda row: (row.series, row.curve)).values():
        *smaller, last = sorted(curve, key=lambda row: row["gpus"])
        if len({row["gpus"] for row in curve}) > 2:
            try:
                yield _predicted(folder, records, smaller, last, machine)
            except RunError as error:
                yield f"{last['framework']}, {last['model']}, {last.devices}: {error}"


def _predicted(
    folder: Path, records: Records, smaller: list[Measurement], last: Measurement, machine: Machine
) -> Largest:
    paths = {run["path"] for row in smaller for run in row.runs}
    (attempt,) = records.named([last.runs[0]["path"]]).values()
    config, results = (
        recorded_configuration(attempt.record["config"]),
        Results(folder, [*records.named(paths).values()]),
    )
    learned = results.learned(config, machine)
    if learned is None:
        raise Unsupported("no smaller run of it can be a base")

    def prediction(inputs: Inputs) -> Prediction:
        row = predict(config, last["gpus"], inputs)
        if row.step_s is None:
            raise Unsupported(row.reason)
        return row

    return Largest(
        last,
        tuple(sorted({row["gpus"] for row in smaller})),
        prediction(Inputs(machine, lambda asked: results.computation(asked, machine))),
        prediction(Inputs(learned.machine, lambda asked: results.computation(asked, learned.machine), learned=learned)),
    )
