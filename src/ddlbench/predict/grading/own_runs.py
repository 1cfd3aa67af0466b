"""--grade RESULTS: own runs as measurements. Of each curve with at least three numbers of devices the largest one is
predicted, from the run on the fewest devices alone and from all smaller numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ddlbench.config.compose import recorded_configuration
from ddlbench.config.schema import Config
from ddlbench.errors import RunError, Unsupported
from ddlbench.oracle import bands
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import Learned
from ddlbench.oracle.predictor import Inputs, predict
from ddlbench.oracle.runs import Results
from ddlbench.predict.grading.points import Words
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.rows import OWN, Row, group_by
from ddlbench.results.tables.measurement import Measurement, devices
from ddlbench.results.tables.tables import make_tables


def graded_runs(folder: Path, machine: Machine, left_out: list[str]) -> Iterator[tuple[Row, Row]]:
    """The largest measurement of each curve, predicted from the fewest devices and from all smaller numbers. `left_out`
    gets the reason of one that has no prediction. UserError for a folder without records."""
    records = read_all([folder])
    rows = [row for row in make_tables(records).measurements if row["origin"] == OWN and row["mode"] == "train"]
    timed = [row for row in rows if row["status"] == "ok" and row["sample_time_s"] and row["gpus"]]
    curves = group_by(timed, lambda row: (row.series, row.curve)).values()
    for number, curve in enumerate((curve for curve in curves if len({row["gpus"] for row in curve}) > 2), 1):
        *smaller, last = sorted(curve, key=lambda row: row["gpus"])
        stated = Words(number, folder.name, str(last["model"]), last.curve, machine.device.name, "")
        paths = {run["path"] for row in smaller for run in row.runs}
        results = Results(folder, [*records.named(paths).values()])
        try:
            (attempt,) = records.named([last.runs[0]["path"]]).values()
            config = recorded_configuration(attempt.record["config"])
            yield _graded(stated, last, config, results, sorted({row["gpus"] for row in smaller}), machine)
        except RunError as error:
            left_out.append(f"{last['framework']}, {last['model']}, {last.devices}: {error}")


def _graded(
    stated: Words, last: Measurement, config: Config, results: Results, counts: Sequence[int], machine: Machine
) -> tuple[Row, Row]:
    """counts: the smaller numbers of devices, whose runs are `results`"""
    learned = results.learned(config, machine)
    if learned is None:
        raise Unsupported("no smaller run of it can be a base")

    def graded(base: str, machine: Machine, learned: Learned | None = None) -> Row:
        row = predict(config, gpus, Inputs(machine, lambda asked: results.computation(asked, machine), learned=learned))
        if row.step_s is None:
            raise Unsupported(row.reason)
        band = bands.band(row.framework, machine.nodes(gpus), machine.device.type, learned is not None)
        return stated.graded(gpus, base, last.busy_step_s(last["sample_time_s"]), row.step_s, band)

    gpus, device = last["gpus"], last["device"]
    all_counts = " and ".join((", ".join(map(str, counts[:-1])), devices(counts[-1], device)))
    return graded(devices(counts[0], device), machine), graded(all_counts, learned.machine, learned)
