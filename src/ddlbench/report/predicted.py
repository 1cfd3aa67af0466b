"""`--predict CLUSTER`: beside each measurement what the oracle predicts from the campaign's own runs on one device.

Runs on one device are what the predictions are calibrated with, so they have none themselves. A published measurement
is predicted from the base in its source; `--predict published` predicts these alone. Where an input is missing, the
cells are empty and a line says why. ParaDL (Kahira et al. 2021) proposes predictions as a detector of abnormal runs: a
measurement outside the band of 95 % of its prediction gets a flag.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from dataclasses import replace

from ddlbench.config.compose import recorded_configuration
from ddlbench.errors import RunError, Unsupported
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import machine_of
from ddlbench.oracle.predictor import Inputs, predict
from ddlbench.oracle.runs import Results
from ddlbench.predict.grading.grade import predicted_s
from ddlbench.predict.grading.points import Point, point
from ddlbench.results.reading.attempts import Attempt, Records, read_published, reason_of
from ddlbench.results.reading.published import csv_row
from ddlbench.results.rows import OWN, PUBLISHED, Row, without_data_wait
from ddlbench.results.tables.measurement import Measurement, devices, duration
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.results.tables.run_rows import attempt_row
from ddlbench.results.tables.tables import Tables
from ddlbench.texts import first_few

NAMED = 5  # rows that a warning names
# Columns of runs.csv that a base shares with what is predicted from it; the oracle compares model, sizes and precision.
ALIKE = ("device", "device_model", "torch", "cuda", "data", "loader")


def with_predictions(tables: Tables, records: Records, cluster: str) -> Tables:
    """The tables with predicted_* columns, and a warning for each row that is outside its band or cannot be predicted.
    UserError for an unknown cluster. cluster: "published" for published measurements alone"""
    machine = None if cluster == PUBLISHED else machine_of(cluster)
    single = [run for run in tables.run_rows if run["gpus"] == 1 and run["throughput_samples_per_s"]]
    several = [
        row
        for row in tables.measurements
        if row["status"] == "ok" and row["mode"] == "train" and row["sample_time_s"] and (row["gpus"] or 1) > 1
    ]
    needed = (*single, *(measurement.runs[0] for measurement in several))
    attempts = records.named({run["path"] for run in needed}) if machine else {}
    runs = {run["path"]: attempt_row(attempts[run["path"]]) for run in single if machine}
    published = [attempt for file in records.published for attempt in read_published(file)]
    stated = {attempt.name: csv_row(attempt.record, line) for line, attempt in enumerate(published, 1)}
    columns, missing = dict[Measurement, Row](), defaultdict[str, set[str]](set)  # missing: names by their reason
    for measurement in several:
        row, run = measurement.row, measurement.runs[0]
        try:
            if row["origin"] == PUBLISHED and row["own_base_gpus"] != row["gpus"]:
                predicted = _from_its_base(row, point(stated[run["path"]], list(stated.values())))
            elif row["origin"] == OWN and machine:
                bases = [runs[base["path"]] for base in single if all(base[name] == run[name] for name in ALIKE)]
                predicted = _of_own(row, attempts[run["path"]], bases, machine)
            else:
                continue
            columns[measurement] = with_error(row, predicted)
        except Exception as error:  # whatever one record holds, the others are predicted
            text = str(error) if isinstance(error, RunError) else f"its record cannot be used ({reason_of(error)})"
            missing[" ".join(text.split())].add(_name(row))
    rows = [replace(row, row=row.row | columns.get(row, {})) for row in tables.measurements]
    flagged = [f"{_name(row)}: {row['predicted_flag']}" for row in rows if row["predicted_flag"]]
    listed = {reason: ", ".join(first_few(sorted(names), NAMED)) for reason, names in missing.items()}
    unknown = [f"no prediction of {names}: {reason}" for reason, names in listed.items()]
    warnings = [*tables.warnings, *dict.fromkeys(flagged), *unknown]
    return replace(tables, scaling_rows=rows, warnings=warnings)


def _of_own(row: Row, attempt: Attempt, bases: list[AttemptRow], machine: Machine) -> Row:
    """The predicted_* columns of an own measurement. Unsupported if the run was not on such a cluster, or its ranks
    were not spread over the nodes as the oracle spreads them; Unsupported or UserError if an input is missing.

    attempt: one of the row's repeats; bases: on one device, comparable with it
    """
    model = "cpu" if row["device"] == "cpu" else row["device_model"]
    if model != machine.device.name:
        raise Unsupported(f"its device is {model}, that of cluster {machine.name} is {machine.device.name}")
    hosts = set(attempt.record["launch"]["hosts"] or [])
    if machine.device.type == "cpu" and hosts != {platform.node()}:
        raise Unsupported(f"it ran on {', '.join(sorted(hosts))}, of which this machine knows nothing")
    if row["gpus"] != machine.per_node(row["gpus"]) * row["nodes"]:
        raise Unsupported(f"{row['nodes']} nodes of cluster {machine.name} have another number of devices")
    config = recorded_configuration(attempt.record["config"])
    results = Results(attempt.path.parents[1], bases)
    inputs = Inputs(machine, lambda asked: results.computation(asked, machine))
    prediction = predict(config, row["gpus"], inputs)
    if prediction.status != "ok":
        raise Unsupported(prediction.reason)
    assert prediction.memory_bytes is not None
    memory, allocated = round(prediction.memory_bytes), row["memory_allocated_peak_bytes"]  # none on the CPU
    return {
        "predicted_step_s": prediction.step_s,
        "predicted_low_s": prediction.low_95_s,
        "predicted_high_s": prediction.high_95_s,
        "predicted_compute_s": prediction.compute_s,
        "predicted_comm_exposed_s": prediction.comm_exposed_s,
        "predicted_bubble_s": prediction.bubble_s,
        "predicted_message_bytes": round(sum(message["bytes_"] for message in prediction.sent)),
        "predicted_memory_bytes": memory,
        "predicted_memory_error": (memory - allocated) / allocated if allocated else None,
        "predicted_from": "; ".join((prediction.basis or "", *prediction.marks)),
    }


def _from_its_base(row: Row, stated: Point) -> Row:
    """The predicted_* columns of a published measurement. UserError or Unsupported if it cannot be predicted."""
    base = stated.base
    start = (
        f"{devices(base.gpus, row['device'])} of the same source: {base.samples} samples in {duration(base.seconds)}"
    )
    graded = stated.graded(start, predicted_s(stated))
    return {
        "predicted_step_s": graded["predicted_s"],
        "predicted_low_s": graded["low_95_s"],
        "predicted_high_s": graded["high_95_s"],
        "predicted_from": start,
    }


def with_error(row: Row, predicted: Row) -> Row:
    """The predicted_* columns with error and flag. The error excludes waiting for data, which is not predicted."""
    measured_s = without_data_wait(row["sample_time_s"], row)
    sample_s = predicted["predicted_step_s"] / row["global_batch"]
    error = {"predicted_sample_time_s": sample_s, "predicted_error": (sample_s - measured_s) / measured_s}
    flag = _flag(row | predicted | error, measured_s * row["global_batch"])
    return predicted | error | {"predicted_flag": flag}


def _flag(row: Row, measured_s: float) -> str | None:
    """The flag of a row outside its band, with the component that deviates most in the same direction; None for a row
    within it. measured_s: seconds of a step without waiting for data"""
    low_s, high_s = row["predicted_low_s"], row["predicted_high_s"]
    if low_s is None or high_s is None or low_s <= measured_s <= high_s:
        return None
    text = (
        f"outside the band of its prediction: a step took {duration(measured_s)}, {duration(row['predicted_step_s'])} "
        f"predicted (95 %: {duration(low_s)} to {duration(high_s)})"
    )
    window_step_s, bubble_s = row["profile_step_time_s"], row["predicted_bubble_s"]
    if window_step_s is None or row["compute_share"] is None:
        return f"{text} (no profiled window says which part of it)"
    # A stage that waits for another one waits in communication. The oracle predicts no idle device.
    sending = "communication with the pipeline's bubble" if bubble_s else "exposed communication"
    parts = {
        "computation": (row["compute_share"], row["predicted_compute_s"]),
        sending: (row["comm_exposed_share"], row["predicted_comm_exposed_s"] + bubble_s),
        "idle time": (row["idle_share"], 0.0),
    }
    seconds = {part: ((share or 0.0) * window_step_s, expected) for part, (share, expected) in parts.items()}
    sign = -1 if row["predicted_error"] < 0 else 1
    part, (took, expected) = max(seconds.items(), key=lambda item: sign * (item[1][1] - item[1][0]))
    return f"{text}; in the profiled window {part} took {duration(took)}, {duration(expected)} predicted"


def _name(row: Row | Measurement) -> str:
    return f"{row['framework']}, {row['model']}, {devices(row['gpus'], row['device'])}"
